"""What a planner makes of the figures of compilers, which are written by hand."""

import dataclasses
from typing import Any

import pytest
from step_factories import HEAD, STACK, adam_step

from optax_offload import aot
from optax_offload._places.step_options import Options
from optax_offload._plan import budget
from optax_offload._plan.budget import Budget, PlanRequest
from optax_offload._plan.candidates import CompiledCandidate, traced
from optax_offload._plan.planner import Planner
from optax_offload._plan.search import Search
from optax_offload._plan.state import movable_state
from optax_offload._plan.step import StepFactory, record
from optax_offload._plan.variants import Outlook, Variant

GIB = 2**30
H100 = aot.Target("h100")
PARAMETERS = STACK + HEAD
# The moments of the layers, then those of the head.
EVERY = frozenset(range(4))
MOST = Options(late_gradients="recompute", residuals="host")


def time_of(seconds, compute_seconds):
    """A modeled time."""
    return aot.StepTime(seconds, compute_seconds, 0, 0, 0, 0, 0, 0, ())


def planner_of(*, host_bytes=None, device_bytes=100, target=H100):
    """A planner of a step whose facts are known, and that has compiled nothing."""
    asked = PlanRequest(Budget(device_bytes, host_bytes))
    planner = Planner(StepFactory(adam_step, target), asked)
    planner._trace()
    return planner


@pytest.fixture
def figures(monkeypatch):
    """A compiler that gives these, whatever the step."""

    def give(*, temporary=0, on_host=0, used=0):
        peak = aot.Peak(used - temporary, temporary, 0, 0, on_host, 0, 0, 0)
        found = aot.Measured(used, peak, time_of(1.0, 0.5))
        monkeypatch.setattr(aot, "measure", lambda *_, **options: found)

    return give


def test_the_settings_of_a_process_are_for_its_device_and_its_host(figures):
    """More of the device than JAX takes by itself, more of the host than the plugin."""
    used, on_host = int(0.85 * H100.memory_bytes), 90 * GIB
    figures(used=used, temporary=GIB, on_host=on_host)
    planner = Planner(
        StepFactory(adam_step, H100),
        PlanRequest(budget.checked_budget(None, None, H100)),
    )
    planner.run()
    plan = planner.plan()
    assert (plan.after.used_bytes, plan.after.host_bytes) == (used, on_host)
    assert plan.environment == {
        "XLA_CLIENT_MEM_FRACTION": "0.87",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "99",
    }
    assert sum(plan.after.parts.values()) == used
    known = plan.after.parts["gradients"] + plan.after.parts["other temporaries"]
    assert known == GIB, "no more is temporary than the compiler says"


def test_the_step_as_given_is_compiled_once(figures, monkeypatch):
    """The search goes on from it, and what fills the device is told by its facts."""
    figures(used=9 * PARAMETERS, temporary=5 * PARAMETERS)
    given: Any = aot.measure
    asked = []
    monkeypatch.setattr(aot, "measure", lambda *a, **k: asked.append(a) or given(*a))
    planner = Planner(StepFactory(adam_step, H100), PlanRequest(Budget(100)))
    planner.run()
    assert len(asked) == len(planner.compiled) > 1
    plain, *others = planner.compiled
    assert plain.variant == Variant()
    assert Variant() not in [c.variant for c in others]
    assert plain.parts["residuals"] == planner._facts.residual_bytes > 0


def test_bytes_are_those_of_each_device():
    """Of parameters and of state that eight devices share."""
    whole, shared = (
        planner_of(target=aot.Target(name))._facts.sizes for name in ("h100", "h100:8")
    )
    assert whole.parameters == {"device": 0, "rows": STACK, "all": PARAMETERS}
    assert whole.patterns[()] == (STACK, STACK, HEAD, HEAD)
    assert shared.parameters == {
        "device": 0,
        "rows": STACK // 8,
        "all": PARAMETERS // 8,
    }
    assert shared.patterns[()] == (STACK // 8, STACK // 8, HEAD // 8, HEAD // 8)
    assert shared.all_parameters == PARAMETERS // 8


def test_products_are_those_of_each_device():
    """The same products on eight of them take each an eighth."""
    found = []
    for name in ("h100", "h100:8"):
        factory = StepFactory(adam_step, aot.Target(name))
        state = movable_state(record(factory), None, factory.target.device_count)
        found.append(traced(factory, state, Variant(EVERY, (), "all", MOST)).flops)
    assert found[0] == 8 * found[1] > 0


def test_computation_is_what_the_program_takes_without_its_transfers():
    """What a refused program would take is known from its products alone."""
    planner = planner_of()
    flops = H100.chip.flops_per_second * 3
    planner._facts = dataclasses.replace(planner._facts, flops=flops)
    plain = CompiledCandidate(Variant(), 0, 200, None, False, 0.0, {})
    planner._known[Variant()] = plain
    planner._searching()
    assert planner._outlook.compute_seconds == pytest.approx(3.0)
    timed = dataclasses.replace(plain, time=time_of(5.0, 2.0))
    planner._known[Variant()] = timed
    planner._searching()
    assert planner._outlook.compute_seconds == 2.0
    assert planner._outlook.plain_bytes == 200


def outlook_of(planner):
    """The outlook of a planner, of a plain step that computes for a second."""
    link = H100.chip.link.bytes_per_second
    return Outlook(planner._facts, 8 * PARAMETERS, 1.0, link)


@pytest.mark.parametrize(
    ("host_mib", "which", "kept"),
    [
        (None, "device", None),
        (160, "device", None),
        (100, "device", {0, 2, 3}),
        (64, "device", {0}),
        (40, "device", {2, 3}),
        (15, "device", None),
        (180, "all", {0, 2, 3}),
    ],
)
def test_as_much_state_as_the_host_has_room_for(host_mib, which, kept):
    """In the order in which state should move, and none that has no room."""
    planner = planner_of(host_bytes=host_mib and host_mib * 2**20)
    planner._outlook = outlook_of(planner)
    options = Options(late_gradients="recompute")
    variant = Variant(EVERY, parameters=which, options=options)
    found = planner._within_host(variant)
    assert (found and set(found.state)) == kept
    if found is not None:
        assert found == dataclasses.replace(variant, state=found.state)


def less_of(state, *, step_seconds=2.0, device_bytes=8 * PARAMETERS):
    """The selections that are compiled to move less of a state than all of it."""
    planner = planner_of(device_bytes=device_bytes)
    planner._outlook = outlook_of(planner)
    asked = []

    def found(variant):
        moved = planner._facts.sizes.moved_state(variant)
        used = device_bytes + HEAD - moved
        if variant.state != state:
            asked.append(variant.state)
        return CompiledCandidate(
            *(variant, moved, used, None, used <= device_bytes, 1.0, {}),
            time=time_of(step_seconds, 1.0),
        )

    planner._search = Search([], planner._outlook, found, planner._asked.budget, {})
    planner._search.ask(Variant(state))
    planner._move_less()
    return asked


def test_less_is_moved_of_what_the_best_way_moves():
    """Never what it leaves on the device: the host may have no room for that."""
    state = frozenset([1, 2, 3])
    asked = less_of(state)
    assert asked
    assert all(selection < state for selection in asked)


def test_nothing_less_is_tried_where_little_waits_for_the_link():
    """Of a step that waits for a fiftieth of its time at most that can be gained."""
    assert less_of(frozenset([1, 2, 3]), step_seconds=1.02) == []
    assert less_of(frozenset([1, 2, 3]), step_seconds=2.0) != []


def test_a_window_is_part_of_the_plan():
    """The one that the way was compiled with; else the library chooses."""
    state = planner_of()._states[()]
    assert Variant(EVERY).config(state).window_bytes is None
    assert Variant(EVERY, window_bytes=2**23).config(state).window_bytes == 2**23

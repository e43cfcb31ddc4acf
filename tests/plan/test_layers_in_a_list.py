"""A step whose layers are a list: which of its ways are programs of their own."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from limited import limited
from step_factories import MIB

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground import compat
from optax_offload._places.step_options import Options
from optax_offload._plan.budget import Budget, PlanRequest
from optax_offload._plan.planner import Planner
from optax_offload._plan.step import StepFactory
from optax_offload._plan.variants import (
    WITHOUT_HIDING,
    WITHOUT_OPTIONS,
    Outlook,
    Planned,
    Sizes,
    StepFacts,
    Variant,
)
from optax_offload.aot import measured

GIB = 2**30
LAYERS, WIDTH, LAYER = 10, 2048, 16 * MIB


def listed_step(offload, target):
    """Layers of 16 MiB in a list, with Adam."""
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = [w] * LAYERS
    tx = offload(optax.adam(1e-3))

    def step(params, state, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.sum(y)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    x = jax.ShapeDtypeStruct((2048, WIDTH), jnp.float32)
    args = params, oo.eval_shape(tx.init, params), x
    return oo.Step(step, args, donate_argnums=(0, 1))


@pytest.fixture
def compiled(monkeypatch):
    """The programs that were compiled, by a compiler that needs 800 MiB for each."""
    texts = []
    peak = aot.Peak(800 * MIB, 0, 0, 0, 0, 0, 0, 0)
    time = aot.StepTime(1.0, 0.5, 0, 0, 0, 0, 0, 0, ())

    def compiling(lowered, target, link):
        texts.append(lowered.as_text())
        return aot.Measured(800 * MIB, peak, time)

    monkeypatch.setattr(measured, "_measured", compiling)
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(monkeypatch, segment_bytes=LAYER, least_part=1)
    return texts


def planned():
    """What has looked for a plan, and found that nothing fits."""
    factory = StepFactory(listed_step, aot.Target("h100"))
    planner = Planner(factory, PlanRequest(Budget(100 * MIB)))
    planner.run()
    return planner


def test_each_program_is_compiled_once(compiled):
    """Options that change nothing make no other way, and equal texts no other row."""
    table = planned().alternatives
    assert compiled
    assert max(collections.Counter(compiled).values()) == 1
    assert len(table.rows) == len(compiled)
    assert not any("nothing moved" in row.what for row in table.rows)
    (same,) = (line for line in table.not_compiled if "of a way above" in line)
    assert same.startswith("not compiled: 2 ways that make the program of a way above")


def test_rows_say_which_other_ways_are_their_program(monkeypatch, compiled):
    """Where only the programs tell, as no plan of them was made."""
    monkeypatch.setattr("optax_offload._plan.planner.planned", lambda *_: {})
    table = planned().alternatives
    assert max(collections.Counter(compiled).values()) == 1
    assert len(table.rows) == len(compiled)
    plain = next(row for row in table.rows if row.what == "as given")
    assert plain.text == "as given ('nothing moved; fused': the same program)"
    assert plain.text in str(table)


@pytest.mark.parametrize("overlaps", [False, True])
def test_turns_that_hide_nothing_take_as_long_as_all_transfers(overlaps):
    """As before Hopper. Residuals count as the plan of a way says, fused or not."""
    sizes = Sizes(
        state={(): 2 * GIB},
        given_state={(): 0},
        patterns={(): (2 * GIB,)},
        parameters={"device": 0, "rows": GIB, "all": GIB},
        all_parameters=GIB,
    )
    way = Variant(frozenset([0]), options=WITHOUT_OPTIONS)
    same = dataclasses.replace(way, options=Options(residuals="host"))
    other = dataclasses.replace(way, options=WITHOUT_HIDING)
    known = {way: Planned(GIB, GIB, True)}
    known |= dict.fromkeys((same, other), Planned(0, 0, False))
    facts = StepFacts(sizes, gradient_bytes=GIB, overlaps=overlaps, planned=known)
    outlook = Outlook(facts, 9 * GIB, 1.0, GIB)
    found = outlook(way)
    assert found.seconds == (3.0 if overlaps else 7.0)
    assert found.device_bytes == (9 - 2 - 1 - 1) * GIB
    others = [outlook(x).is_other for x in (way, same, other)]
    assert others == [False, True, False]
    assert outlook(same).host_bytes == 2 * GIB


def test_chips_before_hopper_overlap_nothing_unasked():
    """F83."""
    names = ("h100", "v5e:1x1", "rtx4090", "a100-80")
    found = [aot.Target(name).chip.overlaps for name in names]
    assert found == [True, True, False, False]

"""The schedule of an update: its groups, their order, and who waits for whom."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from updates import plan_of, stacked, traced

import optax_offload as oo
from optax_offload._ground import compat
from optax_offload._schedule import schedule as scheduled
from optax_offload._schedule.updates.update import Alone

pytestmark = pytest.mark.usefixtures("runs_once")

SHAPE = (8, 4)
NBYTES = 8 * 4 * 4


def layers(n):
    """So many layers of one shape."""
    return {f"layers_{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(n)}


def test_multi_steps_is_not_tied_by_its_cond():
    """Its predicate is the constant False: the cond is the branch."""
    tx = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
    keeps, moves = scheduled(traced(tx, layers(3))).straights()
    assert [len(s.groups) for s in (keeps, moves)] == [3, 3]


def by_median(of):
    """Divides updates by what needs the numbers of all leaves together."""

    def update(updates, state, params=None):
        leaves = jax.tree.leaves(of(updates, state))
        middle = jnp.median(jnp.concatenate([*map(jnp.ravel, leaves)]))
        return jax.tree.map(lambda u: u / middle, updates), state

    return optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p), update
    )


def test_a_median_of_accumulated_gradients():
    """The warning names it, what it is of, what to write instead, and the call."""
    inner = optax.chain(by_median(lambda updates, state: updates), optax.adam(1e-3))
    params = dict.fromkeys("abc", jnp.ones(SHAPE))

    def lower(*first):
        rules = [*first, oo.Rule(".*", min_bytes=8)]
        tx = oo.offload(optax.MultiSteps(inner, 4), rules, window_bytes=4 * NBYTES)
        jax.jit(tx.update).lower(params, tx.init(params), params)

    with pytest.warns(
        oo.OffloadWarning,
        match=r"'concatenate' in by_median \(.*test_schedule.py:\d+\) takes "
        r"the state of several parameters at once.* Instead, take it of each step's "
        r"own gradients, .* Rule\('acc_grads/\.\*', 'device'\) as the first rule$",
    ) as warned:
        lower()
    assert {w.filename for w in warned} == {__file__}
    lower(oo.Rule("acc_grads/.*", "device"))


def test_dead_equations_tie_nothing():
    """What no output needs is not computed."""

    def update(updates, state, params=None):
        optax.tree.norm(state)
        return updates, jax.tree.map(lambda s: s * 2, state)

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    schedule, _ = plan_of(tx, layers(3))
    assert [len(g.loads) for g in schedule.groups] == [1, 1, 1]


def waits_of(schedule):
    """For each group in no loop how many, from the first, must have been updated."""
    waits = [0]
    for stage in (s for s in schedule.stages if isinstance(s, Alone)):
        waits.append(max((waits[-1], *(at + 1 for at in stage.after))))
    return tuple(waits[1:])


@pytest.mark.parametrize(
    ("window_bytes", "waits"),
    [
        (1, (0, 1, 2, 3)),
        (2 * NBYTES, (0, 1, 2, 3)),
        (4 * NBYTES, (0, 0, 1, 2)),
        (5 * NBYTES, (0, 0, 1, 2)),
        (8 * NBYTES, (0, 0, 0, 0)),
        (None, (0, 0, 0, 0)),
    ],
)
def test_groups_wait_until_they_fit(window_bytes, waits):
    """A group runs beside as many before it as the window holds.

    In no loop, without buffers to write into, and in one, which has several only if two
    of them fit. A loop has two at once of what cannot be sliced, however many fit: what
    it computes with can take more memory than what is loaded.
    """
    adam, params = optax.adam(1e-3), layers(4)
    schedule, _ = plan_of(adam, params, window_bytes=window_bytes, in_place=False)
    assert waits_of(schedule) == waits
    assert schedule.loops == ()
    schedule, _ = plan_of(adam, params, window_bytes=window_bytes)
    one_by_one = waits == (0, 1, 2, 3)
    in_loop = waits if any(waits) else (0, 0, 1, 2)
    assert [loop.waits for loop in schedule.loops] == (
        [(0,)] * 4 if one_by_one else [in_loop]
    )
    assert all(loop.slices == 1 and not loop.rows for loop in schedule.loops)


def test_a_group_has_what_only_it_needs():
    """In a loop: else what is fused with its update would be computed before."""

    def in_no_group(**kwargs):
        schedule, _ = plan_of(optax.adam(1e-3), layers(4), **kwargs)
        return len(schedule.shared)

    # Two products for each of four gradients.
    assert in_no_group(in_place=False) - in_no_group() >= 4 * 2


def test_summary():
    """What the log says of an update."""
    schedule, _ = plan_of(optax.adam(1e-3), layers(2), window_bytes=1000)
    assert str(schedule) == (
        "2 groups of 512 B in all, the largest of 256 B\n"
        "window of 1000 B: as asked\n"
        "2 groups, each updated whole, of 256 B\n"
        "2 groups whole: no axis to slice a leaf of shape (8, 4)"
    )


def test_kernels_of_older_compilers_are_said(monkeypatch):
    """Where a GPU's copies would be of other rows (U10), and there are slices."""

    def text(shape, right):
        monkeypatch.setattr(compat, "COPIES_AT_POSITIONS", right)
        return str(plan_of(optax.adam(1e-3), stacked(shape), slice_axis=0)[0])

    said = f"on GPUs, with JAX {jax.__version__}, kernels move these slices"
    assert said in text((4096, 1024), right=False)
    assert said not in text((4096, 1024), right=True)
    assert said not in text((1, 8), right=False)


def test_planning_is_linear_in_leaves():
    """Each equation is in one place only, and each leaf adds as many as the last."""

    def equations(n):
        schedule, _ = plan_of(optax.adam(1e-3), layers(n))
        used = [i for g in schedule.groups for i in g.equations] + [*schedule.shared]
        assert len(used) == len(set(used))
        return len(used)

    assert equations(50) - equations(5) == 45 * (equations(6) - equations(5))


@pytest.mark.parametrize(
    ("shape", "dtype", "unit"),
    [
        ((24, 16, 64), jnp.float32, 1),  # 24 rows would fill lanes even less
        ((128, 4, 32), jnp.float32, 128),  # a TPU puts the 128 into the lanes
        ((64, 256), jnp.float32, 8),
        ((64, 256), jnp.bfloat16, 16),
        ((24, 4, 128), jnp.bfloat16, 16),
        ((24, 16, 128), jnp.bfloat16, 1),
        ((4096,), jnp.float32, 1024),
    ],
)
def test_slices_are_whole_tiles(shape, dtype, unit):
    """What a v5e's compiler rejects otherwise."""
    tx = optax.trace(0.9)
    schedule, _ = plan_of(tx, stacked(shape, dtype=dtype), slice_axis=0, window_bytes=1)
    if shape[0] < 2 * unit:
        assert schedule.whole[0].whole_reason == f"{shape[0]} rows, in units of {unit}"
    else:
        assert schedule.groups[0].row_multiple == unit


def test_a_branch_has_a_schedule_for_each_version():
    """Planned before anything runs; both are printed."""
    tx = optax.apply_if_finite(optax.adam(1e-3), 3)
    schedule = scheduled(traced(tx, layers(3), path=".*(mu|nu).*"))
    keeps, moves = schedule.straights()
    assert [len(s.groups) for s in (keeps, moves)] == [0, 3]
    lines = str(schedule).splitlines()
    assert lines[0] == "in a step that keeps its state:"
    assert lines[1 : 1 + len(str(keeps).splitlines())] == [
        f"  {line}" for line in str(keeps).splitlines()
    ]
    assert f"in a step that updates it:\n  {str(moves).splitlines()[0]}" in str(
        schedule
    )
    assert "print it" in repr(schedule)


def test_an_update_that_moves_nothing_says_why():
    """By reason; the report of its state says the same."""
    params = {f"w{i}": jax.ShapeDtypeStruct((100, 100), jnp.float32) for i in range(3)}
    tx = oo.offload(optax.adam(1e-3))
    expected = (
        "nothing moves to host memory. 7 leaves: under 64.00 KiB (rule 0 '.*'). "
        "Rule(pattern, min_bytes=...) moves smaller leaves"
    )
    assert str(tx.schedule(params)) == expected
    with pytest.warns(oo.OffloadWarning, match=re.escape(expected)):
        state = oo.eval_shape(tx.init, params)
    report = oo.memory_report(state, ".*").check()
    assert str(report).endswith(f"\n\n{expected}")
    assert "device, none planned for the host; print" in repr(report)
    for rules in (oo.Rule(".*", min_bytes=1000), None):
        assert "nothing moves" not in str(oo.memory_report(state, rules))
    tx = oo.offload(optax.adam(1e-3), [oo.Rule(".*mu.*", "device"), ".*/w0"])
    assert str(tx.schedule(params)).startswith(
        "nothing moves to host memory. 3 leaves: no rule matches; 3 leaves: rule 0 "
        "'.*mu.*'; 1 leaf: under 64.00 KiB (rule 1 '.*/w0'). Rule"
    )
    tx = oo.offload(optax.adam(1e-3), oo.Rule(".*", min_bytes=1000))
    assert str(tx.schedule(params)).startswith("3 groups of")

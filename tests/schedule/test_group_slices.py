"""How a group is updated in slices, and in which parts."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from small_updates import update_of

from optax_offload._ground import compat
from optax_offload._schedule.updates.groups import group

pytestmark = pytest.mark.usefixtures("runs_once")

STACK = 16, 128, 256


def only(fn, state, gradient=STACK, **options):
    """An update of one gradient and of state, and its only group."""
    update = update_of(fn, [gradient], state, **options)
    (found,) = (g for g in group(update).groups if g.loads)
    return update, found


def adam(g, m, v):
    """Two moments, of which the update needs both."""
    m, v = 0.9 * m + g, 0.9 * v + g * g
    return m / jnp.sqrt(v + 1e-3), m, v


def trace(g, m):
    """One moment."""
    m = 0.9 * m + g
    return m, m


def outputs(update, parts):
    """The paths of the outputs of each part."""
    return [sorted(update.outputs[k].path for k in p.outputs) for p in parts]


def test_slices_compute_what_the_update_does():
    """For some rows, from those of its loads and gradients."""
    update, found = only(adam, [STACK] * 2)
    program = update.program
    rows = found.in_rows
    args = [np.full(STACK, x, np.float32) for x in (0.1, 0.2, 0.3)]
    args = [x * np.arange(1, 17, dtype=np.float32)[:, None, None] for x in args]
    given = dict(zip(program.invars, args, strict=True))
    jaxpr = rows.jaxpr(2, program.debug_info)
    slices = [given[v][3:5] for v in rows.inputs]
    got = jax.core.eval_jaxpr(jaxpr, (), *slices)
    want = dict(zip(program.outvars, adam(*args), strict=True))
    for v, x in zip(rows.outputs, got, strict=True):
        np.testing.assert_allclose(x, want[v][3:5], rtol=1e-5)


def test_buffers():
    """New state is written into the old, the update into its gradient."""
    update, found = only(adam, [STACK] * 2)
    aliases = {update.outputs[t.output].path: t.alias for t in found.targets}
    assert aliases == {"g0": 0, "s0": 1, "s1": 2}
    assert found.in_place
    assert found.whole_reason == ""


def test_two_parts_where_half_of_the_loads_suffice():
    """The first moment is stored while the second is loaded."""
    update, found = only(adam, [STACK] * 2)
    first, second = found.parts
    assert (first.loads, second.loads) == ((1,), (2,))
    assert outputs(update, found.parts) == [["s0"], ["g0", "s1"]]
    m, _ = (update.program.outvars[k] for k in (1, 2))
    assert first.row_local is not None
    assert second.row_local is not None
    assert m in first.row_local.outputs
    assert m in second.row_local.inputs


def test_the_larger_half_is_loaded_first():
    """Of three loads, as of AMSGrad, two; the update comes last."""

    def amsgrad(g, m, v, most):
        m, v = 0.9 * m + g, 0.9 * v + g * g
        most = jnp.maximum(most, v)
        return m / jnp.sqrt(most + 1e-3), m, v, most

    update, found = only(amsgrad, [STACK] * 3)
    assert [part.loads for part in found.parts] == [(1, 2), (3,)]
    assert outputs(update, found.parts) == [["s0", "s1"], ["g0", "s2"]]


@pytest.mark.parametrize(
    ("fn", "state"),
    [
        (trace, [STACK]),
        (lambda g, m, v: (m + v, m + v * g, v + m), [STACK] * 2),
        (adam, [(16, 8, 16)] * 2),
    ],
    ids=["one load", "each needs both", "small"],
)
def test_one_part(fn, state):
    """Of a single load, where every store needs all, and of little to move."""
    _, found = only(fn, state, state[0])
    (part,) = found.parts
    assert part.loads == found.loads
    assert part.outputs == found.outputs
    assert part.row_local == found.row_local


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda g, m: (g, m[::-1] + g), "rev"),
        (lambda g, m: (g, m / jnp.linalg.norm(m)), "reduce_sum"),
        (lambda g, m: (g, m + jnp.cumsum(m, axis=0)), "cumsum"),
    ],
    ids=["order", "norm", "cumsum"],
)
def test_why_it_is_updated_whole(fn, reason):
    """The reason names the equation; it is still written into its buffer."""
    update, found = only(fn, [STACK])
    assert reason in found.whole_reason
    assert found.row_local is None
    assert found.in_place
    (part,) = found.parts
    assert (part.loads, part.outputs) == (found.loads, found.outputs)
    (target,) = found.targets
    assert (update.outputs[target.output].path, target.alias) == ("s0", 1)
    with pytest.raises(TypeError, match=reason):
        found.in_rows  # noqa: B018


def test_whole_and_out_of_place_before_loops_that_run_once(monkeypatch):
    """Older compilers write whole leaves into no buffer in a loop."""
    monkeypatch.setattr(compat, "LOOPS_RUN_ONCE", False)
    _, found = only(lambda g, m: (g, m[::-1] + g), [STACK])
    assert not found.in_place


def test_an_axis_that_was_asked_for():
    """Rows are along it; None means that no axis may be sliced."""
    update, found = only(trace, [(16, 256, 256)], (16, 256, 256), axis=1)
    rows = found.in_rows
    assert rows.rows == 256
    assert {rows.axes[v] for v in rows.outputs} == {1}
    assert rows.axes[update.program.invars[1]] == 1
    _, found = only(trace, [STACK], axis=None)
    assert found.whole_reason == f"no axis to slice a leaf of shape {STACK}"


def test_rows_in_units_of_tiles():
    """Along an axis that is tiled on a TPU slices are of whole tiles."""
    shape = 4096, 256
    _, found = only(trace, [shape], shape)
    assert (found.rows, found.row_multiple) == (4096, 8)
    few = 8, 256
    _, found = only(trace, [few], few)
    assert found.whole_reason == "8 rows, in units of 8"
    _, found = only(trace, [STACK])
    assert found.row_multiple == 1


def test_leaves_of_different_rows():
    """State of another number of rows cannot be sliced beside it."""

    def fn(g, m, v):
        return g + jnp.sum(v), m + g + jnp.sum(v), v + jnp.sum(m)

    _, found = only(fn, [STACK, (8, 128, 256)])
    assert "different numbers of rows" in found.whole_reason


def test_a_type_that_does_not_say_its_axis():
    """The leading of three axes or more is one of layers; of fewer none is."""
    _, found = only(trace, [STACK], axis="auto")
    assert found.rows == 16
    _, found = only(trace, [(64, 256)], (64, 256), axis="auto")
    assert found.whole_reason == "no axis to slice a leaf of shape (64, 256)"


def test_new_state_is_made_in_slices():
    """It replaces nothing: what it is made of is computed slice by slice."""
    layers = 1024, 128, 256

    def fn(g):
        return g, jnp.zeros_like(g) + jnp.sin(g)

    update = update_of(fn, [layers], [], made=[0])
    (found,) = group(update).groups
    assert found.makes
    assert found.loads == ()
    assert found.rows == 1024
    assert {t.alias for t in found.targets} == {None}
    # What is small is not worth a loop.
    update = update_of(fn, [STACK], [], made=[0])
    (found,) = group(update).groups
    assert found.makes
    assert found.row_local is None

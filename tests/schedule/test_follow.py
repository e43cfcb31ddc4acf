"""Gradients that a scan stacks, followed to what a step makes of them."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_jaxprs import names, on_device
from small_steps import scans_of, step_of

from optax_offload._schedule.follow import follow, is_backward, without

ROWS = 4
STACK, ROW = on_device(ROWS, 3), on_device(3)


def gradients(xs):
    """A scan whose two stacked results stand for gradients."""
    return lax.scan(lambda c, x: (c + x, (x * 2.0, x * c)), jnp.ones(3), xs)


def followed(uses, *types, later=()):
    """What follows from the gradients, given their uses.

    Args:
      uses: Takes the two stacked results, what is carried, and further arguments.
      *types: The types of further arguments.
      later: Scans that come later, counted from the first.
    """

    def fn(xs, *others):
        carried, (first, second) = gradients(xs)
        return uses(first, second, carried, *others)

    step = step_of(fn, STACK, *types)
    scan, *others = scans_of(step)
    positions = [others[n].position for n in later]
    stacked = [v for v in scan.body.stacked if v in step.program.used]
    return step, scan, follow(step, scan, stacked, positions)


def test_scan_has_its_operands_and_results():
    """Whole ones, carried ones and rows, by what an iteration does with them."""

    def fn(xs, w):
        carried, rows = lax.scan(lambda c, x: (c * w + x, c), jnp.ones(3), xs)
        return carried, rows

    step = step_of(fn, STACK, ROW)
    (scan,) = scans_of(step)
    xs, w = step.program.invars
    assert (scan.length, list(scan.body.consts), list(scan.body.xs)) == (4, [w], [xs])
    assert len(scan.body.carry) == 1
    assert [*scan.body.carried, *scan.body.stacked] == step.program.outvars
    assert scan.body.stacked[0].aval.shape == STACK.shape
    assert len(scan.body.jaxpr.eqns) >= 2


def test_each_gradient_alone():
    """What no equation joins are two components, each with its result."""
    step, scan, found = followed(lambda a, b, _, m: (0.9 * m + a, b * 2.0), STACK)
    one, other = found.components
    assert [c.gradients for c in (one, other)] == [(v,) for v in scan.body.stacked]
    assert [c.results for c in (one, other)] == [(v,) for v in step.program.outvars]
    assert not one.waits
    assert not other.waits
    assert found.unfused == ()
    assert set(found.rows.outputs) == set(step.program.outvars)
    # The state of it is taken by rows too.
    assert found.rows.axes[step.program.invars[1]] == 0
    assert found.rows.rows == ROWS


def test_gradients_that_an_equation_joins():
    """Both are one component."""
    step, scan, found = followed(lambda a, b, _: (a * b, a + 1.0))
    (both,) = found.components
    assert both.gradients == tuple(scan.body.stacked)
    assert set(both.results) == set(step.program.outvars)


def test_a_norm_is_summed_up():
    """A sum over rows is no result with rows; what needs it waits for the scan."""

    def clip(a, b, _):
        norm = jnp.sqrt(jnp.sum(a * a))
        return a / norm, b * 3.0

    step, _, found = followed(clip)
    clipped, free = found.components
    (summing,) = clipped.sums
    assert step.program.equations[summing.position].primitive.name == "reduce_sum"
    assert clipped.waits
    assert not free.waits
    assert not clipped.late_sums
    assert set(clipped.ends) == {*clipped.results, *summing.operands}
    norms = step.program.equations[summing.position].outvars
    assert found.late.issuperset(norms)


def test_a_norm_that_nothing_needs_again_is_not_waited_for():
    """A sum alone, as for a log, delays no update."""
    _, _, found = followed(lambda a, b, _: (a + 1.0, jnp.sum(b * b)))
    assert [c.waits for c in found.components] == [False, False]
    assert [len(c.sums) for c in found.components] == [0, 1]


def test_a_norm_of_a_norm_is_late():
    """It can be summed up only after the first is known."""

    def twice(a, b, _):
        a = a / jnp.sum(a * a)
        return a / jnp.sum(a * a)

    _, _, found = followed(twice)
    (one,) = found.components
    assert len(one.sums) == 2
    assert [s in one.late_sums for s in one.sums] == [False, True]


def test_what_is_carried_is_late():
    """The end of the scan is known only after all of its rows."""
    _, _, found = followed(lambda a, b, carried: (a * carried[None], b + 1.0))
    assert [c.waits for c in found.components] == [True, False]


def test_what_a_later_scan_makes_is_late():
    """Its results are not there while this one runs; an argument is."""

    def uses(a, b, _, xs):
        after, _ = lax.scan(lambda c, x: (c + x, None), jnp.ones(3), xs)
        return a * after[None], b + 1.0

    _, _, found = followed(uses, STACK, later=[0])
    assert [c.waits for c in found.components] == [True, False]
    _, _, found = followed(uses, STACK)
    assert not any(c.waits for c in found.components)


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        (lambda a: a[::-1], "rev needs all of it at once"),
        (lambda a: jnp.cumsum(a, axis=0), "cumsum needs all of it at once"),
        (lambda a: a.reshape(2, 6), "reshape"),
        (lambda a: jnp.sort(a, axis=0), "sort"),
    ],
    ids=["rev", "cumsum", "reshape", "sort"],
)
def test_what_mixes_rows_is_computed_whole(mix, reason):
    """With the reason; the other gradient is followed without it."""
    step, scan, found = followed(lambda a, b, _: (mix(a), b + 1.0))
    first, second = scan.body.stacked
    (unfused,) = found.unfused
    assert unfused.gradient is first
    assert reason in unfused.reason
    (left,) = found.components
    assert left.gradients == (second,)
    assert left.results == (step.program.outvars[1],)


def test_what_is_joined_with_a_mixed_one_is_mixed():
    """Both gradients are left outside, since one equation takes both."""
    _, scan, found = followed(lambda a, b, _: (a + b)[::-1])
    assert {u.gradient for u in found.unfused} == set(scan.body.stacked)
    assert found.components == ()


def test_what_is_unused_does_not_mix():
    """An equation that no result needs is no reason."""

    def uses(a, b, _):
        a[::-1]
        return a + 1.0, b + 1.0

    step, _, found = followed(uses)
    assert "rev" in names(step.program.equations)
    assert found.unfused == ()


def test_without():
    """The gradients that are not among those that are computed whole."""
    _, scan, found = followed(lambda a, b, _: (a[::-1], b + 1.0))
    assert without(scan.body.stacked, found.unfused) == [scan.body.stacked[1]]
    assert without(scan.body.stacked, ()) == list(scan.body.stacked)


def test_rows_are_computed_as_whole():
    """The equations for a row, evaluated for each, make what the step makes."""

    def uses(a, b, _, m):
        new = 0.9 * m + a
        return new, jnp.tanh(new) * b

    step, scan, found = followed(uses, STACK)
    xs = np.arange(12, dtype=np.float32).reshape(ROWS, 3) / 7
    m = xs + 1
    _, (first, second) = gradients(xs)
    want = uses(np.asarray(first), np.asarray(second), None, m)
    given = dict(zip(scan.body.stacked, (first, second), strict=True))
    given[step.program.invars[1]] = m
    one = found.rows.jaxpr(1, step.program.debug_info)
    row = jax.jit(lambda *x: jax.core.eval_jaxpr(one, (), *x))
    for i in range(ROWS):
        got = row(*(given[v][i : i + 1] for v in found.rows.inputs))
        by_name = dict(zip(found.rows.outputs, got, strict=True))
        for v, x in zip(step.program.outvars, want, strict=True):
            np.testing.assert_allclose(by_name[v], x[i : i + 1], rtol=1e-5)


def layers(w, x):
    """A scan forward."""
    return jnp.sum(lax.scan(lambda h, r: (jnp.sin(h * r), None), x, w)[0])


def linear(w, x):
    """A scan that keeps nothing for its backward pass."""
    return jnp.sum(lax.scan(lambda h, r: (2.0 * h + r, None), x, w)[0])


@pytest.mark.parametrize(
    "loss",
    [layers, linear, jax.checkpoint(layers), jax.jit(layers)],
    ids=["plain", "linear", "checkpoint", "jit"],
)
def test_a_backward_scan_is_one(loss):
    """The last of the scans; none forward, nor one that a checkpoint repeats."""
    step = step_of(jax.grad(loss), STACK, ROW)
    found = [is_backward(step.program, s) for s in scans_of(step)]
    assert found == [False] * (len(found) - 1) + [True]


def test_a_scan_of_means_is_not_backward():
    """It stacks something, but it runs against no other."""

    def means(xs):
        return lax.scan(lambda c, x: (c + x, c), jnp.zeros(3), xs, reverse=True)

    step = step_of(means, STACK)
    (scan,) = scans_of(step)
    assert not is_backward(step.program, scan)


def test_a_scan_against_another_is_backward():
    """Without a name of JAX: it takes rows that one in the other direction made."""

    def fn(xs, reverse):
        _, kept = lax.scan(lambda c, x: (c + x, c), jnp.zeros(3), xs)
        kept = lax.optimization_barrier(kept)
        return lax.scan(lambda c, x: (c + x, c), jnp.zeros(3), kept, reverse=reverse)

    for reverse in (True, False):
        step = step_of(lambda xs, reverse=reverse: fn(xs, reverse), STACK)
        first, second = scans_of(step)
        assert not is_backward(step.program, first)
        assert is_backward(step.program, second) == reverse

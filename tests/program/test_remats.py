"""Equations of `jax.checkpoint`: taken apart around scans, or given another body."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex
from small_jaxprs import closed_of, names, on_device, only, values

from optax_offload._program.remats import around, has_scan, opened

STACK, ROW = on_device(4, 3), on_device(3)
W = np.linspace(0.1, 1.2, 12, dtype=np.float32).reshape(4, 3)
X = np.arange(3, dtype=np.float32)


def layers(w, x):
    """A scan over rows of a stack."""
    return lax.scan(lambda h, r: (jnp.tanh(h * r), None), x, w)[0]


def norm(w, x):
    """No scan."""
    return jnp.sum(w) * x


def forward(fn, *types, **how):
    """The equation of a checkpoint that is not differentiated."""
    jaxpr = closed_of(jax.checkpoint(fn, **how), *types).jaxpr
    return only(jaxpr.eqns, "remat2")


def backward(fn, *types, **how):
    """The equation of a checkpoint in a backward pass."""

    def loss(*args):
        return jnp.sum(jax.checkpoint(fn, **how)(*args))

    jaxpr = closed_of(jax.grad(loss), *types).jaxpr
    return only(jaxpr.eqns, "remat2")


def test_has_scan():
    """It has, if a scan is anywhere in it."""
    assert has_scan(forward(layers, STACK, ROW))
    assert has_scan(forward(lambda w, x: jax.jit(layers)(w, x), STACK, ROW))
    assert not has_scan(forward(norm, STACK, ROW))


def test_opened_forward_is_the_body():
    """What is not differentiated has no barrier: there is nothing to keep apart."""
    e = forward(layers, STACK, ROW)
    found = opened(e, e.invars)
    assert names(found.equations) == ["scan"]
    (got,) = values(found.equations, e.invars, found.outvars, (W, X), found.constants)
    np.testing.assert_allclose(got, layers(W, X), rtol=1e-6)


def test_opened_backward_is_behind_a_barrier():
    """All operands but stacks of which scans alone take rows go through it."""
    e = backward(layers, STACK, ROW)
    found = opened(e, e.invars)
    barrier = only(found.equations, "optimization_barrier")
    held = set(barrier.invars)
    assert held
    stacks = [a for a in e.invars if a.aval.shape == STACK.shape]
    assert len(stacks) == 1
    assert held == set(e.invars) - set(stacks)
    for scan in (x for x in found.equations if x.primitive.name == "scan"):
        assert held.isdisjoint(scan.invars)
    args = [np.full(a.aval.shape, 0.5, a.aval.dtype) for a in e.invars]
    got = values(found.equations, e.invars, found.outvars, args, found.constants)
    want = values([e], e.invars, e.outvars, args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_stack_that_is_also_taken_whole_is_held():
    """Joined with the first time it would be kept: so it goes behind the barrier."""

    def decayed(w, x):
        return layers(w, x) + jnp.sum(w**3)

    e = backward(decayed, STACK, ROW)
    barrier = only(opened(e, e.invars).equations, "optimization_barrier")
    assert set(barrier.invars) == set(e.invars)


def test_without_prevent_cse_nothing_is_held():
    """Whoever allows the compiler to join both times gets no barrier."""
    e = backward(layers, STACK, ROW, prevent_cse=False)
    assert "optimization_barrier" not in names(opened(e, e.invars).equations)


def test_a_number_is_not_held():
    """An operand that is a literal has nothing to be joined with."""
    e = backward(layers, STACK, ROW)
    at = next(i for i, a in enumerate(e.invars) if a.aval.shape == ROW.shape)
    aval = e.invars[at].aval
    operands = list(e.invars)
    operands[at] = jex.Literal(np.ones(aval.shape, aval.dtype), aval)
    barrier = only(opened(e, operands).equations, "optimization_barrier")
    assert barrier.invars
    assert all(isinstance(a, jex.Var) for a in barrier.invars)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_around_keeps_what_a_checkpoint_is(prevent_cse):
    """Another body, which may close over values, with the parameters as they were."""
    e = forward(norm, STACK, ROW, prevent_cse=prevent_cse)

    def fn(w, x, outside):
        return around(lambda w, x: [w[0] * x * outside], e, [w, x])

    jaxpr = closed_of(fn, STACK, ROW, on_device()).jaxpr
    found = only(jaxpr.eqns, "remat2")
    assert found.params["prevent_cse"] == e.params["prevent_cse"]
    assert found.params["policy"] == e.params["policy"]
    assert len(found.invars) == 3
    (got,) = values(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, (W, X, np.float32(7)))
    np.testing.assert_allclose(got, 7 * W[0] * X, rtol=1e-6)


def test_around_with_a_flag_for_each_operand():
    """The flags stay those of their operands; what is closed over is kept apart too."""
    e = forward(norm, STACK, ROW)
    e = e.replace(params={**e.params, "prevent_cse": (False, True)})

    def fn(w, x, outside):
        return around(lambda w, x: [w[0] * x * outside], e, [w, x])

    jaxpr = closed_of(fn, STACK, ROW, on_device()).jaxpr
    found = only(jaxpr.eqns, "remat2")
    flags = dict(zip(found.invars, found.params["prevent_cse"], strict=True))
    w, x, outside = jaxpr.invars
    assert flags == {outside: True, w: False, x: True}

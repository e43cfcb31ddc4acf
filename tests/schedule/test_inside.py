"""The bodies of loops and branches are planned as steps of their own."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from small_steps import at_rest, loss, offloaded, stack, taken_apart, train_step

from optax_offload._places.step_options import Options
from optax_offload._schedule import plan, refusals

BYTES = 6 * 8 * 8 * 4
CLIPPED = optax.clip_by_global_norm(1.0)


def planned(fn, tx, **options):
    """The plan of a function of parameters, a state and an input."""
    params = stack()
    state = at_rest(jax.eval_shape(tx.init, params))
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    return plan(taken_apart(fn, params, state, x), Options(**options))


def looped(step):
    """Three steps in a scan."""

    def steps(params, state, x):
        return lax.scan(lambda c, _: (step(*c, x), 0), (params, state), None, 3)[0]

    return steps


def again(step):
    """Steps until parameters are small."""

    def steps(params, state, x):
        return lax.while_loop(
            lambda c: jnp.sum(c[0]) > 1, lambda c: step(*c, x), (params, state)
        )

    return steps


def skipped(step):
    """A step, or none."""

    def steps(params, state, x):
        return lax.cond(x[0, 0] > 0, step, lambda p, s, x: (p, s), params, state, x)

    return steps


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (looped, "scan of 3 iterations, each a step of its own:"),
        (again, "while loop, each a step of its own:"),
        (skipped, "cond, branch 1 of 2, each a step of its own:"),
    ],
)
def test_bodies_are_steps(form, said):
    """The text has their own lines under what they are the body of."""
    tx = offloaded(optax.adam(1e-3))
    found = planned(form(train_step(tx)), tx)
    (inside,) = found.inside.values()
    own = planned(train_step(tx), tx)
    first, *others = str(found).splitlines()
    assert first == said
    assert [line.removeprefix("  ") for line in others] == str(own).splitlines()
    assert found.gradient_bytes == own.gradient_bytes == BYTES
    assert [x.is_streamed for x in inside.plans] == [*[False] * (form is skipped), True]
    assert found.is_streamed
    assert not found.hides_nothing
    assert len(found.steps) == 1 + len(inside.plans)


def test_bodies_of_bodies():
    """Epochs of steps."""
    tx = offloaded(optax.adam(1e-3))
    found = planned(looped(looped(train_step(tx))), tx)
    assert str(found).splitlines()[:2] == [
        "scan of 3 iterations, each a step of its own:",
        "  scan of 3 iterations, each a step of its own:",
    ]
    assert found.gradient_bytes == BYTES


def test_a_body_of_which_nothing_is_fused():
    """It is left as it is, with the reason that was said before."""
    tx = offloaded(optax.adam(1e-3))

    def unrolled(w, x):
        for i in range(len(w)):
            x = jnp.tanh(x @ w[i])
        return jnp.sum(x**2)

    for form, of, options, where in (
        (looped, unrolled, {}, "scan"),
        (looped, loss, {"fuse": False}, "scan"),
        (skipped, unrolled, {}, "cond"),
    ):
        found = planned(form(train_step(tx, of)), tx, **options)
        assert not found.inside
        assert not found.is_streamed
        assert str(found).endswith(f"the update is in a {where}")


def test_an_update_alone_in_a_branch():
    """Gradients from outside of it are left there, and said to be."""
    tx = offloaded(optax.adam(1e-3))

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)

        def update(params, state):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return lax.cond(value > 0, update, lambda *same: same, params, state)

    found = planned(step, tx)
    assert not found.inside
    assert "left outside: the update is in a cond" in str(found)


def test_backward_passes_that_run_again():
    """In each turn of which the number is known."""
    tx = optax.chain(CLIPPED, offloaded(optax.adam(1e-3)))
    once, looped_, skipped_ = (
        planned(form(train_step(tx)), tx, late_gradients="recompute").flops_again
        for form in (lambda step: step, looped, skipped)
    )
    assert once > 0
    assert looped_ == 3 * once
    assert skipped_ == once


def test_microbatches():
    """Their gradients never exist, and the sums of them do."""
    tx = offloaded(optax.adam(1e-3))

    def step(params, state, x):
        def add(total, x):
            return total + jax.grad(loss)(params, x[None]), None

        grads, _ = lax.scan(add, jnp.zeros_like(params), x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = planned(step, tx)
    lines = str(found).splitlines()
    assert lines[:2] == [
        "scan of 2 iterations, each adds its gradients to their sums:",
        "  backward scan of 6 iterations: 1 gradient of 1.50 KiB never on the device "
        "whole",
    ]
    assert (
        "1 gradient of 1.50 KiB left outside: its scan sums it up over all iterations"
    ) in lines
    assert found.gradient_bytes == 0
    assert found.is_streamed
    assert found.schedules()
    assert not planned(step, tx, fuse=False).inside
    (said,) = refusals(planned(step, tx, late_gradients="host"), ["", ""])
    assert "nothing waits: 1 gradient" in said


def test_gradients_of_bodies_that_cannot_wait():
    """What was asked for and is not had is said with the paths of results."""
    tx = optax.chain(CLIPPED, offloaded(optax.adam(1e-3)))

    def with_print(w, x):
        def layer(h, w):
            jax.debug.print("in a layer")
            return jnp.tanh(h @ w), None

        return jnp.sum(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

    found = planned(looped(train_step(tx, with_print)), tx, late_gradients="recompute")
    paths = [f"result {k}" for k in range(len(found.step.program.outvars))]
    (said,) = refusals(found, paths)
    assert "late_gradients='recompute' was asked for" in said
    assert "late_gradients='host' can." in said
    assert "result" in said

"""Gradients that wait: passes over their rows, and the cheaper way to have them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from small_steps import trained, two_matrices

from optax_offload._ground import limits
from optax_offload._places.step_options import Options
from optax_offload._schedule import plan, waiting

CLIP = optax.clip_by_global_norm
SIZE = 6, 8, 8


def two_scans(params, x):
    """A scan over each of two stacks."""

    def layers(h, w):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)[0]

    return jnp.sum(layers(layers(x, params["a"]), params["b"]) ** 2)


def planned(tx, loss=two_matrices, late_gradients="auto"):
    """A step of two stacks whose updates wait, and what is planned for them."""
    params = dict.fromkeys("ab", jax.ShapeDtypeStruct(SIZE, jnp.float32))
    step = trained(tx, params, loss=loss)
    return plan(step, Options(late_gradients=late_gradients))


def passes(found):
    """The pass of each reduction by its primitive, and the last pass."""
    equations = found.step.program.equations
    of = sorted((n, equations[i].primitive.name) for i, n in found.passes.of.items())
    return [n for n, _ in of], {name for _, name in of}, found.passes.last


@pytest.mark.parametrize(
    ("tx", "of", "last"),
    [
        (optax.chain(CLIP(1.0), optax.trace(0.9)), [0, 0], 1),
        (optax.chain(CLIP(1.0), optax.trace(0.9), CLIP(0.1)), [0, 0, 1, 1], 2),
        (
            optax.chain(CLIP(1.0), CLIP(0.5), optax.trace(0.9), CLIP(0.1)),
            [0, 0, 1, 1, 2, 2],
            3,
        ),
    ],
    ids=["one norm", "a norm of what a norm scaled", "three"],
)
def test_a_norm_of_what_a_norm_scaled_takes_another_pass(tx, of, last):
    """The first is summed up beside the gradients, and updates come after the last."""
    found = passes(planned(tx))
    assert found == (of, {"reduce_sum"}, last)


def test_two_norms_of_gradients_share_a_pass():
    """What does not need the other's result is summed up at the same time."""

    def both(updates, _):
        leaves = jax.tree.leaves(updates)
        largest = sum(jnp.max(jnp.abs(x)) for x in leaves)
        total = sum(jnp.sum(x) for x in leaves)
        return jax.tree.map(lambda x: x / (largest + total), updates)

    found = planned(optax.chain(optax.stateless(both), optax.trace(0.9)))
    of, kinds, last = passes(found)
    assert (of, last) == ([0] * 4, 1)
    assert kinds == {"reduce_sum", "reduce_max"}


def test_a_norm_of_one_scan_that_the_next_takes():
    """Sums of two scans are in the pass that computes the gradients of both."""
    found = planned(optax.chain(CLIP(1.0), optax.trace(0.9)), two_scans)
    assert len(found.scans) == 2
    assert passes(found)[::2] == ([0, 0], 1)


def test_what_a_later_scan_needs_of_an_earlier_takes_no_pass():
    """A pass takes the scans in their order: the sum of the first is known by then."""

    def scaled(updates, _):
        # The backward pass of `b` runs first.
        norm = jnp.sum(updates["b"] ** 2)
        product = updates["a"] / norm
        return {"a": product / jnp.sum(product**2), "b": updates["b"]}

    found = planned(optax.chain(optax.stateless(scaled), optax.trace(0.9)), two_scans)
    of, _, last = passes(found)
    assert (sorted(of), last) == ([0, 0], 1)

    def against(updates, _):
        norm = jnp.sum(updates["a"] ** 2)
        product = updates["b"] / norm
        return {"a": updates["a"], "b": product / jnp.sum(product**2)}

    found = planned(optax.chain(optax.stateless(against), optax.trace(0.9)), two_scans)
    of, _, last = passes(found)
    assert (sorted(of), last) == ([0, 1], 2)


def test_how_often_the_rows_are_taken():
    """Stored: loaded once for each later pass. Computed again: as many runs."""
    once = planned(optax.chain(CLIP(1.0), optax.trace(0.9)))
    assert once.passes.stored(once.scans[0].late) == 1
    assert once.passes.twice(once.scans[0].late) == 1
    found = planned(optax.chain(CLIP(1.0), CLIP(0.5), optax.trace(0.9)))
    late = found.scans[0].late
    assert found.passes.stored(late) == 2
    assert found.passes.twice(late) == 2
    assert len(found.passes.sums(late, 0)) == 2
    assert len(found.passes.sums(late, 1)) == 2
    assert found.passes.sums(late, 2) == []
    assert found.passes.sums((), 0) == []


def test_stored_where_the_link_is_faster_than_the_device(monkeypatch):
    """Gradients are stored if that takes less than a further backward pass."""
    found = planned(optax.chain(CLIP(1.0), optax.trace(0.9)))
    (each,) = found.scans
    late = each.late
    gradients = sum(f.gradient_bytes for f in late)
    state = sum(f.loaded_bytes for f in late)
    assert gradients == state == 2 * 4 * 6 * 8 * 8
    # Stored, gradients and state cross the link after the backward pass, of `n` bytes'
    # time: n + 2 g. Computed again, it runs twice, and the state crosses it: 2 n.
    for n, way in ((2 * gradients, "recompute"), (2 * gradients + 1, "host")):
        flops = n * limits.now.flops_per_byte
        monkeypatch.setattr(waiting, "flops", lambda _, flops=flops: flops)
        assert waiting.cheaper(each.scan, late, found.passes) == way


@pytest.mark.parametrize("asked", ["host", "recompute"])
def test_as_asked(asked):
    """Whoever asks for a way has it, whatever is cheaper."""
    found = planned(optax.chain(CLIP(1.0), optax.trace(0.9)), late_gradients=asked)
    (each,) = found.scans
    assert each.way == asked

"""Where state is in programs compiled for real chips, none of which need be here."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import program
import pytest

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground import compat

pytestmark = [
    pytest.mark.aot,
    pytest.mark.parametrize("chip", ["h100", "v5e"]),
    # One process: it loads each compiler once.
    pytest.mark.xdist_group("aot"),
]
PARAMS = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(8)}
LEAF_BYTES = 512 * 512 * 4


def step_of(tx):
    """A train step of matrices one after the other."""

    def step(params, state, x):
        def loss(params):
            y = x
            for w in params.values():
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def test_init_makes_one_leaf_at_a_time(chip):
    """Its peak is some leaves, not the state."""
    tx = oo.offload(optax.adamw(1e-3), window_bytes=1)
    peak = aot.peak(aot.compile(tx.init, PARAMS, target=aot.Target(chip)))
    assert peak.host_output_bytes == 16 * LEAF_BYTES
    assert peak.peak_bytes <= 8 * LEAF_BYTES + 2 * LEAF_BYTES


def test_peak_falls_in_a_whole_step(chip):
    """By the state, but for the window and what is read beside it.

    That is slices of gradients, and the 8 gradients that wait for their loop.
    """
    window_bytes = 2**20

    def peak_of(tx):
        x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
        state = oo.eval_shape(tx.init, PARAMS)
        target = aot.Target(chip)
        return aot.peak(
            aot.compile(
                step_of(tx), PARAMS, state, x, target=target, donate_argnums=(0, 1)
            )
        ).peak_bytes

    plain, ours = (
        peak_of(optax.adamw(1e-3)),
        peak_of(oo.offload(optax.adamw(1e-3), window_bytes=window_bytes)),
    )
    assert plain - ours >= (16 - 8) * LEAF_BYTES - 1.5 * window_bytes


@pytest.mark.slow
def test_gradients_of_unequal_layers_are_freed_as_they_are_consumed(chip):
    """As without offload: nearly all of the state is gone from the peak."""
    widths = (1024, 4096, 1280, 3840, 1536)
    params = {
        f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for i, shape in enumerate(itertools.pairwise(widths))
    }
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)

    def peak_of(tx):
        state = oo.eval_shape(tx.init, params)
        args = params, state, x
        target = aot.Target(chip)
        return aot.peak(
            aot.compile(step_of(tx), *args, target=target, donate_argnums=(0, 1))
        )

    plain, ours = peak_of(optax.adamw(1e-3)), peak_of(oo.offload(optax.adamw(1e-3)))
    saved = (plain.peak_bytes - ours.peak_bytes) / ours.host_argument_bytes
    # 0.59 on an H100 and 0.77 on a v5e where loops wait for the gradients of all (F63).
    assert saved >= 0.85


def test_no_leaf_is_copied_for_its_slices(chip):
    """Each slice of an update is written over its gradient, which is read before."""
    tx = oo.offload(optax.adamw(1e-3), window_bytes=2**22)
    shape = 1024, 1024
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(4)}

    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    state = oo.eval_shape(tx.init, params)
    target = aot.Target(chip)
    step = step_of(tx)
    compiled = aot.compile(step, params, state, x, target=target, donate_argnums=(0, 1))
    assert "slices of" in str(tx.schedule(params))
    copies = re.findall(r"= f32\[1024,1024\]\S* copy\(.*", str(compiled.as_text()))
    assert not copies


@pytest.mark.parametrize(
    "around", ["nothing", pytest.param("multi_steps", marks=pytest.mark.slow)]
)
def test_slices_are_copies(chip, around):
    """No kernel of a GPU reads or writes host memory: its processors compute (F14).

    Also in the versions of an update, which are loops around these. Each copy is of
    other rows, and together they are of all. Where a compiler would copy wrong ones
    (U10), it knows no position, and all are kernels.
    """
    tx = optax.adamw(1e-3)
    if around == "multi_steps":
        tx = optax.MultiSteps(tx, 2).gradient_transformation()
    tx = oo.offload(tx, window_bytes=2**21)
    params = {"stacked": jax.ShapeDtypeStruct((8, 256, 512), jnp.float32)}
    params |= {f"w{i}": PARAMS[f"w{i}"] for i in range(4)}
    state = oo.eval_shape(tx.init, params)
    compiled = aot.compile(
        lambda grads, state, params: tx.update(grads, state, params),
        *(params, state, params),
        target=aot.Target(chip),
        donate_argnums=(0, 1),
    )
    assert "slices of" in str(tx.schedule(params))
    slices = [t for t in aot.transfers(compiled) if "slice" in t.form]
    assert {t.direction for t in slices} == {"load", "store"}
    assert all(t.times > 1 for t in slices)
    copies = chip == "v5e" or compat.COPIES_AT_POSITIONS
    assert {t.by for t in slices} == {"copy engine" if copies else "kernel"}
    if chip == "v5e":
        return
    found = collections.defaultdict(collections.Counter)
    for t, positions in program.slice_positions(compiled):
        found[t.direction, t.nbytes].update(positions)
    assert len(found) == (2 if copies else 0) * len({t.nbytes for t in slices})
    for (_, nbytes), counts in found.items():
        assert set(counts) == set(range(0, nbytes * len(counts), nbytes))
        assert len(set(counts.values())) == 1

"""What each slicing rule refuses: an optimizer that would come out wrong otherwise.

Its state has sixteen rows, and its new state mixes them in one equation. So it is
updated whole; taken row by row it would be another optimizer.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_offload as oo

ROWS, WIDTH = 16, 128


def in_body(fn):
    """In a loop, where what an equation takes is followed back to its origin."""
    return lambda s, g: lax.fori_loop(0, 2, lambda _, c: c / 2 + fn(c, g), s)


def gathered(operand, indices, offset_dims, collapsed, index_map, sizes, **batching):
    """A gather, by its dimension numbers."""
    numbers = lax.GatherDimensionNumbers(offset_dims, collapsed, index_map, **batching)
    return lax.gather(operand, indices, numbers, sizes)


def paired(s, g):
    """Each row at places that its column of indices says, which other rows have."""
    places = jnp.argsort(s[:, :, :1], axis=1)
    taken = gathered(
        s,
        places,
        (2,),
        (1,),
        (1,),
        (1, 1, WIDTH),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(1,),
    )
    return jnp.swapaxes(taken, 0, 1)


ROW_LOCAL = "row-local"
# For each refusal the function of the state and the gradient, both (16, 16, 128),
# whose result is added to half of the state; and the equation that has to be named.
REFUSED = {
    "add": (lambda s, g: s + jnp.swapaxes(s, 0, 1), "add"),
    "sort": (lambda s, g: jnp.sort(s, axis=0), "sort"),
    "sort, followed back": (in_body(lambda c, g: jnp.sort(g, axis=0)), "sort"),
    "concatenate": (
        lambda s, g: lax.slice_in_dim(jnp.concatenate([s, g]), 8, 24),
        "concatenate",
    ),
    "concatenate, followed back": (
        in_body(lambda c, g: jnp.concatenate([g[:1], g[2:], g[1:2]])),
        "concatenate",
    ),
    "slice": (lambda s, g: s[2:3] + g, "slice"),
    "dynamic_slice": (
        lambda s, g: lax.dynamic_slice(s, (2, 0, 0), (1, ROWS, WIDTH)) + g,
        "dynamic_slice",
    ),
    "dynamic_update_slice": (
        lambda s, g: lax.dynamic_update_slice(s, g[:2], (1, 0, 0)),
        "dynamic_update_slice",
    ),
    "iota": (
        in_body(lambda c, g: lax.broadcasted_iota(jnp.float32, c.shape, 0)),
        "iota",
    ),
    "gather of rows": (lambda s, g: s[jnp.argsort(g[:, 0, 0])], "gather"),
    "gather at places in rows": (
        lambda s, g: jnp.take_along_axis(s, jnp.argsort(g, axis=0), axis=0),
        "gather",
    ),
    "gather of paired rows": (paired, "gather"),
    "dot_general, summed": (
        lambda s, g: jnp.einsum("nij,nkl->kil", s, g),
        "dot_general",
    ),
    "dot_general, paired otherwise": (
        lambda s, g: jnp.sum(
            lax.dot_general(s, s, (((2,), (2,)), ((0,), (1,)))), axis=2, keepdims=True
        ),
        "dot_general",
    ),
    "dot_general, followed back": (
        in_body(lambda c, g: jnp.einsum("aij,baj->ba", g, g)[..., None]),
        "dot_general",
    ),
    "random_bits": (
        in_body(lambda c, g: jax.random.normal(jax.random.key(0), c.shape)),
        "random_bits",
    ),
    "reshape": (
        lambda s, g: jnp.swapaxes(s.reshape(8, ROWS, -1), 0, 1).reshape(s.shape),
        "reshape",
    ),
    "reduce_sum": (lambda s, g: jnp.sum(s, axis=0)[:, None] + g, "reduce_sum"),
    "argmax": (
        lambda s, g: jnp.argmax(s, axis=0)[:, None].astype(jnp.float32) + g,
        "argmax",
    ),
    "unstack": (lambda s, g: jnp.unstack(s)[2][:, None] + g, "unstack|slice"),
    "stack, followed back": (
        in_body(lambda c, g: jnp.stack([g[i] for i in [1, 0, *range(2, ROWS)]])),
        "stack|concatenate",
    ),
    "cumsum": (lambda s, g: jnp.cumsum(s, axis=0), "cumsum"),
    "cumsum, followed back": (
        in_body(lambda c, g: jnp.cumsum(g, axis=0)),
        "cumsum",
    ),
    "rev": (lambda s, g: s[::-1], "rev"),
    "split": (lambda s, g: jnp.concatenate(lax.split(s, (8, 8))[::-1]), "split"),
    "top_k": (
        lambda s, g: jnp.moveaxis(lax.top_k(jnp.moveaxis(s, 0, 2), ROWS)[0], 2, 0),
        "top_k",
    ),
    "pad": (lambda s, g: lax.pad(s, 0.0, [(1, -1, 0), (0, 0, 0), (0, 0, 0)]), "pad"),
    "scan": (
        lambda s, g: lax.scan(lambda c, x: (c + x, c), jnp.zeros((ROWS, WIDTH)), s)[1],
        "scan",
    ),
    "a carry that turns": (
        in_body(lambda c, g: jnp.swapaxes(c, 0, 1)),
        "add",
    ),
    "reduce_window": (
        lambda s, g: lax.reduce_window(
            s, 0.0, lax.add, (3, 1, 1), (1, 1, 1), [(1, 1), (0, 0), (0, 0)]
        ),
        r"reduce_window\w*",
    ),
    "reduce": (
        lambda s, g: (
            lax.reduce(
                (s, g), (0.0, 0.0), lambda x, y: (x[0] + y[0], x[1] - y[1]), (0,)
            )[0][:, None]
            + g
        ),
        "reduce",
    ),
    "matrices of columns": (
        lambda s, g: jnp.swapaxes(jnp.linalg.qr(jnp.swapaxes(s, 0, 1), mode="r"), 0, 1),
        "qr",
    ),
    "matrices of columns, followed back": (
        in_body(
            lambda c, g: jnp.swapaxes(
                jnp.linalg.qr(jnp.swapaxes(g, 0, 1), mode="r"), 0, 1
            )
        ),
        "qr",
    ),
    "scatter of rows": (lambda s, g: s.at[jnp.argsort(g[:, 0, 0])].set(g), "scatter"),
    "fft": (lambda s, g: jnp.fft.fft(s, axis=0).real, "fft"),
    "while, each column until it is done": (
        jax.vmap(
            lambda s, g: lax.while_loop(
                lambda c: jnp.sum(c * c) > 100, lambda c: c / 2 + g / 9, s
            ),
            in_axes=1,
            out_axes=1,
        ),
        "reduce_sum|add",
    ),
    "no rule": (
        lambda s, g: s + jax.pure_callback(lambda x: x[::-1], s, s),
        "pure_callback",
    ),
}


SHAPE = (ROWS, ROWS, WIDTH)
LEAF = np.linspace(-1, 1, ROWS * ROWS * WIDTH, dtype=np.float32).reshape(SHAPE)


def optimizer(functions):
    """Half of the state and what a leaf's function makes of it is the new state."""

    def update(grads, state, params=None):
        new = {k: s / 2 + functions[k](s, grads[k]) for k, s in state.items()}
        return jax.tree.map(lambda s: -0.1 * s, new), new

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.sin(3000 * p), params), update
    )


def row_local(s, g):
    """What mixes no rows."""
    return jnp.cumsum(s, axis=1) + g


FUNCTIONS = {name: fn for name, (fn, _) in REFUSED.items()} | {ROW_LOCAL: row_local}
PARAMS = dict.fromkeys(FUNCTIONS, LEAF)
GRADS = dict.fromkeys(FUNCTIONS, np.cos(5000 * LEAF))


@functools.cache
def lowered():
    """The update of all leaves, each large enough for slices, and what it warns of."""
    rule = oo.Rule(".*", min_bytes=8, slice_axis=0)
    tx = oo.offload(optimizer(FUNCTIONS), rule, window_bytes=2**14)
    state = oo.eval_shape(tx.init, PARAMS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", oo.OffloadWarning)
        program = jax.jit(tx.update).lower(GRADS, state)
    return tx, program, [str(w.message) for w in said]


@pytest.mark.xdist_group("refused")
def test_rows_are_taken_one_by_one():
    """Where nothing mixes them: in slices of two."""
    tx, _, said = lowered()
    assert "loop over 1 group, in 8 slices" in str(tx.schedule(PARAMS))
    assert not any(f"'{ROW_LOCAL}'" in message for message in said)


@pytest.mark.xdist_group("refused")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """Updated whole, because of this equation."""
    why = rf"'{name}'.*cannot be updated in slices \({REFUSED[name][1]}\)"
    assert any(re.search(why, message) for message in lowered()[-1])

"""Which equations can be evaluated for some of the rows, and to what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_offload import _program
from optax_offload._rows import proof
from optax_offload._rows.rules.registry import NotRowLocalError

ROWS, SHAPE = 6, (6, 4, 5)


def analyze(fn, *args, axis=0):
    """The rows of a function, of which the first argument is a load."""
    program = _program.flatten(jax.make_jaxpr(fn)(*args))
    dependent = _program.dependents(program, {program.invars[0]})
    positions = [
        i
        for i, e in enumerate(program.equations)
        if not dependent.isdisjoint(_program.variables(e.invars))
    ]
    axes = {program.invars[0]: axis}
    return program, proof.analyze(program, positions, axes, program.outvars, {})


def in_slices(fn, *args, rows=2, axis=0):
    """The function, evaluated slice by slice."""
    program, row_local = analyze(fn, *args, axis=axis)
    env = dict(zip(program.invars, args, strict=True)) | program.constants
    defined = {v for e in row_local.equations for v in e.outvars}
    for e in program.equations:  # What is computed whole beforehand.
        if not defined.intersection(e.outvars):
            values = [a.val if isinstance(a, jex.Literal) else env[a] for a in e.invars]
            results = e.primitive.bind(*values, **e.params)
            results = results if e.primitive.multiple_results else [results]
            env.update(zip(e.outvars, results, strict=True))
    jaxpr = row_local.jaxpr(rows, program.debug_info)
    slices = []
    for first in range(0, row_local.rows, rows):
        values = [
            lax.slice_in_dim(env[v], first, first + rows, axis=row_local.axes[v])
            if v in row_local.axes
            else env[v]
            for v in row_local.inputs
        ]
        slices.append(jax.core.eval_jaxpr(jaxpr, (), *values))
    return [
        jnp.concatenate(parts, axis=row_local.axes[v])
        for v, parts in zip(row_local.outputs, zip(*slices, strict=True), strict=True)
    ]


def newton_schulz(x):
    """As in Muon, over a stack of matrices."""
    return lax.fori_loop(
        0, 3, lambda _, x: 1.5 * x - 0.5 * x @ jnp.swapaxes(x, -1, -2) @ x, x / 4
    )


def looped(x, g):
    """A loop whose body takes all of one operand for each row of another."""
    return lax.fori_loop(0, 2, lambda _, x: x * jnp.sum(g), x)


ROW_LOCAL = {
    "one value whole, its like by rows": lambda x, g: looped(x, g + 1) - (g + 1),
    "arithmetic": lambda x, g: 0.9 * x + 0.1 * g**2 - jnp.sqrt(jnp.abs(x)),
    "scalars of all rows": lambda x, g: x * jnp.minimum(1.0, 1 / jnp.linalg.norm(g)),
    "casts and selects": lambda x, g: jnp.where(
        g > 0, x.astype(jnp.bfloat16).astype(jnp.float32), jnp.zeros_like(x)
    ),
    "means of rows and columns": lambda x, g: (
        x * jnp.mean(g, axis=-1, keepdims=True) + jnp.mean(x, axis=1)[:, None]
    ),
    "what has lost an axis": lambda x, g: jnp.max(x, axis=2) + jnp.sum(g, axis=2),
    "matrix products": lambda x, g: jnp.einsum("nij,nkj->nik", x, g),
    "a loop": lambda x, g: newton_schulz(x) + g,
    "a scan": lambda x, g: lax.scan(
        lambda c, _: (c + g, jnp.sum(c, axis=(1, 2))), x, length=3
    )[0],
    "a scanned axis": lambda x, g: lax.scan(
        lambda c, y: (c + y, y), jnp.zeros((ROWS, 5)), jnp.moveaxis(x + g, 1, 0)
    )[0],
    "a cond": lambda x, g: lax.cond(
        jnp.sum(g) > 0, lambda x: 2 * x, lambda x: jnp.zeros_like(x), x
    ),
    "reshapes and transposes": lambda x, g: (
        jnp.transpose(x, (1, 0, 2)).reshape(4, ROWS, 5, 1)
        + jnp.swapaxes(g, 0, 1)[..., None]
    ),
    "sorts and sums along": lambda x, g: jnp.sort(x, axis=1) + jnp.cumsum(x, axis=2),
    "concatenation": lambda x, g: jnp.concatenate([x, g], axis=1)[:, 1:3],
}

# What one primitive refuses is in `test_refused_rows.py`.
NOT_ROW_LOCAL = {
    "a norm over rows": (lambda x, g: x / jnp.linalg.norm(x), "same for every row|re"),
    "whole and by rows": (
        lambda x, g: looped(x, g) - g,
        "(while|scan) takes whole what has rows",
    ),
    "whole and by rows, further back": (
        lambda x, g: (lambda h: looped(x, h) - h)(g + 1),
        "(while|scan) takes whole what has rows",
    ),
    "the same for all": (lambda x, g: (x, jnp.zeros(3)), "the same for every row"),
    "a constant array": (lambda x, g: x + np.arange(120.0).reshape(SHAPE), None),
}


def arguments():
    """Two random values of the shape that is sliced."""
    keys = jax.random.split(jax.random.key(3))
    return tuple(jax.random.normal(k, SHAPE) for k in keys)


@pytest.mark.parametrize("fn", ROW_LOCAL.values(), ids=ROW_LOCAL)
def test_slices_give_the_same(fn):
    """Slice by slice, on the CPU to the last bit or nearly."""
    args = arguments()
    want = jax.tree.leaves(fn(*args))
    for got, whole in zip(in_slices(fn, *args), want, strict=True):
        np.testing.assert_allclose(got, whole, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("fn", "why"), NOT_ROW_LOCAL.values(), ids=NOT_ROW_LOCAL)
def test_what_mixes_rows_is_named(fn, why):
    """By its equation."""
    if why is None:  # An array that the update closes over is sliced as an argument.
        (got,) = in_slices(fn, *arguments())
        np.testing.assert_array_equal(got, fn(*arguments()))
        return
    with pytest.raises(NotRowLocalError, match=why):
        analyze(fn, *arguments())


def test_another_axis():
    """Rows are where the caller says."""
    args = arguments()
    fn = lambda x, g: x * jnp.sum(g, axis=(0, 2), keepdims=True)  # noqa: E731
    (got,) = in_slices(fn, *args, rows=1, axis=1)
    np.testing.assert_allclose(got, fn(*args), rtol=1e-6)


def test_never_along_a_sharded_axis():
    """A slice would cross the shards."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones(SHAPE), NamedSharding(mesh, P("x")))
    with pytest.raises(NotRowLocalError, match="sharded along axis 0"):
        analyze(lambda x, g: x + g, x, x)
    analyze(lambda x, g: x + g, x, x, axis=1)

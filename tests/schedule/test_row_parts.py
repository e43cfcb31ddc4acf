"""Rows that are more than the window: their update in parts, along another axis."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_jaxprs import closed_of, load, on_device, on_host, program_of, store, values

from optax_offload._program import variables
from optax_offload._rows import NotRowLocalError, RowLocal
from optax_offload._schedule.parts import parts

LAYERS = 6
INFO = closed_of(lambda: ()).jaxpr.debug_info


def rows_of(fn, *types):
    """All of a function of stacked layers, as rows along the first axis."""
    program = program_of(fn, *types)
    every = [*program.invars, *(v for e in program.equations for v in e.outvars)]
    axes = {v: 0 for v in every if v.aval.shape[:1] == (LAYERS,)}
    outputs = tuple(variables(program.outvars))
    inputs = tuple(program.invars)
    return RowLocal(tuple(program.equations), LAYERS, axes, inputs, outputs)


def momentum(m, g):
    """State that rests on the host, of a gradient."""
    new = 0.9 * load(m) + g
    return store(new), -new


def divided(fn, shape, least, others=()):
    """The parts of an update of layers of a shape, of which the first rests."""
    here = on_device(LAYERS, *shape)
    rows = rows_of(fn, on_host(LAYERS, *shape), here, *others)
    return rows, parts(rows, least, INFO)


@pytest.mark.parametrize(
    ("shape", "least", "size"),
    [
        ((64, 128), 2, 32),
        ((64, 128), 3, 16),
        ((64, 128), 8, 8),
        ((64, 128), 1000, 8),  # No part is less than a tile.
        ((4, 64, 128), 2, 2),
        ((4, 64, 128), 4, 1),
        ((3, 64, 128), 2, 1),  # Of three no two are a part.
    ],
)
def test_as_many_parts_as_asked(shape, least, size):
    """As few as that, or more where the axis has no such divisor."""
    _, found = divided(momentum, shape, least)
    assert (found.size, found.count) == (size, shape[0] // size)


def test_places_say_where_parts_are():
    """Along the layer axis, and the axis after it; of the variables of the step."""
    rows, found = divided(momentum, (64, 128), 2)
    assert [p.variable for p in found.inputs] == list(rows.inputs)
    assert [p.variable for p in found.outputs] == list(rows.outputs)
    assert {(p.rows, p.part) for p in (*found.inputs, *found.outputs)} == {(0, 1)}


def test_a_part_computes_what_it_did():
    """The equations, for a part of one row."""
    _, found = divided(momentum, (64, 128), 4)
    shape = 1, found.size, 128
    m, g = np.ones(shape, np.float32), np.full(shape, 2, np.float32)
    assert [v.aval.shape for v in found.jaxpr.invars] == [shape, shape]
    new, negative = values(
        found.jaxpr.eqns, found.jaxpr.invars, found.jaxpr.outvars, (m, g)
    )
    np.testing.assert_allclose(new, 2.9, rtol=1e-6)
    np.testing.assert_allclose(negative, -2.9, rtol=1e-6)


def test_what_each_part_takes_whole():
    """A number for each layer has no parts; a vector for all has no rows."""

    def fn(m, g, n, v):
        return (store(load(m) * n[:, None, None] + g * v[None]),)

    others = on_device(LAYERS), on_device(64, 128)
    rows, found = divided(fn, (64, 128), 2, others)
    by_name = {p.variable: (p.rows, p.part) for p in found.inputs}
    _, _, n, v = rows.inputs
    assert by_name[n] == (0, None)
    assert by_name[v][0] is None


@pytest.mark.parametrize("axes", [(1,), (1, 2)])
def test_what_mixes_a_row(axes):
    """Parts are along the axis behind the layers: if that is mixed there are none."""

    def fn(m, g):
        return (store(load(m) + g / jnp.sum(g * g, axis=axes, keepdims=True)),)

    with pytest.raises(NotRowLocalError, match=r"(mul|reduce_sum|div).* has rows"):
        divided(fn, (64, 128), 2)


def test_what_mixes_another_axis():
    """A sum along an axis that is whole in each part is no reason."""

    def fn(m, g):
        m = load(m)
        return (store(g + m / jnp.sum(m * m, axis=2, keepdims=True)),)

    _, found = divided(fn, (64, 128), 2)
    assert (found.size, {p.part for p in found.inputs}) == (32, {1})


def test_an_axis_without_tiles():
    """Of less than two tiles no part can be made."""
    with pytest.raises(NotRowLocalError, match="8 along an axis, in units of 8"):
        divided(momentum, (8, 128), 2)
    with pytest.raises(NotRowLocalError, match="24 along an axis, in units of 128"):
        divided(lambda m, g: (store(load(m) + g),), (24, 1), 2)


def test_a_layer_of_numbers():
    """There is no other axis."""

    def fn(m, g):
        return (store(load(m) + g),)

    with pytest.raises(NotRowLocalError):
        divided(fn, (), 2)

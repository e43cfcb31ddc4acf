"""Equations of which a block of rows follows from blocks of what they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_jaxprs import closed_of, values

from optax_offload._program.graph import variables
from optax_offload._program.primitives import PRIMITIVES, facts

ROWS = 3
X = np.arange(24, dtype=np.int32).reshape(ROWS, 4, 2) % 7
ROW = np.arange(2, dtype=np.int32).reshape(1, 1, 2)
BYTES = X.astype(np.uint8)
FLAT = X.reshape(ROWS * 4, 2)
TABLE = np.linspace(-1, 1, 8, dtype=np.float32)
TABLES = np.arange(ROWS * 8, dtype=np.float32).reshape(ROWS, 8)
MESH = jax.sharding.Mesh(jax.devices()[:2], ("d",))

FOLLOWED = {
    "and": (lambda x: x & 3, X),
    "mul": (lambda x, y: x * y, X, ROW),
    "add": (lambda x, y: x + y, X, X),
    "select_n": (lambda x, y: lax.select(x > 2, x, y), X, X),
    "convert_element_type": (lambda x: x.astype(jnp.float32), X),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), X),
    "wider": (lambda x: lax.bitcast_convert_type(x, jnp.uint16), BYTES),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (3, 4, 2, 5), (0, 1, 2)), X),
    "to rows": (lambda x: lax.broadcast_in_dim(x, (3, 4, 2), (0, 1, 2)), ROW),
    "of a scalar": (lambda x: lax.broadcast_in_dim(x, (3, 4), ()), np.float32(2)),
    "reshape": (lambda x: lax.reshape(x, (3, 8)), X),
    "joined": (lambda x: lax.reshape(x, (12, 2)), X),
    "divided": (lambda x: lax.reshape(x, (3, 8)), FLAT),
    "transpose": (lambda x: lax.transpose(x, (0, 2, 1)), X),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 2), X, X),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (3, 4, 2), (1, 2, 1)), X),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (0, i, 0), (3, 2, 2)), X, 1),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), X[:, :1]),
    "split": (lambda x: lax.split(x, (1, 3), 1)[1], X),
    "pad": (lambda x: lax.pad(x, 1, ((0, 0, 0), (1, 0, 0), (0, 0, 1))), X),
    "rev": (lambda x: lax.rev(x, (1,)), X),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (3, 4), 1),),
    "gather": (lambda t, x: t.at[x].get(mode="clip"), TABLE, BYTES),
    "of flat indices": (lambda t, x: t.at[x].get(mode="clip"), TABLE, FLAT[:, 0]),
    "own tables": (
        jax.vmap(lambda t, x: t.at[x].get(mode="promise_in_bounds")),
        TABLES,
        X[:, :, 0],
    ),
    "of each row": (lambda x, i: x.at[:, i].get(mode="clip"), X, np.array([2, 0])),
}
REFUSED = {
    "transpose": (lambda x: lax.transpose(x, (1, 0, 2)), X),
    "reshape": (lambda x: lax.reshape(x, (4, 6)), X),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), X, X),
    "slice": (lambda x: lax.slice(x, (1, 0, 0), (3, 4, 2)), X),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0, 0), (2, 4, 2)), X, 1),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), X[:1]),
    "pad": (lambda x: lax.pad(x, 1, ((1, 0, 0), (0, 0, 0), (0, 0, 0))), X),
    "rev": (lambda x: lax.rev(x, (0,)), X),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (3, 4), 0),),
    "of a row": (lambda x, i: x.at[i].get(mode="clip"), X, np.array(1)),
    "constraint": (
        lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P("d"))),
        X,
    ),
}


def last_of(fn, *args):
    """The last equation of a function that has a rule, and values for its operands."""
    jaxpr = closed_of(fn, *args).jaxpr
    e = jaxpr.eqns[-1]
    operands = list(dict.fromkeys(variables(e.invars)))
    given = values(jaxpr.eqns, jaxpr.invars, operands, args)
    return e, dict(zip(operands, given, strict=True))


def by_rows_of(e, rows):
    """The rule of an equation, asked for so many rows."""
    rule = facts(e).rows
    assert rule is not None
    return rule(e, rows)


def leading(x):
    """The length of what an equation gives."""
    return x.outvars[0].aval.shape[0]


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_block_follows_from_blocks(name):
    """The equation of a block gives that block of what it gives of all."""
    e, operands = last_of(*FOLLOWED[name])
    by_rows = by_rows_of(e, ROWS)
    assert by_rows is not None
    (want,) = values([e], operands, e.outvars[-1:], operands.values())
    size = leading(e) // ROWS
    for row in range(ROWS):
        names, given = {}, []
        for a, has_rows in zip(e.invars, by_rows.rows, strict=True):
            if isinstance(a, jex.Var) and a not in names:
                x = operands[a]
                given.append(np.split(x, ROWS)[row] if has_rows else x)
                names[a] = jex.Var(jax.typeof(given[-1]))
        small = e.replace(
            invars=[a if isinstance(a, jex.Literal) else names[a] for a in e.invars],
            params={**e.params, **by_rows.params},
        )
        (got,) = values([small], names.values(), small.outvars[-1:], given)
        np.testing.assert_array_equal(got, want[row * size : (row + 1) * size])


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows(name):
    """No block of it follows from blocks."""
    e = closed_of(*REFUSED[name]).jaxpr.eqns[-1]
    assert by_rows_of(e, leading(e) if leading(e) != 2 else ROWS) is None


def test_the_same_for_all_rows():
    """An operand without such an axis is taken as it is."""
    e, _ = last_of(lambda x, y: x * y, X, ROW)
    assert by_rows_of(e, ROWS)[0] == (True, False)
    e, _ = last_of(*FOLLOWED["gather"])
    assert by_rows_of(e, ROWS)[0] == (False, True)


def test_what_is_computed_again():
    """A look-up in a small table is; of a large one a part is taken, which is kept."""
    small, _ = last_of(*FOLLOWED["gather"])
    assert facts(small).again
    large, _ = last_of(lambda t, x: t.at[x].get(mode="clip"), np.ones(100), BYTES)
    assert not facts(large).again
    most, _ = last_of(lambda x: lax.slice(x, (0, 0, 0), (3, 2, 2)), X)
    assert facts(most).again
    layer, _ = last_of(lambda x: lax.slice(x, (1, 0, 0), (2, 4, 2)), X)
    assert not facts(layer).again


def test_what_adds_is_arithmetic_of_rows():
    """Whatever replaces an argument by adding to it does so number by number."""
    others = {"add_any", "optimization_barrier", "reshard", "sharding_constraint"}
    adds = {name for name, x in PRIMITIVES.items() if x.leads} - others
    assert all(PRIMITIVES[name].rows and PRIMITIVES[name].again for name in adds)

"""Each slicing rule, against what `jax.vmap` makes of the primitive.

A function of one row is batched by `jax.vmap`, with random batch axes. The rule has to
find these axes again, and what it makes of the equation for two of the rows has to be
what the function makes of those.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p

from optax_offload import _program
from optax_offload._rows import proof
from optax_offload._rows.rules.registry import RULES, NotRowLocalError

ROWS, TAKEN = 6, 2
DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "slicing.md"
TABLE = jnp.linspace(-1.0, 1.0, 256)

ONE = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erf_inv erfc exp exp2"
)
ONE += " expm1 floor is_finite lgamma digamma log log1p logistic neg round rsqrt sign"
ONE += " sin sinh sqrt square tan tanh"
TWO = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub"
BITS = "and or xor shift_left shift_right_arithmetic shift_right_logical"
REDUCTIONS = "argmax argmin reduce_max reduce_min reduce_prod reduce_sum"


def bits_of(x):
    """Whole numbers to shift."""
    return (jnp.abs(x) * 7).astype(jnp.int32)


def a_key(x):
    """A random key of a row."""
    return jax.random.wrap_key_data(jnp.abs(x[0, :2] * 1e6).astype(jnp.uint32))


def named(names, make):
    """An example for each of some names."""
    return {name: make(name) for name in names.split()}


def constrained(x, *spec):
    """A value with a constraint on how it is sharded over two devices."""
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), kinds, devices=jax.devices()[:2])
    return lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec)))


def numpy_name(name):
    """What `jax.numpy` calls a reduction."""
    return name.removeprefix("reduce_")


# For each primitive a function of one row, of shape (4, 5).
EXAMPLES = {
    **named(ONE, lambda n: lambda x: getattr(lax, n)(jnp.abs(x) * 0.5 + 0.1)),
    "acosh": lambda x: lax.acosh(jnp.abs(x) + 1.1),
    **named(TWO, lambda n: lambda x: getattr(lax, n)(jnp.abs(x), 2 * jnp.abs(x) + 1)),
    **named(
        BITS,
        lambda n: (
            lambda x: getattr(lax, n if "shift" in n else f"bitwise_{n}")(
                bits_of(x), bits_of(2 * x)
            )
        ),
    ),
    **named(REDUCTIONS, lambda n: lambda x: getattr(jnp, numpy_name(n))(x, axis=-1)),
    "add_any": lambda x: jax.vjp(lambda y: y * y, x)[1](x)[0],
    "reduce_and": lambda x: jnp.all(x > 0, axis=0),
    "reduce_or": lambda x: jnp.any(x > 0, axis=0),
    "reduce_xor": lambda x: lax.reduce_xor(bits_of(x), (0,)),
    "not": lambda x: lax.bitwise_not(bits_of(x)),
    "population_count": lambda x: lax.population_count(bits_of(x)),
    "clamp": lambda x: lax.clamp(-0.5, x, 0.5),
    "clamp of arrays": lambda x: lax.clamp(x - 1, x * 2, x + 1),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "copy": lambda x: lax.copy_p.bind(x),
    "device_put": lambda x: jax.device_put(x, jax.memory.Space.Host),
    "imag": lambda x: lax.imag(lax.complex(x, 2 * x)),
    "real": lambda x: lax.real(lax.complex(x, 2 * x)),
    "complex": lambda x: lax.complex(x, 2 * x),
    "conj": lambda x: lax.conj(lax.complex(x, 2 * x)),
    "integer_pow": lambda x: x**3,
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "select_n": lambda x: jnp.where(x > 0, x, 2 * x),
    "threefry2x32": lambda x: threefry2x32_p.bind(
        *[bits_of(i * x).astype(jnp.uint32) for i in range(4)]
    ),
    "name": lambda x: checkpoint_name(x, "rows"),
    "sharding_constraint": lambda x: constrained(x, "x"),
    "optimization_barrier": lambda x: lax.optimization_barrier((x, x + 1))[1],
    "concatenate": lambda x: jnp.concatenate([x, 2 * x], axis=1),
    "dot_general": lambda x: x @ jnp.swapaxes(2 * x, 0, 1),
    "broadcast_in_dim": lambda x: x[:, None, :] + jnp.zeros((4, 3, 5)),
    "reshape": lambda x: x.reshape(2, 10),
    "transpose": lambda x: x.T,
    "stack": lambda x: jnp.stack([x, 2 * x], axis=1),
    "unstack": lambda x: jnp.unstack(x, axis=1),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "cumsum": lambda x: lax.cumsum(x, 0),
    "cumprod": lambda x: lax.cumprod(x, 1),
    "cummax": lambda x: lax.cummax(x, 0),
    "cummin": lambda x: lax.cummin(x, 1),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "rev": lambda x: x[::-1],
    "split": lambda x: lax.split(x, (2, 3), axis=1),
    "top_k": lambda x: lax.top_k(x, 2),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 2, 0), (0, 0, 1)]),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.uint16),
    "sort": lambda x: lax.sort((x, 2 * x), dimension=1),
    "slice": lambda x: x[1:3],
    "iota": lambda x: lax.fori_loop(
        0, 2, lambda _, y: y + lax.iota(jnp.float32, 5)[None], x
    ),
    "gather": lambda x: TABLE[jnp.clip(bits_of(x), 0, 255)],
    "gather along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), axis=1),
    "gather of columns": lambda x: x[:, jnp.array([0, 3, 3])],
    "random_bits": lambda x: jax.random.bits(a_key(x), (3,), jnp.uint32),
    "random_wrap": a_key,
    "random_unwrap": lambda x: jax.random.key_data(a_key(x)),
    "random_split": lambda x: jax.random.key_data(jax.random.split(a_key(x), 3)),
    "random_seed": lambda x: jax.random.key_data(jax.random.key(bits_of(x)[0, 0])),
    "random_fold_in": lambda x: jax.random.key_data(
        jax.random.fold_in(a_key(x), bits_of(x)[0, 0])
    ),
    "jit": lambda x: lax.map(jax.jit(lambda y: y * 2), x),
    "cond": lambda x: lax.cond(True, lambda y: 2 * y, lambda y: y, x),
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5 + x), (0, x)
    )[1],
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x),
}
# Never in a jaxpr, not in every version of JAX, made others by vmap (see below), or of
# a mesh in Explicit mode (`tests/fused/test_fused_placement.py`).
ABSENT = {"stop_gradient", "pjit", "stack", "unstack", "reshard"}
ABSENT |= {"dynamic_slice", "dynamic_update_slice"}


def flat_of(fn, axis):
    """A vmapped function, its argument, and the positions of its equations."""
    x = jax.random.normal(jax.random.key(1), (ROWS, 4, 5)) / 2
    x = jnp.moveaxis(x, 0, axis)
    batched = jax.vmap(fn, in_axes=axis)
    program = _program.flatten(jax.make_jaxpr(batched)(x))
    dependent = _program.dependents(program, {program.invars[0]})
    positions = [
        i
        for i, e in enumerate(program.equations)
        if not dependent.isdisjoint(_program.variables(e.invars))
    ]
    return x, batched, program, positions


def primitives_in(jaxpr):
    """The names of all primitives, in bodies too."""
    for e in jaxpr.eqns:
        yield e.primitive.name
        for body in jax.tree.leaves(
            list(e.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(body, "jaxpr", body)
            if hasattr(inner, "eqns"):
                yield from primitives_in(inner)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", [n for n, fn in EXAMPLES.items() if fn])
def test_rows_are_those_of_vmap(name, axis):
    """The axes that JAX gave the batch, and the values of some of the rows."""
    x, batched, program, positions = flat_of(EXAMPLES[name], axis)
    axes = {program.invars[0]: axis}
    row_local = proof.analyze(program, positions, axes, program.outvars, {})
    env = dict(zip(program.invars, [x], strict=True)) | program.constants
    rest = [i for i in _program.live(program) if i not in positions]
    env |= _program.evaluate(program, rest, env.__getitem__)

    def some(v):
        if v not in row_local.axes:
            return env[v]
        return lax.slice_in_dim(env[v], 2, 2 + TAKEN, axis=row_local.axes[v])

    jaxpr = row_local.jaxpr(TAKEN, program.debug_info)
    got = jax.core.eval_jaxpr(jaxpr, (), *map(some, row_local.inputs))
    want = jax.tree.leaves(batched(lax.slice_in_dim(x, 2, 2 + TAKEN, axis=axis)))
    for v, a, b in zip(row_local.outputs, got, want, strict=True):
        # JAX moves the batch axis of a result to the front.
        assert row_local.axes[v] == 0
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(
            np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=1e-6
        )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.dynamic_slice(x, (0, 1), (ROWS, 2)),
        lambda x: lax.dynamic_update_slice(x, 2 * x[:, :2], (0, 1)),
    ],
    ids=["dynamic_slice", "dynamic_update_slice"],
)
def test_slices_at_a_position_for_all_rows(fn):
    """`jax.vmap` makes a gather or a scatter of them, so that they stand alone here."""
    x = jax.random.normal(jax.random.key(1), (ROWS, 5))
    program = _program.flatten(jax.make_jaxpr(fn)(x))
    positions = [*range(len(program.equations))]
    row_local = proof.analyze(
        program, positions, {program.invars[0]: 0}, program.outvars, {}
    )
    jaxpr = row_local.jaxpr(TAKEN, program.debug_info)
    (got,) = jax.core.eval_jaxpr(jaxpr, (), x[2 : 2 + TAKEN])
    np.testing.assert_array_equal(got, fn(x)[2 : 2 + TAKEN])


def test_every_rule_has_an_example():
    """Whose program has the primitive that it is of."""
    found = set()
    for name, fn in EXAMPLES.items():
        if fn is not None:
            x, batched, *_ = flat_of(fn, 1)
            inside = {*primitives_in(jax.make_jaxpr(batched)(x).jaxpr)}
            found |= inside
            primitive = name.split()[0]
            assert primitive in inside or primitive in ABSENT, name
    assert sorted(set(RULES) - found - ABSENT) == []


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x: lax.top_k(x.T, 2), "top_k"),
        (lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 0, 0)]), "pad"),
        (lambda x: lax.dynamic_slice(x, (1, 0), (2, 5)), "dynamic_slice"),
        (lambda x: lax.split(x, (2, 4), axis=0), "split"),
        (lambda x: jnp.unstack(x)[0], "unstack"),
        (lambda x: x[jnp.array([3, 1])], "gather"),
        (lambda x: lax.sort(x, dimension=0), "sort"),
        (lambda x: constrained(x, "x"), "sharding_constraint along the axis"),
        (lambda x: constrained(x, None), None),
        (lambda x: x + lax.iota(jnp.float32, 6)[:, None], None),
        (lambda x: jnp.linalg.cholesky(x @ x.T), "dot_general"),
    ],
)
def test_what_mixes_rows_is_refused(fn, why):
    """By the name of the equation that does."""
    x = jnp.ones((ROWS, 5))
    program = _program.flatten(jax.make_jaxpr(fn)(x))
    dependent = _program.dependents(program, {program.invars[0]})
    positions = [
        i
        for i, e in enumerate(program.equations)
        if not dependent.isdisjoint(_program.variables(e.invars))
    ]
    axes = {program.invars[0]: 0}
    if why is None:  # A counter of rows is computed whole, and sliced as an argument.
        assert proof.analyze(program, positions, axes, program.outvars, {}).rows == ROWS
        return
    with pytest.raises(NotRowLocalError, match=why):
        proof.analyze(program, positions, axes, program.outvars, {})


def test_the_documented_list_is_the_registry():
    """`docs/slicing.md` names each primitive once, by its rule."""
    text = DOCS.read_text()
    for name, rule in RULES.items():
        assert f"`{name}`" in text, f"{name} ({type(rule).__name__})"
    listed = text[text.index("| rule |") :].count("`")
    assert listed == 2 * len(RULES)

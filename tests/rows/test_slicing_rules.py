"""Each slicing rule, against what `jax.vmap` makes of the primitive.

A function of one row is batched by `jax.vmap`, with random batch axes. The rule has to
find these axes again, and what it makes of the equation for two of the rows has to be
what the function makes of those. A rule that refuses says why.
"""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.extend.random import threefry2x32_p

from optax_offload import _program
from optax_offload._rows import proof
from optax_offload._rows.rules import refused
from optax_offload._rows.rules.registry import RULES, NotRowLocalError

ROWS, TAKEN = 6, 2
DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "how-it-works.md"
TABLE = jnp.linspace(-1.0, 1.0, 256)

ONE = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erf_inv erfc exp exp2"
)
ONE += " expm1 floor is_finite lgamma digamma log log1p logistic neg round rsqrt sign"
ONE += " sin sinh sqrt square tan tanh bessel_i0e bessel_i1e"
TWO = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub"
TWO += " igamma igammac igamma_grad_a"
BITS = "and or xor shift_left shift_right_arithmetic shift_right_logical"
REDUCTIONS = "argmax argmin reduce_max reduce_min reduce_prod reduce_sum"


def bits_of(x):
    """Whole numbers to shift."""
    return (jnp.abs(x) * 7).astype(jnp.int32)


def square(x):
    """A symmetric, positive definite matrix of a row."""
    return x[:, :4] + x[:, :4].T + 10 * jnp.eye(4)


def windowed(x, init, fn):
    """A reduction of windows by a function that JAX has no primitive for."""
    return lax.reduce_window(x, init, fn, (2, 1), (1, 1), "VALID")


def largest(x):
    """The largest of each window, whose derivatives gather and scatter."""
    return windowed(x, -jnp.inf, lax.max)


def sum_and_product(x, y):
    """A function that JAX has no reduction for."""
    return x[0] + y[0], x[1] * y[1]


def newton(x):
    """The square root of a row's sum, in as many turns as that takes."""
    target = jnp.abs(jnp.sum(x)) + 0.5

    def far(c):
        return jnp.abs(c[0] ** 2 - target) > 1e-3 * target

    def nearer(c):
        return (c[0] + target / c[0]) / 2, c[1] + 1

    return lax.while_loop(far, nearer, (target, 0))


@jax.custom_vjp
def given(x):
    """A function whose derivative is given."""
    return jnp.sin(x)


given.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def scattered(x, how):
    """At places of the row's own."""
    at = x.at[bits_of(x[0]) % 4]
    how = {"mul": "multiply", "sub": "subtract"}.get(how, how)
    return getattr(at, how)(2 * x[0], unique_indices=how == "multiply")


def of_pivots(x):
    """The permutation that swaps of a row's pivots make."""
    return lax.linalg.lu_pivots_to_permutation(bits_of(x[:, 0]) % 4, 4)


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


linalg = sys.modules["jax._src.lax.linalg"]
# Of one matrix, or of what a decomposition of it is made of.
OF_MATRICES = {
    "cholesky": lambda x: lax.linalg.cholesky(square(x)),
    "eig": lambda x: lax.linalg.eig(x[:, :4]),
    "eigh": lambda x: lax.linalg.eigh(square(x)),
    "geqp3": lambda x: linalg.geqp3(x, jnp.zeros(5, jnp.int32)),
    "geqrf": lambda x: linalg.geqrf(x),
    "hessenberg": lambda x: lax.linalg.hessenberg(x[:, :4]),
    "householder_product": lambda x: lax.linalg.householder_product(x[:, :3], x[0, :3]),
    "lu": lambda x: lax.linalg.lu(x),
    "lu_pivots_to_permutation": of_pivots,
    "ormqr": lambda x: linalg.ormqr(x[:, :3], x[0, :3], x),
    "qr": lambda x: lax.linalg.qr(x, full_matrices=False),
    "qr, pivoted": lambda x: lax.linalg.qr(x, pivoting=True, full_matrices=True),
    "schur": lambda x: lax.linalg.schur(x[:, :4]),
    "svd": lambda x: lax.linalg.svd(x, full_matrices=False),
    "svd, values alone": lambda x: lax.linalg.svd(x, compute_uv=False),
    "symmetric_product": lambda x: lax.linalg.symmetric_product(x, x[:, :4]),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(
        square(x), x, left_side=True, lower=True
    ),
    "tridiagonal": lambda x: lax.linalg.tridiagonal(square(x)),
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(
        x[:, 0], x[:, 1] + 9, x[:, 2], x
    ),
}
# Of JAX 0.12.
NEWER = {
    "log2": lambda x: lax.log2(jnp.abs(x)),
    "one_minus_square": lambda x: lax.one_minus_square(x),
    "polynomial": lambda x: lax.polynomial_p.bind(x, 2 * x, x + 1),
}
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
    **OF_MATRICES,
    **{name: fn for name, fn in NEWER.items() if hasattr(lax, name)},
    **named(
        "eq_to le_to lt_to", lambda n: lambda x: getattr(lax, f"{n}_p").bind(x, 2 * x)
    ),
    "mulhi": lambda x: lax.mulhi(bits_of(x), bits_of(2**20 * x)),
    "stage": lambda x: lax.stage_p.bind(x),
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
    "clz": lambda x: lax.clz(bits_of(x)),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), jnp.abs(x) + 1),
    "zeta": lambda x: lax.zeta(jnp.abs(x) + 2, jnp.abs(x) + 1),
    "regularized_incomplete_beta": lambda x: lax.betainc(
        jnp.abs(x) + 1, jnp.abs(x) + 2, jax.nn.sigmoid(x)
    ),
    "approx_top_k": lambda x: lax.approx_max_k(x, 2, aggregate_to_topk=False),
    "fft": lambda x: jnp.fft.fft(x, axis=1),
    "tile": lambda x: lax.tile(x, (2, 1)),
    "reduce": lambda x: lax.reduce((x, 2 * x), (0.0, 1.0), sum_and_product, (0,)),
    "reduce_window": lambda x: windowed((x, 2 * x), (0.0, 1.0), sum_and_product),
    "reduce_window_max": largest,
    "select_and_gather_add": lambda x: jax.jvp(largest, (x,), (2 * x,))[1],
    "select_and_scatter_add": lambda x: jax.vjp(largest, x)[1](x[:3])[0],
    "reduce_window_min": lambda x: windowed(x, jnp.inf, lax.min),
    "reduce_window_sum": lambda x: windowed(x, 0.0, lax.add),
    "scatter": lambda x: x.at[jnp.array([2, 0])].set(2 * x[:2]),
    "scatter-add": lambda x: x.at[:, bits_of(x[0]) % 5].add(2 * x),
    **named(
        "scatter-max scatter-min scatter-mul scatter-sub",
        lambda n: lambda x: scattered(x, n.removeprefix("scatter-")),
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
    "custom_jvp_call": lambda x: lax.fori_loop(0, 2, lambda _, y: jax.nn.relu(y), x),
    "custom_vjp_call": lambda x: lax.fori_loop(0, 2, lambda _, y: given(y), x),
    "custom_linear_solve": lambda x: jax.scipy.sparse.linalg.cg(
        lambda y: square(x) @ y, x[:, 4], x[:, 3]
    )[0],
    "while, each row until it is done": newton,
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5 + x), (0, x)
    )[1],
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x),
}
# Never in a jaxpr, not in every version of JAX, made others by vmap (see below), or of
# a mesh in Explicit mode (`tests/system/test_fused_placement.py`).
ABSENT = {"stop_gradient", "stage", "pjit", "stack", "unstack", "reshard"}
ABSENT |= {"dynamic_slice", "dynamic_update_slice"}
ABSENT |= {name for name in NEWER if name not in EXAMPLES}


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
    rest = [i for i in program.live if i not in positions]
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
            primitive = name.split()[0].rstrip(",")
            assert primitive in inside or primitive in ABSENT, name
    having = {name for name, rule in RULES.items() if not is_refused(rule)}
    assert sorted(having - found - ABSENT) == []


def is_refused(rule):
    """Whether a rule says why there is none."""
    return isinstance(rule, refused.Refused)


def primitives_of(module):
    """The names of the primitives that a module of JAX has."""
    return {p.name for p in vars(module).values() if isinstance(p, jex.Primitive)}


@pytest.mark.parametrize("module", [lax, lax.linalg, linalg], ids=lambda m: m.__name__)
def test_each_primitive_has_a_rule_or_a_reason(module):
    """A new one has neither, and stands here by its name."""
    assert sorted(primitives_of(module) - set(RULES)) == []


def test_a_reason_refuses():
    """In both directions, and with a text."""
    for name, rule in RULES.items():
        if is_refused(rule):
            assert type(rule).__doc__ != refused.Refused.__doc__
            assert type(rule).forward is type(rule).__mro__[2].forward, name


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x: constrained(x, "x"), "sharding_constraint along the axis"),
        (lambda x: constrained(x, None), None),
        (lambda x: x + lax.iota(jnp.float32, 6)[:, None], None),
        (lambda x: jnp.linalg.cholesky(x @ x.T), "dot_general"),
    ],
)
def test_what_mixes_rows_is_refused(fn, why):
    """By the name of the equation that does; more are in `test_refused_rows.py`."""
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
    """`docs/how-it-works.md` names each primitive once, by its rule."""
    _, section = DOCS.read_text().split("## What Can Be Updated in Slices\n")
    rows = re.findall(r"^\| (\w+) \| (`.*`) \|$", section, re.MULTILINE)
    documented = [(name, rule) for rule, names in rows for name in names.split(", ")]
    registered = [(f"`{name}`", type(rule).__name__) for name, rule in RULES.items()]
    assert sorted(documented) == sorted(registered)

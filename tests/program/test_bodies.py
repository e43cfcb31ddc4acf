"""Equations with bodies: each that JAX has is entered, or takes whole values."""

import functools
import importlib
import inspect
import pkgutil
import re
import sys
import warnings

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import compute_on, pallas, xla_metadata
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core as jex
from jax.interpreters import batching, mlir

import optax_offload as oo
from optax_offload._program.bodies import Given, Row, Taken, entered
from optax_offload._program.graph import passed_on

W = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8, 8)) / 3, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8)), jnp.float32)


def net(w, x):
    """Layers in a scan, whose parameters rest on the host."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def with_gradient(**how):
    """The layers, with a derivative of their own."""
    fn = jax.custom_vjp(net)
    fn.defvjp(
        lambda w, x: (net(w, x), (w, x)), lambda r, g: jax.vjp(net, *r)[1](g), **how
    )
    return fn


def with_tangents():
    """The layers, with tangents of their own."""
    fn = jax.custom_jvp(net)
    fn.defjvp(lambda primals, tangents: jax.jvp(net, primals, tangents))
    return fn


def with_batches():
    """The layers, with a rule of their own for vmap."""
    fn = custom_vmap(net)
    fn.def_vmap(lambda size, batched, w, x: (jax.vmap(net)(w, x), True))
    return fn


def looped(w, x):
    """The layers in the body of a while, whose condition takes parameters too."""
    return lax.while_loop(
        lambda c: (c[0] < 2) & (jnp.sum(w) < 1e9),
        lambda c: (c[0] + 1, net(w, c[1])),
        (0, x),
    )[1]


def in_turn(w, x):
    """The layers in the body of a scan."""
    return lax.scan(lambda h, _: (net(w, h), None), x, None, length=2)[0]


def chosen(w, x):
    """The layers in branches."""
    return lax.cond(x[0, 0] > 0, net, lambda w, x: net(w, -x), w, x)


def sharded(w, x):
    """The layers on each device's part of a mesh."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("d",))
    spec = jax.P("d")
    return jax.shard_map(net, mesh=mesh, in_specs=(jax.P(), spec), out_specs=spec)(w, x)


def solved(w, x):
    """An implicit layer."""
    return lax.custom_root(
        lambda z: z + 0.1 * net(w, z) - x,
        x,
        lambda f, z: lax.fori_loop(0, 8, lambda _, z: z - f(z), z),
        lambda g, y: lax.fori_loop(0, 8, lambda _, z: y - (g(z) - z), y),
    )


def linearly_solved(w, x):
    """A solver whose matrix is a scan over layers."""

    def product(z):
        return z + 0.1 * lax.scan(lambda h, w: (h @ w, None), z, w)[0]

    def solve(product, b):
        return lax.fori_loop(0, 6, lambda _, z: b - (product(z) - z), b)

    return lax.custom_linear_solve(product, x, solve, solve)


def newton(w, x):
    """A step by conjugate gradients, with products with the Hessian."""
    gradient = jax.grad(lambda w: jnp.mean(net(w, x) ** 2))

    def hessian(v):
        return jax.jvp(gradient, (w,), (v,))[1] + v

    return jax.scipy.sparse.linalg.cg(hessian, gradient(w), maxiter=1)[0]


def partitioned(w, x):
    """The layers, with a partition of their own."""
    fn = custom_partitioning(net)
    fn.def_partition(
        infer_sharding_from_operands=lambda mesh, operands, _: operands[1].sharding,
        partition=lambda mesh, operands, result: (
            mesh,
            net,
            result.sharding,
            [x.sharding for x in operands],
        ),
        sharding_rule="l a b, n a -> n b",
    )
    return fn(w, x)


def in_a_kernel(w, x):
    """The layers in a kernel."""

    def kernel(w, x, out):
        out[...] = net(w[...], x[...])

    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, result, interpret=True)(w, x)


def twice(w, x):
    """An equation that nobody knows, which evaluates its body twice."""
    return unknown.bind(w, x, jaxpr=jax.make_jaxpr(net)(w, x))


def on_itself(w, x, *, jaxpr):
    """What it means."""
    (once,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, w, x)
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, w, once)[0]


unknown = jex.Primitive("unknown")
unknown.def_abstract_eval(lambda w, x, **_: x)
mlir.register_lowering(unknown, mlir.lower_fun(on_itself, multiple_results=False))


def of_gradient(w, x):
    """The first time that checkpointed layers are computed, for a gradient."""
    return jax.vjp(jax.checkpoint(net), w, x)[0]


# What JAX 0.12 calls `eval_jaxpr`, older ones call `closed_call`.
FIRST_TIME = jax.make_jaxpr(of_gradient)(W, X).jaxpr.eqns[0].primitive.name

# By the primitive.
ENTERED = {
    FIRST_TIME: of_gradient,
    "cond": chosen,
    "custom_jvp_call": with_tangents(),
    "custom_vjp_call": with_gradient(),
    "custom_vmap_call": with_batches(),
    "jit": jax.jit(net, inline=False),
    "remat2": jax.checkpoint(net),
    "scan": in_turn,
    "shard_map": sharded,
    "while": looped,
}
WHOLE = {
    "composite": lax.composite(net, name="my.net"),
    "custom_linear_solve": linearly_solved,
    "custom_partitioning": partitioned,
    "linear_call": lambda w, x: jax.custom_derivatives.linear_call(
        net, lambda _, t: t, w, x
    ),
    "pallas_call": in_a_kernel,
    "unknown": twice,
}
if hasattr(compute_on, "compute_on2"):
    WHOLE["compute_on"] = compute_on.compute_on2(
        net, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device
    )
if hasattr(xla_metadata, "xla_metadata_call"):
    WHOLE["xla_metadata_call"] = xla_metadata.xla_metadata_call(net, a="b")
# Without parameters of a model, or in the body of one of these alone.
OTHERS = {
    "numbers": {"reduce", "reduce_window", "select_and_scatter"}
    | {f"scatter{way}" for way in ("", "-add", "-max", "-min", "-mul", "-sub")},
    "in kernels": {"core_map", "emit_pipeline", "mpmd_map", "parallel_loop"}
    | {"pipeline_body", "run_scoped", "run_state"},
    "kernels": {"cudnn_fusion", "custom_fusion", "dot_product_attention_bwd"}
    | {"dot_product_attention_fwd", "fused_call", "fusible", "jaxpr_call"}
    | {f"thunky.{x}" for x in ("async_start", "call_thunky_nested", "cond", "while")}
    | {"thunky.collective_group"},
    "lowered to what is in it before a program is made": {"remat_opt"},
    "made by no function": {"call", "compute_on", "program_order"}
    | {"xla_metadata_call"}
    | ({"closed_call", "eval_jaxpr"} - {FIRST_TIME}),
}
BODY = re.compile(r"(\w+_)?jaxprs?|branches|call|callee|fun_jaxpr_thunk")


def functions_of(primitive):
    """What JAX does with equations of a primitive."""
    for fn in (primitive.impl, primitive.abstract_eval):
        yield fn
        for cell in getattr(fn, "__closure__", None) or ():
            yield cell.cell_contents
    yield batching.fancy_primitive_batchers.get(primitive)
    lowering = mlir._lowerings.get(primitive)
    yield getattr(lowering, "rule", lowering)


def has_body(primitive):
    """Whether a parameter is a body, by its name in one of these."""
    for fn in functions_of(primitive):
        while isinstance(fn, functools.partial):
            fn = fn.func
        if not callable(fn) or not inspect.isfunction(inspect.unwrap(fn)):
            continue
        if any(map(BODY.fullmatch, inspect.signature(fn).parameters)):
            return True
    return False


def test_all_that_jax_has():
    """Whoever finds another here says which it is, with a program that has it."""
    source = importlib.import_module("jax._src")
    for module in pkgutil.walk_packages(source.__path__, "jax._src."):
        if "test" not in module.name and "examples" not in module.name:
            with warnings.catch_warnings(action="ignore"):
                try:
                    importlib.import_module(module.name)
                except Exception:  # Of other platforms, or of packages not installed.
                    continue
    modules = [m for name, m in sys.modules.items() if name.startswith("jax.")]
    every = {id(x): x for m in modules for x in vars(m).values()}.values()
    found = {x.name for x in every if isinstance(x, jex.Primitive) and has_body(x)}
    known = {*ENTERED, *WHOLE}.union(*OTHERS.values())
    assert found - known == set()
    assert set(ENTERED) <= found


@pytest.mark.parametrize("name", ENTERED)
def test_what_is_entered(name):
    """Its arguments are its operands, and rows are loaded in its body alone."""
    fn = ENTERED[name]
    equations = jax.make_jaxpr(fn)(W, X).jaxpr.eqns
    (e,) = (e for e in equations if e.primitive.name == name)
    for body in entered(e):
        types = [e.invars[i].aval for i in body.operands]
        of_body = [v.aval for v in body.closed.jaxpr.invars]
        assert len(types) == len(of_body)
        assert [x.dtype for x in types] == [x.dtype for x in of_body]
    check(fn, "while" if name == "while" else None)  # Its condition takes it.


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not(name):
    """It is left as it is, and the schedule says what took parameters whole."""
    equations = jax.make_jaxpr(WHOLE[name])(W, X).jaxpr.eqns
    (e,) = (e for e in equations if e.primitive.name == name)
    assert not entered(e)
    check(WHOLE[name], name)


def check(fn, whole):
    """A function of parameters at rest, against one of parameters on the device."""
    step = oo.jit(fn)
    rest = oo.set_memory_kind(W, "", "pinned_host")
    np.testing.assert_array_equal(step(rest, X), jax.jit(fn)(W, X))
    text = str(step.schedule(rest, X))
    assert ("rows in each iteration" in text) == (whole is None or whole == "while")
    assert ("loaded whole" in text) == (whole is not None)
    assert whole is None or f"loaded whole by '{whole}'" in text


def train(fn, tx, params):
    """A step that trains what a function computes, once."""

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(fn(w, x) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return oo.jit(step, donate_argnums=(0, 1))(params, tx.init(params), X)


# `test_at_rest.py` and tests of whole steps have the others.
STEPS = {name: ENTERED[name] for name in ("cond", "remat2")}
STEPS |= {"solved": solved, "custom_linear_solve": linearly_solved}
STEPS["optimized"] = with_gradient(optimize_remat=True)


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    """Gradients and updates, with everything on the host."""
    tx = optax.sgd(0.1, momentum=0.9)
    want = train(STEPS[name], tx, jnp.copy(W))
    rest = oo.set_memory_kind(jnp.copy(W), "", "pinned_host")
    got = train(STEPS[name], oo.offload(tx, oo.Rule(".*", min_bytes=8)), rest)
    assert_close(got, want, rtol=1e-7, atol=1e-6)
    assert got[0].sharding.memory_kind == "pinned_host"


def test_a_direction_of_newtons():
    """Its solver takes parameters whole, and the gradient takes them by rows."""
    step, rest = oo.jit(newton), oo.set_memory_kind(W, "", "pinned_host")
    np.testing.assert_allclose(step(rest, X), jax.jit(newton)(W, X), atol=1e-6)
    text = str(step.schedule(rest, X))
    assert "of rows in each iteration" in text
    assert "loaded whole by 'custom_linear_solve'" in text


def test_an_update_in_an_equation_that_is_not_entered():
    """Raises with the equation, and the fix."""
    tx = oo.offload(optax.sgd(0.1, momentum=0.9), oo.Rule(".*", min_bytes=8))
    state = tx.init(W)

    def update(w, trace):
        return tx.update(w, (state[0]._replace(trace=trace), state[1]), w)[0]

    step = oo.jit(lax.composite(update, name="my.update"))
    message = r"an offloaded update is in a 'composite'.*Call update\(...\) outside"
    with pytest.raises(NotImplementedError, match=message):
        step(W, state[0].trace)


only_elsewhere = jex.Primitive("only_elsewhere")
only_elsewhere.def_abstract_eval(lambda x: x)
mlir.register_lowering(only_elsewhere, lambda ctx, x: [x], platform="cuda")


def elsewhere(w, x):
    """Layers that the CPU cannot lower."""
    return only_elsewhere.bind(net(w, x))


PLATFORMS = {
    "named": functools.partial(lax.platform_dependent, cpu=net, cuda=elsewhere),
    "default": functools.partial(
        lax.platform_dependent, cuda=elsewhere, rocm=elsewhere, default=net
    ),
    "inside": lambda w, x: lax.scan(
        lambda h, w: (lax.platform_dependent(w[None], h, **BY_NAME), None), x, w
    )[0],
}
BY_NAME = {"cpu": net, "cuda": lambda w, x: only_elsewhere.bind(net(w, x))}


@pytest.mark.parametrize("name", PLATFORMS)
def test_branches_of_platforms(name):
    """Only that of the platform is lowered, whose rows are loaded in its scan."""
    check(PLATFORMS[name], None)


def test_an_update_that_differs_by_platform():
    """Its state is not split by the platform, of which there is but one."""

    def update(updates, state, params=None):
        def here(g, m):
            return g, 0.9 * m + g

        def there(g, m):
            return only_elsewhere.bind(g), m

        return lax.platform_dependent(updates, state, cpu=here, cuda=there)

    tx = optax.GradientTransformation(jnp.zeros_like, update)
    ours = oo.offload(tx, oo.Rule(".*", min_bytes=8))
    want = jax.jit(tx.update)(W, W)
    got = jax.jit(ours.update)(W, oo.set_memory_kind(W, "", "pinned_host"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def body_of(fn, *args):
    """The last body of the only equation of a function that has one."""
    closed = jax.make_jaxpr(fn)(*args)
    (bodies,) = (found for e in closed.eqns if (found := entered(e)))
    return closed.jaxpr, bodies[-1]


def test_what_turns_of_a_scan_take_and_give():
    """A constant, a carry, two rows; the row that comes out as it went in is known."""

    def fn(scale, carry, xs, ys):
        @jax.checkpoint  # Else JAX itself sees that rows come out as they went in.
        def turn(h, row):
            x, y = row
            return h + scale * x, (h, y)

        return lax.scan(turn, carry, (xs, ys))

    jaxpr, body = body_of(fn, 2.0, 1.0, jnp.ones(3), jnp.zeros((3, 2)))
    scale, carry, xs, ys = jaxpr.invars
    inside = body.jaxpr.invars
    last, before, same = body.equation.outvars
    assert body.split("abcd") == Taken("a", "b", "cd")
    assert body.given("abc") == Given("a", "bc")
    assert (body.consts, body.carry, body.xs) == ([scale], [carry], [xs, ys])
    assert (body.carried, body.stacked) == ([last], [before, same])
    assert body.rows_taken == [Row(2, xs, inside[2]), Row(3, ys, inside[3])]
    outside = body.jaxpr.outvars
    assert body.rows_given == [Row(1, before, outside[1]), Row(2, same, outside[2])]
    assert passed_on(body) == {same: 3}


def test_what_turns_of_a_while_take():
    """What the condition takes alone is not theirs, and nothing of it is a row."""

    def fn(most, by, x, y):
        return lax.while_loop(
            lambda c: c[0] < most, lambda c: (c[0] + by, 2 * c[1]), (x, y)
        )

    jaxpr, body = body_of(fn, 9.0, 2.0, 1.0, jnp.ones(3))
    most, by, x, y = jaxpr.invars
    assert body.equation.invars[: body.first] == [most]
    assert (body.consts, body.carry, body.xs) == ([by], [x, y], [])
    assert (body.carried, body.stacked) == (body.equation.outvars, [])
    assert [body.equation.invars[i] for i in body.operands] == [by, x, y]
    assert passed_on(body) == {}


def test_what_runs_once_takes_all_as_it_is():
    """A branch all but the index; its results are neither rows nor passed on."""
    jaxpr, body = body_of(
        lambda i, x: lax.cond(i, lambda x: x, lambda x: 2 * x, x), True, jnp.ones(3)
    )
    assert body.operands == range(1, 2)
    assert (body.consts, body.carry, body.xs) == ([jaxpr.invars[1]], [], [])
    assert (body.carried, body.stacked) == (body.equation.outvars, [])

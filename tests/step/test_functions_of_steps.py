"""Functions of functions, given a step in each form.

Each gives what it gives of the plain step, or an error of ours.
"""

import copy
import functools
import inspect
import itertools

import jax
import jax.export
import jax.numpy as jnp
import pytest
from harness import kinds
from jax.experimental import checkify
from step_forms import DEVICE, FORMS, arguments, assert_same, loss_fn, plain

import optax_offload as oo


def zeros(shapes):
    """Values of the shapes and dtypes that an evaluation of shapes gives."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def like(x):
    """Ones, sharded and placed as an array."""
    return jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding)


def with_methods(step):
    """A step with the methods that `jax.jit` gives."""
    return step if hasattr(step, "lower") else jax.jit(step)


class Functions:
    """Each takes a step, parameters, a state and a batch."""

    @staticmethod
    def call(f, p, s, x):
        return f(p, s, x)

    @staticmethod
    def eval_shape(f, p, s, x):
        return zeros(jax.eval_shape(f, p, s, x))

    @staticmethod
    def eval_shape_with_places(f, p, s, x):
        return zeros(oo.eval_shape(f, p, s, x))

    @staticmethod
    def eval_shape_of_its_own(f, p, s, x):
        return zeros(with_methods(f).eval_shape(p, s, x))

    @staticmethod
    def make_jaxpr(f, p, s, x):
        closed, shape = jax.make_jaxpr(f, return_shape=True)(p, s, x)
        evaluate = functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
        values = jax.jit(evaluate)(*jax.tree.leaves((p, s, x)))
        return jax.tree.unflatten(jax.tree.structure(shape), values)

    @staticmethod
    def eval_jaxpr(f, p, s, x):
        closed, shape = jax.make_jaxpr(f, return_shape=True)(p, s, x)
        leaves = jax.tree.leaves((p, s, x))
        values = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), values)

    @staticmethod
    def jit(f, p, s, x):
        return jax.jit(f)(p, s, x)

    @staticmethod
    def jit_of_ours(f, p, s, x):
        return oo.jit(f)(p, s, x)

    @staticmethod
    def stream(f, p, s, x):
        return jax.jit(oo.stream(f))(p, s, x)

    @staticmethod
    def scan(f, p, s, x):
        def body(carry, x):
            *carry, loss = f(*carry, x)
            return tuple(carry), loss

        xs = jnp.stack([x, x])
        return jax.jit(lambda p, s, xs: jax.lax.scan(body, (p, s), xs))(p, s, xs)

    @staticmethod
    def fori_loop(f, p, s, x):
        def loop(p, s, x):
            return jax.lax.fori_loop(0, 2, lambda _, c: f(*c, x)[:2], (p, s))

        return jax.jit(loop)(p, s, x)

    @staticmethod
    def cond(f, p, s, x):
        def either(first, p, s, x):
            return jax.lax.cond(first, f, f, p, s, x)

        return jax.jit(either)(True, p, s, x)

    @staticmethod
    def vmap(f, p, s, x):
        return jax.vmap(f, in_axes=(None, None, 0))(p, s, jnp.stack([x, x + 1]))

    @staticmethod
    def vmap_in_jit(f, p, s, x):
        mapped = jax.jit(jax.vmap(f, in_axes=(None, None, 0)))
        return mapped(p, s, jnp.stack([x, x + 1]))

    @staticmethod
    def jvp(f, p, s, x):
        tangents = jax.tree.map(like, p)
        return jax.jvp(lambda p: f(p, s, x), (p,), (tangents,))

    @staticmethod
    def jvp_in_jit(f, p, s, x):
        def forward(p, s, x, tangents):
            return jax.jvp(lambda p: f(p, s, x), (p,), (tangents,))

        return jax.jit(forward)(p, s, x, jax.tree.map(like, p))

    @staticmethod
    def linearize(f, p, s, x):
        values, forward = jax.linearize(lambda x: f(p, s, x), x)
        return values, forward(x)

    @staticmethod
    def grad(f, p, s, x):
        return jax.grad(lambda x: f(p, s, x)[2])(x)

    @staticmethod
    def grad_of_parameters(f, p, s, x):
        return jax.jit(jax.grad(lambda p: f(p, s, x)[2]))(p)

    @staticmethod
    def vjp(f, p, s, x):
        loss, backward = jax.vjp(lambda x: f(p, s, x)[2], x)
        return loss, backward(jnp.ones_like(loss))

    @staticmethod
    def hessian_vector_product(f, p, s, x):
        return jax.jvp(jax.grad(lambda x: f(p, s, x)[2]), (x,), (x,))

    @staticmethod
    def checkpoint(f, p, s, x):
        return jax.checkpoint(f)(p, s, x)

    @staticmethod
    def grad_of_checkpoint(f, p, s, x):
        return jax.grad(jax.checkpoint(lambda x: f(p, s, x)[2]))(x)

    @staticmethod
    def custom_vjp(f, p, s, x):
        own = jax.custom_vjp(f)
        own.defvjp(lambda *args: (f(*args), args), lambda args, _: args)
        return own(p, s, x)

    @staticmethod
    def custom_jvp(f, p, s, x):
        own = jax.custom_jvp(f)
        own.defjvp(lambda primals, tangents: (f(*primals), f(*primals)))
        return own(p, s, x)

    @staticmethod
    def checkified(f, p, s, x):
        error, results = checkify.checkify(f)(p, s, x)
        error.throw()
        return results

    @staticmethod
    def checkified_in_jit(f, p, s, x):
        checked = jax.jit(checkify.checkify(f, errors=checkify.all_checks))
        error, results = checked(p, s, x)
        error.throw()
        return results

    @staticmethod
    def disable_jit(f, p, s, x):
        with jax.disable_jit():
            return f(p, s, x)

    @staticmethod
    def ensure_compile_time_eval(f, p, s, x):
        def outer():
            with jax.ensure_compile_time_eval():
                return f(p, s, x)

        return jax.jit(outer)()

    @staticmethod
    def export(f, p, s, x):
        exported = jax.export.export(with_methods(f))(p, s, x)
        return exported.call(p, s, x)

    @staticmethod
    def lower(f, p, s, x):
        return with_methods(f).lower(p, s, x).compile()(p, s, x)

    @staticmethod
    def copied(f, p, s, x):
        return copy.deepcopy(copy.copy(f))(p, s, x)

    @staticmethod
    def partial(f, p, s, x):
        return functools.partial(f, p)(s, x)

    @staticmethod
    def jit_of_partial(f, p, s, x):
        return jax.jit(functools.partial(f, p))(s, x)

    @staticmethod
    def closed_over(f, p, s, x):
        return jax.jit(lambda x: f(p, s, x))(x)

    @staticmethod
    def named_call(f, p, s, x):
        return jax.jit(jax.named_call(f, name="step"))(p, s, x)

    @staticmethod
    def named_scope(f, p, s, x):
        with jax.named_scope("steps"):
            return f(p, s, x)

    @staticmethod
    def closure_convert(f, p, s, x):
        converted, constants = jax.closure_convert(f, p, s, x)
        return converted(p, s, x, *constants)


FUNCTIONS = dict(inspect.getmembers(Functions, inspect.isfunction))


@functools.cache
def plainly(name):
    """What a function gives of the plain step."""
    return FUNCTIONS[name](plain, *arguments())


# Parameters at rest, and one more form each, in turn.
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if form == "at rest" else pytest.mark.slow)
        for name, other in zip(FUNCTIONS, itertools.cycle(FORMS), strict=False)
        for form in {"at rest": 0, other: 0}
    ],
)
def test_functions_of_a_step(name, form):
    """The same trees, types and numbers."""
    if name == "ensure_compile_time_eval" and jax.__version__.startswith("0.10."):
        pytest.skip("there JAX loses memories by itself (limits.md)")
    step, _ = FORMS[form]
    assert_same(FUNCTIONS[name](step, *arguments(form)), plainly(name))


@pytest.mark.parametrize("name", ["jit", "scan", "cond", "export", "disable_jit"])
def test_results_are_where_the_arguments_were(name):
    """Parameters and state, inside of other functions."""
    params, state, x = arguments("at rest")
    results = FUNCTIONS[name](FORMS["at rest"][0], params, state, x)
    params_and_state = results[0] if name == "scan" else results[:2]
    assert kinds(params_and_state) == kinds((params, state))


@pytest.mark.parametrize("form", ["jax.jit", "at rest"])
def test_reverse_mode_through_an_update_is_refused(form):
    """By our error, wherever the new parameters are."""
    step, _ = FORMS[form]
    params, state, x = arguments(form)

    def after(x):
        return jnp.sum(jax.device_put(step(params, state, x)[0]["head"], DEVICE))

    for grad in (jax.grad(after), jax.jit(jax.grad(after))):
        with pytest.raises(TypeError, match="differentiated in reverse mode"):
            grad(x)


def test_reverse_mode_through_values_at_rest():
    """A loss of parameters that return to the host, as after a step of descent."""

    def descend(params, x):
        grads = jax.grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def after(descend, params, x):
        return loss_fn(jax.device_put(descend(params, x), DEVICE), x)

    params, _, x = arguments()
    at_rest, _, _ = arguments("at rest")
    expected = jax.grad(functools.partial(after, descend), argnums=1)(params, x)
    for wrap in (oo.jit, oo.stream):
        grad = jax.jit(jax.grad(functools.partial(after, wrap(descend)), argnums=1))
        assert_same(grad(at_rest, x), expected)


@pytest.mark.parametrize("wrap", [oo.jit, oo.stream])
def test_checks_in_a_step(wrap):
    """`checkify` finds those that a step makes itself, and NaNs."""

    def checked(params, x):
        checkify.check(jnp.all(x > 0), "an x is below zero")
        return jnp.log(loss_fn(params, x) - 10)

    params, _, x = arguments("at rest")
    error, _ = jax.jit(checkify.checkify(wrap(checked)))(params, x)
    with pytest.raises(checkify.JaxRuntimeError, match="below zero"):
        error.throw()
    find = checkify.checkify(wrap(checked), errors=checkify.float_checks)
    error, _ = find(params, jnp.abs(x))
    with pytest.raises(checkify.JaxRuntimeError, match="nan generated"):
        error.throw()

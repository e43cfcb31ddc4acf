"""JAX's flags that change how functions are called, traced or compiled.

Under each, a step in each form gives the plain step's numbers, or its error.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from harness import kinds
from step_forms import (
    FORMS,
    OFFLOADED,
    arguments,
    assert_same,
    loss_fn,
    made_anew,
    plain_step,
)

import optax_offload as oo

# Not here: flags of other platforms, of processes, of caches on disk, of Pallas, of
# export's versions, of printing and dumping, and those read once when JAX starts.
FLAGS = [
    ("jax_debug_nans", True),
    ("jax_debug_infs", True),
    ("jax_enable_checks", True),
    ("jax_check_tracer_leaks", True),
    ("jax_disable_jit", True),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_enable_x64", True),
    ("jax_explicit_x64_dtypes", "error"),
    ("jax_log_compiles", True),
    ("jax_explain_cache_misses", True),
    ("jax_threefry_partitionable", False),
    ("jax_debug_key_reuse", True),
    ("jax_transfer_guard", "disallow"),
    ("jax_array_garbage_collection_guard", "fatal"),
    ("jax_traceback_filtering", "off"),
    ("jax_include_full_tracebacks_in_locations", True),
    ("jax_default_matmul_precision", "highest"),
    ("jax_use_shardy_partitioner", False),
    ("jax_compiler_enable_remat_pass", False),
    ("jax_disable_most_optimizations", True),
    ("jax_optimization_level", "O1"),
    ("jax_memory_fitting_level", "O3"),
    ("eager_constant_folding", True),
    ("jax_use_direct_linearize", False),
    ("jax_custom_vjp3", True),
    ("jax_custom_jvp3", True),
    ("jax_remat3", True),
    ("jax_scan3", True),
    ("jax_use_rgv3", True),
    ("jax_use_simplified_jaxpr_constants", True),
    ("jax_embedded_constants_max_bytes", 0),
    ("jax_mutable_array_checks", True),
    ("jax_disable_bwd_checks", True),
    ("jax_check_static_indices", True),
    ("jax_auto_pcast", True),
    ("jax_remove_size_one_mesh_axis_from_type", True),
    ("jax_error_checking_behavior_nan", "raise"),
    ("jax_error_checking_behavior_divide", "raise"),
    ("jax_error_checking_behavior_oob", "raise"),
    ("jax_cpu_enable_async_dispatch", False),
    ("jax_use_cpp_shard_args", False),
    ("jax_log_checkpoint_residuals", True),
    ("jax_thread_guard", True),
    ("jax_legacy_prng_key", "error"),
    ("jax_enable_custom_prng", True),
    ("jax_no_execution", True),
]
# JAX then writes into a ref, also where an optimizer divides.
USE_REFS = {"jax_error_checking_behavior_nan", "jax_error_checking_behavior_divide"}
# Flags that every form is tried with. Others have parameters at rest, and one more form
# each, in turn, which the newer JAX alone runs: it has all of the flags. The older one
# runs every other flag.
QUICK = {"jax_debug_nans", "jax_enable_checks", "jax_debug_key_reuse"}


@contextlib.contextmanager
def flag(name, value):
    """A flag of JAX that is set for a while."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@functools.cache
def plainly(name, value):
    """What the plain step gives under a flag: results, or an error."""
    given = arguments()
    try:
        with flag(name, value):
            return jax.jit(lambda *args: plain_step(*args))(*given)
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        pytest.param(
            *(name, value, form),
            id=f"{name}-{form}",
            marks=[pytest.mark.newer_jax] if form != "at rest" or odd else [],
        )
        for (name, value), other, odd in zip(
            FLAGS, itertools.cycle(FORMS), itertools.cycle([0, 1]), strict=False
        )
        for form in (FORMS if name in QUICK else {"at rest": 0, other: 0})
    ],
)
def test_steps_under_a_flag(name, value, form):
    """Numbers, and where results are, as without it."""
    if name not in jax.config.values:
        pytest.skip(f"JAX {jax.__version__} has no flag {name}")
    expected, given = plainly(name, value), arguments(form)
    if name in USE_REFS:
        with flag(name, value), pytest.raises(TypeError, match="jax_error_checking"):
            made_anew(form)(*given)
        return
    if isinstance(expected, Exception):
        with flag(name, value), pytest.raises(type(expected)):
            made_anew(form)(*given)
        return
    with flag(name, value):
        got = made_anew(form)(*given)
    assert_same(got, expected)
    assert kinds(got[:2]) == kinds(given[:2])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_traced_again(form):
    """What was called before is called under `jax_no_tracing`."""
    step, given = made_anew(form), arguments(form)
    if form == "stream without jit":
        step = jax.jit(step)
    expected = step(*given)
    with flag("jax_no_tracing", True):
        assert_same(step(*given), expected)


def of_nothing(values):
    """Infinities, of which a product makes NaNs."""
    return jnp.full_like(values, jnp.inf)


@pytest.mark.parametrize("form", FORMS)
def test_the_origin_of_a_nan(form):
    """JAX calls the step again, without jit, to say which equation makes it."""
    params, state, x = arguments(form)
    nans = flag("jax_debug_nans", True)
    with nans, pytest.raises(FloatingPointError, match=r"\(nan\) encountered in scan"):
        made_anew(form)(params, state, of_nothing(x))


def test_the_origin_of_an_infinity():
    """In the update too, which is an equation of its own."""

    def grows(params, state):
        grads = jax.tree.map(lambda p: p * 1e30, params)
        updates, state = OFFLOADED.update(grads, state, params)
        return jax.tree.map(lambda u: u * u, updates), state

    params, state, _ = arguments("at rest")
    on_device, _, _ = arguments("fused")
    plainly_jitted = jax.jit(grows)
    for step in (plainly_jitted, oo.jit(grows), jax.jit(oo.stream(grows))):
        with (
            flag("jax_debug_infs", True),
            pytest.raises(FloatingPointError, match="inf"),
        ):
            step(params if step is not plainly_jitted else on_device, state)


def test_the_origin_of_a_nan_within_functions():
    """As of a step that is called."""
    params, state, x = arguments("at rest")
    step = made_anew("at rest")
    xs = jnp.stack([x, of_nothing(x)])
    with flag("jax_debug_nans", True):
        with pytest.raises(FloatingPointError, match="nan"):
            jax.vmap(step, in_axes=(None, None, 0))(params, state, xs)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.grad(lambda x: step(params, state, x)[2])(of_nothing(x))
        with pytest.raises(FloatingPointError, match="nan"):
            jax.jit(step)(params, state, of_nothing(x))


def test_the_origin_of_a_nan_without_rest():
    """A jitted function that has nothing on the host, and one without arguments."""
    with flag("jax_debug_nans", True):
        with pytest.raises(FloatingPointError, match="encountered in log"):
            oo.jit(lambda x: jnp.log(x), donate_argnums=0)(jnp.float32(-1))
        with pytest.raises(FloatingPointError, match="nan"):
            oo.jit(lambda: jnp.log(jnp.float32(-1)))()


def test_python_sees_values_where_jit_is_disabled():
    """A step that looks at them runs, wherever its parameters rest."""
    seen = []

    def evaluate(params, x):
        loss = loss_fn(params, x)
        seen.append(float(loss) if not isinstance(loss, jax.core.Tracer) else None)
        return loss

    def looks(params, x):
        return params if loss_fn(params, x) > 0 else jax.tree.map(jnp.negative, params)

    params, _, x = arguments("at rest")
    for wrap in (oo.jit, oo.stream):
        seen.clear()
        with jax.disable_jit():
            expected = wrap(evaluate)(params, x)
            assert seen[-1] == expected
            assert_same(wrap(looks)(params, x), params)

"""What `jax.jit` takes, has and raises, `oo.jit` does."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optax_offload as oo
from optax_offload import aot

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def host(x):
    """The array in host memory."""
    return jax.device_put(jnp.asarray(x), HOST)


def scale(x, factor=2, *, offset=0.0):
    """A function of all kinds of arguments, and a result without arrays."""
    return {"y": x * factor + offset, "none": None}


def test_decorators():
    """With and without arguments, and as `functools.partial` makes them."""

    @oo.jit
    def plain(x):
        return x + 1

    @oo.jit(donate_argnums=0)
    def with_arguments(x):
        return x + 1

    @functools.partial(oo.jit, donate_argnums=(0,), static_argnums=1)
    def partial(x, n):
        """Adds."""
        return x + n

    assert plain(1.0) == with_arguments(1.0) == partial(1.0, 1) == 2.0
    x = jnp.ones(4)
    with_arguments(x)
    assert x.is_deleted()
    assert (partial.__name__, partial.__doc__) == ("partial", "Adds.")
    assert repr(partial) == f"<oo.jit of {partial.__wrapped__!r}>"
    assert partial.__wrapped__(1, 2) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("residual", r"'residual'. Did you mean residuals\?"),
        ("donate_argnum", r"'donate_argnum'. Did you mean donate_argnums\?"),
        ("zzz", "'zzz'$"),
    ],
)
def test_names_of_arguments(name, message):
    """One that is wrong raises when the decorator is made, with the nearest."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument {message}"):
        oo.jit(**{name: 0})


def test_methods_of_classes():
    """They get their object first, as a static argument or a pytree."""

    class Adder:
        def __init__(self, n):
            self.n = n

        @functools.partial(oo.jit, static_argnums=0, donate_argnums=1)
        def add(self, x):
            return x + self.n

    adder = Adder(3)
    x = jnp.ones(4)
    np.testing.assert_array_equal(adder.add(x), 4.0)
    assert x.is_deleted()
    np.testing.assert_array_equal(Adder.add(adder, jnp.ones(4)), 4.0)


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({}, (1.0,), {}),
        ({}, (np.ones(3), 4), {"offset": 1}),
        ({"static_argnums": 1}, (np.ones(3), 4), {}),
        ({"static_argnums": (-1,)}, (np.ones(3), 4), {}),
        ({"static_argnames": "factor"}, (np.ones(3), 4), {"offset": 2}),
        ({"static_argnames": ("factor", "offset")}, (np.ones(3),), {"factor": 5}),
        ({"donate_argnames": "x"}, (), {"x": np.ones(3)}),
        ({"keep_unused": True}, (np.ones(3),), {}),
        ({"inline": True}, (np.ones(3),), {}),
        ({"compiler_options": {"xla_cpu_enable_fast_math": False}}, (1.0,), {}),
    ],
)
def test_arguments(options, args, kwargs):
    """The program is the same, letter for letter, and so is what it gives."""
    ours, jaxs = oo.jit(scale, **options), jax.jit(scale, **options)
    lowered = ours.lower(*args, **kwargs)
    assert lowered.as_text() == jaxs.lower(*args, **kwargs).as_text()
    assert lowered.args_info == jaxs.lower(*args, **kwargs).args_info
    expected = scale(*args, **kwargs)
    result = ours(*args, **kwargs)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    shapes = ours.eval_shape(*args, **kwargs)
    assert jax.tree.structure(shapes) == jax.tree.structure(expected)
    assert shapes["y"].dtype == result["y"].dtype
    assert result["y"].weak_type == jaxs(*args, **kwargs)["y"].weak_type


def test_donation_by_name_and_by_number():
    """Of several trees, and of keyword arguments."""

    @oo.jit(donate_argnums=0, donate_argnames=("b",))
    def step(a, *, b, c):
        return jax.tree.map(jnp.add, a, b), jax.tree.map(jnp.add, b, c)

    a, b, c = ({"x": jnp.ones(4), "y": host(jnp.ones(4))} for _ in range(3))
    a["y"], b["y"], c["y"] = jnp.ones(5), jnp.ones(5), jnp.ones(5)
    step(a, b=b, c=c)
    assert all(x.is_deleted() for x in jax.tree.leaves((a, b)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(c))


def test_lowered_and_compiled():
    """They take and give what the function does."""

    @oo.jit(donate_argnums=0, static_argnames="n")
    def step(state, params, n):
        new = jax.device_put(state, DEVICE) + params
        return params + n, {"state": jax.device_put(new, HOST)}

    traced = step.trace(host(jnp.ones((4, 4))), jnp.ones((4, 4)), n=2)
    assert traced.out_info[1]["state"].shape == (4, 4)
    compiled = step.lower(host(jnp.ones((4, 4))), jnp.ones((4, 4)), n=2).compile()
    params, results = compiled(host(jnp.ones((4, 4))), jnp.ones((4, 4)))
    assert params.sharding.memory_kind == "device"
    assert results["state"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(params, 3.0)
    np.testing.assert_array_equal(results["state"], 2.0)
    assert isinstance(step, jax.stages.Wrapped)
    assert jax.eval_shape(functools.partial(step, n=1), 1.0, 2.0)[0].shape == ()


def test_within_transformations():
    """Nothing is donated there."""
    square = oo.jit(lambda x: jnp.sum(x["a"] ** 2), donate_argnums=0)
    x = {"a": jnp.arange(3.0)}
    np.testing.assert_array_equal(jax.grad(square)(x)["a"], 2 * x["a"])
    np.testing.assert_array_equal(jax.vmap(square)({"a": jnp.ones((2, 3))}), 3.0)
    np.testing.assert_array_equal(jax.jit(lambda x: square(x) + 1)(x), 6.0)
    np.testing.assert_array_equal(jax.jvp(square, (x,), (x,))[1], 10.0)
    np.testing.assert_array_equal(
        jax.jit(jax.grad(jax.checkpoint(square)))(x)["a"], 2 * x["a"]
    )
    np.testing.assert_array_equal(
        oo.jit(jax.grad(square), donate_argnums=0)(dict(x))["a"], [0, 2, 4]
    )


def test_values_of_an_outer_trace_that_it_closes_over():
    """Under `jax.jit` and `jax.grad`, also with shardings."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for options in ({}, {"out_shardings": device}):

        def outer(y, options=options):
            return oo.jit(lambda x: x * y, donate_argnums=0, **options)(y)

        assert jax.jit(outer)(3.0) == 9.0
        assert jax.grad(outer)(3.0) == 6.0


def test_calls_do_not_compile_again():
    """Other shapes do, and values that are not committed yet, as with `jax.jit`."""
    step = oo.jit(lambda x: x + 1, donate_argnums=0)
    for n, size in [(4, 1), (4, 1), (5, 2), (4, 2)]:
        step(jnp.ones(n))
        assert step._cache_size() == size
    step.clear_cache()
    assert step._cache_size() == 0
    np.testing.assert_array_equal(step(jnp.ones(4)), 2.0)


def test_errors_are_those_of_jax():
    """Letter for letter."""

    def bad(x, y=None):
        if x > 0:
            return "no array"
        return x

    calls = [
        lambda jit: jit(bad)(1.0),
        lambda jit: jit(lambda x: "no array")(1.0),
        lambda jit: jit(lambda x: x)("no array"),
        lambda jit: jit(lambda x: x)(),
        lambda jit: jit(lambda x: x, static_argnums=0)([]),
        lambda jit: jit(lambda x: x, donate_argnums=3)(1.0),
        lambda jit: jit(lambda x: x, donate_argnums=0, static_argnums=0)(1.0),
        lambda jit: jit(lambda x: x, nonsense=1),
        lambda jit: jit(3),
        lambda jit: jit(lambda x: 1 // 0)(1.0),
    ]
    for call in calls:
        messages = []
        for jit in (oo.jit, jax.jit):
            with pytest.raises(Exception, match=r"\w") as error:
                call(jit)
            messages.append((type(error.value), str(error.value)))
        ours, jaxs = messages
        assert ours[0] is jaxs[0]
        assert first_line(ours[1]) == first_line(jaxs[1])


def first_line(message):
    """What of a message is the same in every process."""
    return message.splitlines()[0].split(" at 0x")[0]


def test_results_without_arrays_and_steps_without_arguments():
    """Nothing to pair."""
    assert oo.jit(lambda x: None, donate_argnums=0)(jnp.ones(())) is None
    assert oo.jit(lambda: 3.0)() == 3.0
    assert oo.jit(lambda x: (3.0, None), donate_argnums=0)(jnp.ones(4)) == (3.0, None)


def test_random_keys():
    """They are donated as by `jax.jit`, and may be the first result."""

    def step(key, state):
        key, now = jax.random.split(key)
        noise = jax.random.normal(now, (4, 4))
        return key, noise, jax.device_put(jax.device_put(state, DEVICE) + noise, HOST)

    for make in (jax.random.key, jax.random.PRNGKey):
        with jax.debug_key_reuse(True):
            _, noise, state = oo.jit(step, donate_argnums=(0, 1))(
                make(0), host(jnp.ones((4, 4)))
            )
        assert noise.sharding.memory_kind == "device"
        assert state.sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(state, 1 + noise, rtol=1e-6)


def test_effects():
    """Printing, in order or not, and what was raised by `checkify`."""
    printed = []

    def step(state, x, ordered):
        jax.debug.callback(lambda x: printed.append(float(x)), x[0, 0], ordered=ordered)
        return x + 1, state + 1

    for ordered in (False, True):
        jitted = oo.jit(functools.partial(step, ordered=ordered), donate_argnums=0)
        x, _ = jitted(jnp.zeros((4, 4)), jnp.ones((4, 4)))
        x, _ = jitted(jnp.zeros((4, 4)), x)
        jax.effects_barrier()
    assert printed == [1.0, 2.0, 1.0, 2.0]
    checked = oo.jit(checkify.checkify(lambda x: checkify.check(x > 0, "low") or x))
    assert "low" in (checked(-1.0)[0].get() or "")


def test_export():
    """A step that is exported keeps its pairs."""
    step = oo.jit(lambda a, b: (b + 1, a + 1), donate_argnums=(0, 1))
    exported = jax.export.export(step)(jnp.ones(4), jnp.ones(4))
    assert exported.mlir_module().count("tf.aliasing_output") == 2
    np.testing.assert_array_equal(exported.call(jnp.ones(4), jnp.ones(4))[0], 2.0)


def test_with_debug_nans():
    """JAX donates nothing then."""
    with jax.debug_nans(True):
        x = jnp.ones(4)
        oo.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert not x.is_deleted()


def test_compiled_for_a_chip_that_is_not_here():
    """`aot.compile` takes it as a function that is jitted."""
    with pytest.raises(ValueError, match="for a function that is jitted"):
        aot.compile(oo.jit(scale), 1.0, target=aot.Target("v5e"), donate_argnums=0)


def test_a_step_that_uses_its_state_in_host_memory_twice():
    """Aliased leaves, of which one is donated."""
    params = {"w": jnp.ones((256, 256))}
    tx = oo.offload(optax.adam(0.1))
    state = tx.init(params)

    @oo.jit(donate_argnames="state")
    def step(params, *, state, old):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state, old

    old = jax.tree.map(jnp.copy, state)
    params, state, old = step(params, state=state, old=old)
    for tree in (state, old):
        assert tree[0].mu["w"].sharding.memory_kind == "pinned_host"
    assert params["w"].sharding.memory_kind == "device"

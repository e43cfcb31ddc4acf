"""Plans of steps on a mesh: in Auto and in Explicit mode, and of several hosts."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload import aot

MIB = 2**20
LAYERS, WIDTH = 16, 512
# On each device, if sharded over so many.
STACK = LAYERS * WIDTH * WIDTH * 4


def sharded_step(offload, target, axis_types=AxisType.Auto, jitted=None):
    """Layers that are sharded over a mesh, and a batch: FSDP as one would write it."""
    mesh = target.mesh(("fsdp",), axis_types=axis_types)
    explicit = axis_types == AxisType.Explicit

    def struct(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {"layers": struct((LAYERS, WIDTH, WIDTH), None, None, "fsdp")}
    x = struct((16 * target.device_count, WIDTH), "fsdp")
    tx = offload(optax.adam(1e-3))
    state = oo.eval_shape(tx.init, params)

    def layer(x, w):
        if explicit:
            w = jax.sharding.reshard(w, P())
        return jnp.tanh(x @ w), None

    def train_step(params, state, x):
        def loss_fn(params):
            y, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
            return jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    shardings = jax.tree.map(lambda s: s.sharding, (params, state, x))
    out = (*shardings[:2], NamedSharding(mesh, P()))
    args = (params, state, x)
    if jitted is None:
        return oo.Step(train_step, args, donate_argnums=(0, 1), out_shardings=out)
    # The options of pjit, by their newer names.
    fn = jitted(
        train_step, donate_argnums=(0, 1), in_shardings=shardings, out_shardings=out
    )
    return oo.Step(fn, args)


def by_hand(found, make_step):
    """The step of a plan's file, compiled as a training script has it."""
    step = make_step(lambda inner: oo.offload(inner, found.config), found.target)
    params, *rest = step.args
    for rule in found.config.parameters:
        params = oo.set_memory_kind(params, rule.regex, "pinned_host")
    if not hasattr(step.fn, "trace"):
        options = {"donate_argnums": (0, 1), "out_shardings": step.out_shardings}
        step = step._replace(fn=oo.jit(step.fn, **options, **found.config.step))
    return aot.compile(step.fn, params, *rest, target=found.target)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis_types"),
    [("h100:4", AxisType.Explicit), ("v5e:2x2", AxisType.Auto)],
)
def test_a_mesh(name, axis_types, folder):
    """Bytes are those of each device; the program by hand is the one of the table."""
    make_step = functools.partial(sharded_step, axis_types=axis_types)
    target = aot.Target(name)
    # Less than a GPU's gathered layers need, or than a TPU's arguments.
    share = {"gpu": 4, "tpu": 2}[target.platform]
    budget = share * STACK // target.device_count
    found = oo.plan(make_step, target=target, budget_bytes=budget, folder=folder)
    assert found.before.used_bytes > budget >= found.after.used_bytes
    assert found.before.parts["state"] == pytest.approx(
        2 * STACK / target.device_count, rel=1e-3
    )
    # A scheduler hides collectives of several GPUs, for memory.
    told = [c.what for c in found.compiled if "without latency hiding" in c.what]
    assert told[:1] == ["nothing moved; without latency hiding"] * (name[0] == "h")
    compiled = by_hand(found, make_step)
    assert aot.peak(compiled).peak_bytes == found.after.used_bytes
    assert aot.step_time(compiled, target) == found.after.time


@pytest.mark.aot
@pytest.mark.slow
def test_a_jitted_step_with_shardings(folder):
    """It is compiled as it is, in and out shardings too; its state moves."""
    make_step = functools.partial(sharded_step, jitted=jax.jit)
    target = aot.Target("h100:4")
    budget = 21 * STACK // 4 // target.device_count
    found = oo.plan(make_step, target=target, budget_bytes=budget, folder=folder)
    assert found.moved
    assert "or jit it with oo.jit" in found.outside[0]
    compiled = by_hand(found, make_step)
    assert aot.peak(compiled).peak_bytes == found.after.used_bytes <= budget


@pytest.mark.aot
@pytest.mark.slow
def test_several_hosts(folder):
    """Host memory is of each host: what its devices need together."""
    target = aot.Target("v5e:4x4")
    assert (target.device_count, target.devices_per_host) == (16, 4)
    budget = 2 * STACK // target.device_count
    options = {"target": target, "budget_bytes": budget, "folder": folder}
    found = oo.plan(sharded_step, **options)
    assert found.after.used_bytes <= budget
    assert found.host_bytes == 4 * found.after.host_bytes > 0
    row = next(r for r in found.alternatives.rows if r.chosen)
    assert row.host_bytes == found.host_bytes
    enough = oo.plan(sharded_step, **options, host_memory_bytes=found.host_bytes)
    assert enough.config == found.config
    with pytest.raises(
        aot.DoesNotFitError, match=r"more than the 4\.00 KiB of each host"
    ):
        oo.plan(sharded_step, **options, host_memory_bytes=4096)

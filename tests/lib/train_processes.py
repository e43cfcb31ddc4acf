"""A training run of one or more processes on the CPU, for `test_processes.py`.

Not a test: each process of a run is this program, given its number. A small Flax model
is sharded over all devices of all processes, its Adam state offloaded. The state is
saved every few steps, and the run goes on from the newest checkpoint there is. With
`--ways` the layers are scanned, and each way trains anew: "plain", or fused, late
gradients on the "host" or by "recompute", or "at_rest", with parameters and residuals
in host memory too.

Prints a line for each step: its number, and the bits of the loss.
"""

import argparse

import jax

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--coordinator", default="")
parser.add_argument("--processes", type=int, default=1)
parser.add_argument("--process", type=int, default=0)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--save_every", type=int, default=2)
parser.add_argument("--ways", nargs="*", default=[])


def initialize(args: argparse.Namespace) -> None:
    """Connects the processes. Before any device is asked for."""
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.processes, args.process)


def run(args: argparse.Namespace, way: str = "") -> None:
    """Trains as one process of several, and prints losses and kinds."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import linen as nn
    from flax.training.train_state import TrainState

    import optax_offload as oo

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + nn.Dense(128)(nn.relu(nn.Dense(256)(x))), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layers = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=4,
            )
            return layers()(x, None)[0]

    model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(128)])
    if way:
        model = Scanned()
    rules = oo.Rule(r".*/(mu|nu)/.*", min_bytes=8)
    tx = oo.offload(optax.adam(1e-2), rules)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    sharded = jax.NamedSharding(mesh, jax.P("data"))

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 128)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    key = jax.random.key(0)
    shapes = jax.eval_shape(create, key)
    # The layers of a stack are whole on every device.
    axes = jax.P(None, "data") if way else jax.P("data")
    split = jax.NamedSharding(mesh, axes)
    shardings = jax.tree.map(lambda x: split if x.ndim else None, shapes)
    template = oo.eval_shape(create, key, out_shardings=shardings)
    if way == "at_rest":
        template = oo.set_memory_kind(template, "params/.*", "pinned_host")
    shardings = jax.tree.map(lambda x: x.sharding, template)

    def batch(step: int) -> jax.Array:
        rows = np.random.default_rng(step).normal(size=(16, 128)).astype(np.float32)
        return jax.make_array_from_callback(rows.shape, sharded, lambda i: rows[i])

    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - x) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), loss

    if way not in ("", "plain"):
        late_gradients = "host" if way == "host" else "recompute"
        schedule = oo.jit(train_step, late_gradients=late_gradients).schedule
        print("fused bytes", schedule(template, batch(0)).gradient_bytes)
        train_step = oo.stream(
            train_step,
            late_gradients=late_gradients,
            residuals="host" if way == "at_rest" else "device",
        )
    train_step = jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(shardings, jax.NamedSharding(mesh, jax.P())),
    )
    with ocp.CheckpointManager(f"{args.directory}/{way}") as manager:
        step = manager.latest_step() or 0
        if step:
            restored = ocp.args.StandardRestore(template)
            state = manager.restore(step, args=restored)
        else:
            state = jax.jit(create, out_shardings=shardings)(key)
        print("from", step, flush=True)
        while step < args.steps:
            state, loss = train_step(state, batch(step))
            step += 1
            print("step", step, float(loss).hex(), flush=True)
            if step % args.save_every == 0:
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                print("saved", step, flush=True)
    report = oo.memory_report(state, rules, under="opt_state/1").check()
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.params)}
    assert kinds == {"pinned_host" if way == "at_rest" else "device"}, kinds
    print("host bytes", report.totals_per_host["pinned_host"], flush=True)


if __name__ == "__main__":
    arguments = parser.parse_args()
    initialize(arguments)
    for way in arguments.ways or [""]:
        print("way", way, flush=True)
        run(arguments, way)

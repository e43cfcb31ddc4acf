"""A step factory for plans: stacked layers of 64 MiB and a head of 16, with Adam."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

MIB = 2**20
LAYERS, WIDTH = 16, 1024
STACK, HEAD = 64 * MIB, 16 * MIB


def loss(params, x):
    """Products of all layers, and of the head."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params["layers"])
    return jnp.sum((x @ params["head"]) ** 2)


def adam_step(
    offload,
    target,
    batch=8,
    layers=LAYERS,
    optimizer=None,
    spec=None,
    clip=1.0,
    logged=False,
    dtype=jnp.float32,
):
    """Stacked layers of 64 MiB and a head of 16; Adam's state is twice that.

    Logged gradients are a result too.
    """
    mesh = target.mesh()
    shapes = {"layers": (layers, WIDTH, WIDTH), "head": (WIDTH, 4 * WIDTH)}
    sharding = NamedSharding(mesh, spec or P())
    params = {
        name: jax.ShapeDtypeStruct(
            shape,
            dtype,
            sharding=NamedSharding(mesh, P(*[None] * (len(shape) - 1), "x")),
        )
        for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32, sharding=sharding)
    inner = optax.adam(1e-3) if optimizer is None else optimizer
    clipping = optax.clip_by_global_norm(clip) if clip else optax.identity()
    tx = optax.chain(clipping, offload(inner))
    state = oo.eval_shape(tx.init, params)

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, *[grads] * logged

    results = params, state, *[params] * logged
    return oo.Step(
        step,
        (params, state, x),
        donate_argnums=(0, 1),
        out_shardings=jax.tree.map(lambda s: s.sharding, results),
        tokens=batch,
    )

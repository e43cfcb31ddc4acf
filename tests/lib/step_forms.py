"""One small train step in each form that the library gives it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_steps import train_step

import optax_offload as oo

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LAYERS, WIDTH = 4, 64  # Its residuals are just worth a transfer.

PLAIN = optax.sgd(lambda count: 0.1 / (1 + count.astype(jnp.float32)), momentum=0.9)
OFFLOADED = oo.offload(PLAIN, oo.Rule(".*", min_bytes=8))


def loss_fn(params, x):
    """Scanned layers and a head."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


step, plain_step = (train_step(tx, loss_fn, value=True) for tx in (OFFLOADED, PLAIN))
plain = jax.jit(plain_step)

# Each with whether parameters rest on the host too.
FORMS = {
    "jax.jit": (jax.jit(step), False),
    "not fused": (oo.jit(step, fuse=False), False),
    "fused": (oo.jit(step), False),
    "at rest": (oo.jit(step), True),
    "residuals": (oo.jit(step, residuals="host"), False),
    "stream": (jax.jit(oo.stream(step)), True),
    "stream without jit": (oo.stream(step), True),
}


def made_anew(form):
    """A form that was never called."""
    if form == "stream without jit":
        return oo.stream(step)
    if form == "stream":
        return jax.jit(oo.stream(step))
    if form == "jax.jit":
        return jax.jit(lambda p, s, x: step(p, s, x))
    residuals = "host" if form == "residuals" else "device"
    return oo.jit(
        lambda p, s, x: step(p, s, x), fuse=form != "not fused", residuals=residuals
    )


@functools.cache
def _start():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 8,
        "head": jax.random.normal(keys[1], (WIDTH, 4)),
    }
    return params, jax.random.normal(keys[2], (WIDTH, WIDTH))


def arguments(form=None):
    """The arguments of a step in a form; of the plain step without one."""
    params, x = _start()
    state = (PLAIN if form is None else OFFLOADED).init(params)
    if form is not None and FORMS[form][1]:
        params = oo.set_memory_kind(params, ".*", "pinned_host")
    return params, state, x


def assert_same(got, expected):
    """Structure, types and numbers are those of the plain step."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)

"""What the benchmarks train: shapes only, on the mesh of a target."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_offload import aot


@dataclasses.dataclass(frozen=True)
class Workload:
    """A loss, the parameters and the input it takes, and the optimizer.

    Attributes:
      loss: of (params, x).
      params: structs without shardings.
      x: the input, whose leading axis is the batch.
      optimizer: the plain one.
      batch_per_device: whether that batch is one device's, and not that of all.
    """

    loss: Callable[[Any, jax.Array], jax.Array]
    params: Any
    x: jax.ShapeDtypeStruct
    optimizer: optax.GradientTransformation
    batch_per_device: bool = False

    def on(self, target: aot.Target) -> tuple[Any, jax.ShapeDtypeStruct]:
        """The parameters and the input, sharded over all devices of a target.

        Parameters are sharded along their last axis (what does not divide is
        replicated), the input along its first.
        """
        mesh = target.mesh()

        def shard(p: Any) -> jax.ShapeDtypeStruct:
            divides = p.ndim > 1 and p.shape[-1] % target.device_count == 0
            spec = P(*[None] * (p.ndim - 1), "x") if divides else P()
            return _struct(p, mesh, spec)

        batch, *rest = self.x.shape
        if self.batch_per_device:
            batch *= target.device_count
        x = jax.ShapeDtypeStruct((batch, *rest), self.x.dtype)
        return jax.tree.map(shard, self.params), _struct(x, mesh, P("x"))


def _struct(x: Any, mesh: AbstractMesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def products(widths: Sequence[int], batch: int) -> Workload:
    """Matrices between layers of these widths, one leaf each, with adamw."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    shapes = itertools.pairwise(widths)
    params = {f"w{i:02d}": _float32(*shape) for i, shape in enumerate(shapes)}
    return Workload(loss, params, _float32(batch, widths[0]), optax.adamw(1e-3))


def leaves(count: int = 16, width: int = 2048, batch: int = 1024) -> Workload:
    """A stack of equal matrices."""
    return products([width] * (count + 1), batch)


def unequal(unit: int = 512, batch: int = 512) -> Workload:
    """Twelve matrices of different shapes, which no scan can hold."""
    return products(
        [unit * n for n in (2, 14, 3, 13, 4, 12, 5, 11, 6, 10, 7, 9, 8)], batch
    )


def stacked(count: int = 16, width: int = 2048, batch: int = 1024) -> Workload:
    """The same matrices as one leaf with a leading layer axis."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        layer = lambda x, w: (jax.nn.gelu(x @ w), None)  # noqa: E731
        return jnp.mean(lax.scan(layer, x, params["layers"])[0] ** 2)

    params = {"layers": _float32(count, width, width)}
    return Workload(loss, params, _float32(batch, width), optax.adamw(1e-3))


def gated(
    tokens: int = 4096,
    layers: int = 24,
    width: int = 2048,
    inner: int = 5632,
    vocabulary: int = 16384,
    *,
    scan: bool = True,
) -> Workload:
    """Gated layers, as large as a decoder's, without attention; adam.

    Under a scan, or in a Python loop, with remat on each. The tokens are those of each
    device.
    """
    shapes = {
        "gate": (width, inner),
        "up": (width, inner),
        "down": (inner, width),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "norm": (width,),
    }

    def layer(x: jax.Array, w: Any) -> jax.Array:
        h = x * w["norm"][None]
        q, k, v = jnp.split(h @ w["qkv"], 3, -1)
        x = x + jax.nn.sigmoid(q * k) * v @ w["out"]
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        step = lambda x, w: (jax.checkpoint(layer)(x, w), None)  # noqa: E731
        embedding = params["embedding"]
        x = jnp.take(embedding, tokens, axis=0)
        if scan:
            x, _ = lax.scan(step, x, params["layers"])
        else:
            for w in params["layers"]:
                x, _ = step(x, w)
        return jnp.mean((x @ embedding.T) ** 2)

    stack = (layers,) if scan else ()
    matrices = {name: _float32(*stack, *shape) for name, shape in shapes.items()}
    in_layers = matrices if scan else [matrices] * layers
    params = {"embedding": _float32(vocabulary, width), "layers": in_layers}
    x = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return Workload(loss, params, x, optax.adam(1e-3), batch_per_device=True)


def tutorial(width: int = 7168) -> Workload:
    """The optimizer state example of JAX's host offloading tutorial.

    https://docs.jax.dev/en/latest/notebooks/host-offloading.html: four square matrices,
    gelu after each, a norm penalty, clipping and adam.
    """

    def loss(params: Any, x0: jax.Array) -> jax.Array:
        x = x0
        for w in params.values():
            x = jax.nn.gelu(x @ w, approximate=True)
        penalty = sum(jnp.sum(w**2) for w in params.values())
        return jnp.mean((x - x0) ** 2) + 0.001 * penalty

    params = {f"w{i}": _float32(width, width) for i in range(1, 5)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    return Workload(loss, params, _float32(width, width), tx)


class _Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.RMSNorm(name="attention_norm")(x)
        causal = nn.make_causal_mask(x[..., 0])
        x += nn.MultiHeadDotProductAttention(
            self.heads, use_bias=False, name="attention"
        )(y, mask=causal)
        y = nn.RMSNorm(name="mlp_norm")(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], use_bias=False, name="mlp_in")(y))
        return x + nn.Dense(x.shape[-1], use_bias=False, name="mlp_out")(y), None


class _Decoder(nn.Module):
    layers: int
    width: int
    heads: int
    vocabulary: int
    scan: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.width, name="embedding")
        x = embedding(tokens)
        block = nn.remat(_Block, prevent_cse=not self.scan)
        if self.scan:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = layers(self.heads, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = block(self.heads, name=f"layers_{i}")(x, None)
        return embedding.attend(nn.RMSNorm(name="final_norm")(x))


def decoder(
    scan: bool,
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32768,
    batch: int = 8,
    context: int = 512,
    every: int = 1,
    clipped: bool = True,
) -> Workload:
    """A Flax decoder, remat on each layer, with clipping, adamw and a schedule.

    With `every` the gradients of as many steps are accumulated, and then clipped.
    """
    model = _Decoder(layers, width, heads, vocabulary, scan)
    tokens = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return jnp.mean(losses)

    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000))
    if clipped:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    if every > 1:
        tx = optax.MultiSteps(tx, every).gradient_transformation()
    return Workload(loss, variables["params"], tokens, tx)


def gpt2(*, clipped: bool) -> Workload:
    """A decoder of GPT-2's size, whose layers are a Python loop: logits of 1.5 GiB."""
    return decoder(False, 12, 768, 12, 50257, batch=16, clipped=clipped)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "leaves": leaves,
    "tutorial": tutorial,
    "stacked": stacked,
    "unequal": unequal,
    "decoder_scanned": functools.partial(decoder, scan=True),
    "decoder_unrolled": functools.partial(decoder, scan=False),
    "decoder_48_layers": lambda: decoder(scan=False, layers=48),
    "decoder_accumulating": lambda: decoder(scan=True, every=4, clipped=False),
    "decoder_accumulating_clipped": lambda: decoder(scan=True, every=4),
    "gpt2": lambda: gpt2(clipped=False),
    "gpt2_clipped": lambda: gpt2(clipped=True),
    "gated": gated,
    "gated_16k": lambda: gated(tokens=16384),
    "gated_unrolled": lambda: gated(layers=8, scan=False),
    "gated_unrolled_16k": lambda: gated(tokens=16384, scan=False),
}
# The other ones are for what is fused; the large of them take a TPU's compiler a minute
# in each mode.
USUAL_WORKLOADS = [
    *("leaves", "tutorial", "stacked", "unequal"),
    *("decoder_scanned", "decoder_unrolled"),
]

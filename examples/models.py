r"""Train steps of well-known models, as shapes only, for `optax-offload fit`.

Decoders with the shapes of Llama 3 (8B and 70B), Gemma 2B, GPT-2 XL and GPT-3 (175B),
and a ViT-H/14, in Flax linen; and adapters (LoRA, arXiv:2106.09685) over a frozen
Llama 3 of 8B, 70B and 405B. Nothing is allocated, because a step is only compiled. So
that its peak is that of real training:

- parameters, gradients and state are sharded over all devices (FSDP), one axis of each;
- layers are scanned, and each is rematerialized in the backward pass (only its input
  is kept); inside, attention and the loss are computed one chunk at a time, as a fused
  kernel would;
- matrix products are in bfloat16; gradients are clipped by their global norm; AdamW;
- parameters in bfloat16 have a copy in float32 beside Adam's moments, in the state
  (`oo.master_weights`), so that everything large and seldom used can be offloaded;
- `batch` sequences of `context` tokens on each device.

Run:
    optax-offload fit examples.models:llama3_8b --target h100 --out llama.toml
    optax-offload fit examples.models:llama3_70b_lora --target rtx4090 \
        --frozen "layers/.*" --allow nf4 --host-memory 64GiB
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload import aot

Wrap = Callable[[Any], optax.GradientTransformationExtraArgs]

# Queries that attend at once, and tokens whose logits are there at once.
CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a Transformer, and what kind of it.

    Attributes:
      layers: Number of blocks.
      width: Number of features of a token.
      heads: Number of heads of the queries.
      kv_heads: Number of heads of keys and values, each shared by several queries'.
      head_dim: Number of features of a head.
      mlp: Number of features inside the MLP.
      vocabulary: Number of tokens, or of classes of a ViT.
      gated: Activation of a gated MLP (SwiGLU, GeGLU); None for GPT-2's own.
      tied: Whether the embedding is also the output layer.
      learned_positions: Number of learned positions; 0 for rotary ones, which have
        no parameters.
      rank: Rank of the adapters of each matrix of a block; 0 for none.
      scan: Whether blocks are scanned, and not in a Python loop.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    gated: Callable[[jax.Array], jax.Array] | None = nn.silu
    tied: bool = False
    learned_positions: int = 0
    rank: int = 0
    scan: bool = True


# https://github.com/meta-llama/llama-models, models/sku_list.py
LLAMA3_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA3_70B = Shape(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA3_405B = Shape(126, 16384, 128, 8, 128, 53248, 128256)
# https://arxiv.org/abs/2403.08295, table 1; its vocabulary as released.
GEMMA_2B = Shape(18, 2048, 8, 1, 256, 16384, 256000, gated=nn.gelu, tied=True)
# https://arxiv.org/abs/2005.14165, table 2.1; its vocabulary is GPT-2's.
GPT3 = Shape(
    *(96, 12288, 96, 96, 128, 49152, 50257),
    gated=None,
    tied=True,
    learned_positions=2048,
)
# https://github.com/openai/gpt-2, hparams.json of 1558M
GPT2_XL = Shape(
    *(48, 1600, 25, 25, 64, 6400, 50257), gated=None, tied=True, learned_positions=1024
)
# https://arxiv.org/abs/2010.11929, table 1; images of 224 x 224, 1000 classes.
VIT_H = Shape(32, 1280, 16, 16, 80, 5120, 1000, gated=None, learned_positions=257)
PATCH, IMAGE = 14, 224


class _Block(nn.Module):
    """Attention, then an MLP, each on normalized features."""

    shape: Shape
    causal: bool
    param_dtype: Any
    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        shape = self.shape
        dense = functools.partial(
            functools.partial(_Adapted, shape.rank) if shape.rank else nn.Dense,
            use_bias=shape.gated is None,
            dtype=x.dtype,
            param_dtype=self.param_dtype,
        )
        y = _norm(shape, self.param_dtype, "attention_norm")(x)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        query, key, value = (
            dense(n * shape.head_dim, name=name)(y).reshape(*y.shape[:-1], n, -1)
            for n, name in zip(heads, ("query", "key", "value"), strict=True)
        )
        if not shape.learned_positions:
            query, key = _rotate(query), _rotate(key)
        y = _attention(query, key, value, self.causal)
        x += dense(shape.width, name="out")(y.reshape(*y.shape[:-2], -1))
        y = _norm(shape, self.param_dtype, "mlp_norm")(x)
        hidden = dense(shape.mlp, name="up")(y)
        if shape.gated is None:
            hidden = nn.gelu(hidden)
        else:
            hidden *= shape.gated(dense(shape.mlp, name="gate")(y))
        x += dense(shape.width, name="down")(hidden)
        return self.constrain(x), None


class _Adapted(nn.Module):
    """A frozen product, and beside it the two narrow ones of its adapters."""

    rank: int
    features: int
    use_bias: bool
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        base = nn.Dense(
            self.features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name="base",
        )

        def adapter(name: str, *size: int) -> jax.Array:
            made = self.variable("adapters", name, jnp.zeros, size, jnp.float32)
            return made.value.astype(self.dtype)

        down = adapter("down", x.shape[-1], self.rank)
        up = adapter("up", self.rank, self.features)
        return base(x) + x @ down @ up


def _norm(shape: Shape, param_dtype: Any, name: str) -> Any:
    norm = nn.LayerNorm if shape.gated is None else nn.RMSNorm
    return norm(dtype=jnp.bfloat16, param_dtype=param_dtype, name=name)


def _layers(
    shape: Shape, causal: bool, param_dtype: Any, constrain: Callable[..., Any]
) -> Any:
    """The blocks, rematerialized, as one scanned module or in a loop."""
    if not shape.scan:
        block = functools.partial(nn.remat(_Block), shape, causal, param_dtype)
        blocks = [block(constrain, name=f"layers_{i}") for i in range(shape.layers)]

        def in_a_loop(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for each in blocks:
                x, _ = each(x, None)
            return x, None

        return in_a_loop
    scanned = nn.scan(
        nn.remat(_Block, prevent_cse=False),
        variable_axes={"params": 0, "adapters": 0},
        split_rngs={"params": True},
        length=shape.layers,
    )
    return scanned(shape, causal, param_dtype, constrain, name="layers")


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (arXiv:2104.09864) of (batch, tokens, heads, features)."""
    pairs = x.shape[-1] // 2
    frequencies = 500_000.0 ** (-jnp.arange(pairs) / pairs)
    angles = jnp.outer(jnp.arange(x.shape[1]), frequencies)[None, :, None]
    cosine, sine = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, first * sine + second * cosine], axis=-1
    )


def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool
) -> jax.Array:
    """Attention, a chunk of queries at a time, whose weights are not kept."""
    tokens = query.shape[1]
    if not causal or tokens % CHUNK:
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    positions = jnp.arange(tokens)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend(query: jax.Array, at: jax.Array) -> jax.Array:
        mask = at[:, None] >= positions[None, :]
        return jax.nn.dot_product_attention(query, key, value, mask=mask[None, None])

    chunks = jnp.moveaxis(_chunked(query), 1, 0)
    attended = lax.map(lambda x: attend(*x), (chunks, positions.reshape(-1, CHUNK)))
    return jnp.moveaxis(attended, 0, 1).reshape(query.shape)


def _chunked(x: jax.Array) -> jax.Array:
    """(batch, tokens, ...) as (batch, chunks, tokens of a chunk, ...)."""
    chunk = CHUNK if x.shape[1] % CHUNK == 0 else x.shape[1]
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _cross_entropy(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens, a chunk of logits at a time, which are not kept."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk_loss(x: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jnp.einsum(
            "bsd,dv->bsv", x, head.astype(x.dtype), preferred_element_type=jnp.float32
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.sum()

    def add(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
        return total + chunk_loss(*chunk), None

    chunks = [jnp.moveaxis(_chunked(y), 1, 0) for y in (x, targets)]
    total, _ = lax.scan(add, jnp.float32(0), tuple(chunks))
    return total / targets.size


class Decoder(nn.Module):
    """A decoder that returns its loss: the mean cross-entropy of the next tokens."""

    shape: Shape
    param_dtype: Any = jnp.bfloat16
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        shape = self.shape
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        normal = nn.initializers.normal(0.02)
        size = (shape.vocabulary, shape.width)
        embedding = self.param("embedding", normal, size, self.param_dtype)
        x = embedding.astype(jnp.bfloat16)[inputs]
        if shape.learned_positions:
            size = (shape.learned_positions, shape.width)
            positions = self.param("positions", normal, size, self.param_dtype)
            x += positions.astype(x.dtype)[None, : x.shape[1]]
        layers = _layers(shape, True, self.param_dtype, self.constrain)
        x, _ = layers(self.constrain(x), None)
        x = _norm(shape, self.param_dtype, "final_norm")(x)
        if shape.tied:
            head = embedding.T
        else:
            size = (shape.width, shape.vocabulary)
            head = self.param("lm_head", normal, size, self.param_dtype)
        return _cross_entropy(x, head, targets)


class VisionTransformer(nn.Module):
    """A ViT that returns its loss: the mean cross-entropy of the images' classes."""

    shape: Shape
    param_dtype: Any = jnp.bfloat16
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x

    @nn.compact
    def __call__(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        shape = self.shape
        side = IMAGE // PATCH
        x = images.reshape(-1, side, PATCH, side, PATCH, 3)
        x = jnp.swapaxes(x, 2, 3).reshape(-1, side**2, PATCH * PATCH * 3)
        dense = functools.partial(
            nn.Dense, dtype=jnp.bfloat16, param_dtype=self.param_dtype
        )
        x = dense(shape.width, name="patches")(x)
        normal = nn.initializers.normal(0.02)
        token = self.param("token", normal, (1, 1, shape.width), self.param_dtype)
        token = jnp.broadcast_to(token, (x.shape[0], 1, shape.width))
        x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
        size = (shape.learned_positions, shape.width)
        positions = self.param("positions", normal, size, self.param_dtype)
        x += positions.astype(x.dtype)[None]
        layers = _layers(shape, False, self.param_dtype, self.constrain)
        x, _ = layers(self.constrain(x), None)
        x = _norm(shape, self.param_dtype, "final_norm")(x[:, 0])
        logits = dense(shape.vocabulary, name="head")(x).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()


def _train_step(
    offload: Wrap,
    target: aot.Target,
    make_loss: Callable[..., Callable[..., jax.Array]],
    batch: Any,
    params: str,
    tokens: int,
) -> oo.Step:
    """The step of (params, opt_state, batch), sharded over all devices of a target.

    Args:
      offload: goes around the optimizer.
      target: what it will be compiled for.
      make_loss: from the parameters' dtype and a constraint on activations to a Flax
        module that returns a loss.
      batch: structs, whose leading axis is divided over the devices.
      params: the parameters' dtype; ``"bfloat16"`` has master weights in the state.
      tokens: in the batch.
    """
    mesh = target.mesh(("fsdp",))
    rows = NamedSharding(mesh, P("fsdp"))
    if params not in ("bfloat16", "float32"):
        raise ValueError(f"params is {params!r}; it must be 'bfloat16' or 'float32'")
    dtype = jnp.dtype(params)
    module: Any = make_loss(dtype, lambda x: lax.with_sharding_constraint(x, rows))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
    )
    parameters = parameter_shapes(make_loss(dtype, lambda x: x), batch)
    parameters = jax.tree.map(lambda x: _shard(x, mesh, target.platform), parameters)
    optimizer: Any = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-4, 100, 1000))
    if params == "bfloat16":
        optimizer = oo.master_weights(optimizer)
    tx = optax.chain(optax.clip_by_global_norm(1.0), offload(optimizer))
    state = oo.eval_shape(tx.init, parameters)

    def step(parameters: Any, state: Any, batch: Any) -> Any:
        def loss_fn(parameters: Any) -> jax.Array:
            return module.apply({"params": parameters}, *batch)

        loss, gradients = jax.value_and_grad(loss_fn)(parameters)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    shardings = jax.tree.map(lambda x: x.sharding, (parameters, state))
    return oo.Step(
        step,
        (parameters, state, batch),
        donate_argnums=(0, 1),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
        tokens=tokens,
    )


def _adapter_step(
    offload: Wrap, target: aot.Target, shape: Shape, batch: int, context: int
) -> oo.Step:
    """The step of (adapters, opt_state, base, tokens): of a base that stays as it is.

    The base is in bfloat16 and its adapters are in float32, all sharded as above.
    """
    mesh = target.mesh(("fsdp",))
    rows = NamedSharding(mesh, P("fsdp"))
    module = Decoder(shape, constrain=lambda x: lax.with_sharding_constraint(x, rows))
    size = batch * target.device_count, context + 1
    tokens = jax.ShapeDtypeStruct(size, jnp.int32, sharding=rows)
    key = jax.random.key(0)
    variables: Any = jax.eval_shape(Decoder(shape).init, key, tokens)
    adapters, base = jax.tree.map(
        lambda x: _shard(x, mesh, target.platform),
        (variables["adapters"], variables["params"]),
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), offload(optax.adamw(1e-4)))
    state = oo.eval_shape(tx.init, adapters)

    def step(adapters: Any, state: Any, base: Any, tokens: Any) -> Any:
        def loss_fn(adapters: Any) -> Any:
            return module.apply({"params": base, "adapters": adapters}, tokens)

        loss, gradients = jax.value_and_grad(loss_fn)(adapters)
        updates, state = tx.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, loss

    shardings = jax.tree.map(lambda x: x.sharding, (adapters, state))
    return oo.Step(
        step,
        (adapters, state, base, tokens),
        donate_argnums=(0, 1),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
        tokens=size[0] * context,
    )


def parameter_shapes(module: Any, batch: Any) -> Mapping[str, Any]:
    """The parameters of a Flax module, as structs."""
    variables: Any = jax.eval_shape(module.init, jax.random.key(0), *batch)
    return variables["params"]


def _shard(x: Any, mesh: Any, platform: str) -> jax.ShapeDtypeStruct:
    """Shards the last axis where it fills the lanes of a TPU, else the one before it.

    So the leading axis of layers is whole on each device, and so are the rows of an
    embedding. For GPUs stacked matrices are sharded along the axis before the last: to
    gather the last one XLA has it outermost, and transposes whole stacks before the
    scan.
    """
    spec = [None] * x.ndim
    order = [(-1, 128), (-2, 8), (-1, 1)]
    if platform == "gpu" and x.ndim > 2:
        order.insert(0, (-2, 1))
    for axis, least in order:
        shard, rest = divmod(x.shape[axis], mesh.size) if x.ndim > 1 else (0, 0)
        if not rest and shard >= least:
            spec[axis] = "fsdp"
            break
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _decoder(
    shape: Shape, *, batch: int = 1, context: int = 4096, params: str = "bfloat16"
) -> Callable[..., oo.Step]:
    """A step factory for a decoder, all parameters trained, and its defaults."""

    def make_step(
        offload: Wrap,
        target: aot.Target,
        batch: int = batch,
        context: int = context,
        params: str = params,
    ) -> oo.Step:
        if 0 < shape.learned_positions < context:
            raise ValueError(
                f"context is {context}, more than the {shape.learned_positions} "
                "positions that this model has learned"
            )
        sequences = batch * target.device_count
        tokens = jax.ShapeDtypeStruct((sequences, context + 1), jnp.int32)
        make = functools.partial(Decoder, shape)
        count = sequences * context
        return _train_step(offload, target, make, (tokens,), params, count)

    return make_step


def _adapted(shape: Shape, *, batch: int = 1, context: int = 4096) -> Any:
    """A step factory for adapters of a decoder whose other parameters are frozen."""

    def make_step(
        offload: Wrap,
        target: aot.Target,
        batch: int = batch,
        context: int = context,
        rank: int = 16,
        layers: int = shape.layers,
    ) -> oo.Step:
        changed = dataclasses.replace(shape, rank=rank, layers=layers)
        return _adapter_step(offload, target, changed, batch, context)

    return make_step


llama3_8b = _decoder(LLAMA3_8B)
llama3_8b_loop = _decoder(dataclasses.replace(LLAMA3_8B, scan=False))
llama3_70b = _decoder(LLAMA3_70B)
llama3_8b_lora = _adapted(LLAMA3_8B)
llama3_70b_lora = _adapted(LLAMA3_70B)
llama3_405b_lora = _adapted(LLAMA3_405B)
gemma_2b = _decoder(GEMMA_2B)
gpt3_175b = _decoder(GPT3, context=2048)
gpt2_xl = _decoder(GPT2_XL, batch=4, context=1024, params="float32")


def vit_h(
    offload: Wrap, target: aot.Target, batch: int = 32, params: str = "float32"
) -> oo.Step:
    """ViT-H/14, on images of 224 x 224."""
    images = batch * target.device_count
    inputs = (
        jax.ShapeDtypeStruct((images, IMAGE, IMAGE, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((images,), jnp.int32),
    )
    make = functools.partial(VisionTransformer, VIT_H)
    count = images * VIT_H.learned_positions
    return _train_step(offload, target, make, inputs, params, count)

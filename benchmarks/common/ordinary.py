"""Train steps as other people write them: shapes only, for one device.

Layers are lists, shared or of several kinds; gradients are summed in a loop, taken
twice, or skipped in a `cond`; parameters are frozen, averaged or normalised. Each step
is as large as a small model that is trained, some 400 MB of parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Array = jax.Array
Step = Callable[..., Any]
Wrap = Callable[[Any], Any]
WIDTH = 1024
VOCABULARY = 4096


@dataclasses.dataclass(frozen=True)
class Ordinary:
    """A train step, and what it takes.

    Attributes:
      params: Structs of what is trained.
      step: Makes the step of an optimizer: of (params, state, *inputs), or of (params,
        state, frozen, *inputs).
      inputs: Structs of a batch, a key and the like.
      optimizer: The plain one.
      outer: Wraps it once more, outside of `oo.offload`.
      frozen: Parameters that aren't trained; () for none.
      layers: A regex of the parameters that may rest on the host.
      donated: Which arguments of the step are.
    """

    params: Any
    step: Callable[[optax.GradientTransformation], Step]
    inputs: tuple[Any, ...]
    optimizer: Any = dataclasses.field(default_factory=lambda: optax.adamw(1e-3))
    outer: Wrap = lambda tx: tx
    frozen: Any = ()
    layers: str = r"(.*/)?layers/.*"
    donated: tuple[int, ...] = (0, 1)

    def of(self, wrap: Wrap) -> tuple[Step, optax.GradientTransformation]:
        """The step and the optimizer, wrapped."""
        tx = self.outer(wrap(self.optimizer))
        return self.step(tx), tx


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The struct of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    """The struct of tokens or labels."""
    return floats(*shape, dtype=jnp.int32)


BATCH = tokens(4, 257)


def key() -> Any:
    """The struct of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def normed(x: Array, scale: Any = 1.0) -> Array:
    """RMS normalization."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean over all labels."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def attention(q: Array, k: Array, v: Array, causal: bool = True) -> Array:
    """Attention in heads of 64."""
    split = lambda x: x.reshape(*x.shape[:2], -1, 64)  # noqa: E731
    y = jax.nn.dot_product_attention(split(q), split(k), split(v), is_causal=causal)
    return y.reshape(q.shape)


def dense(layers: int, width: int = WIDTH, inner: int = 4 * WIDTH) -> list[Any]:
    """Parameters of layers of two products."""
    shapes = {"up": (width, inner), "down": (inner, width), "norm": (width,)}
    return [{k: floats(*s) for k, s in shapes.items()} for _ in range(layers)]


def blocks(layers: int, width: int = WIDTH) -> list[Any]:
    """Parameters of layers of a transformer."""
    more = {"qkv": (width, 3 * width), "out": (width, width), "norm_qkv": (width,)}
    found = dense(layers, width, 4 * width)
    return [w | {k: floats(*s) for k, s in more.items()} for w in found]


def apply_dense(x: Array, w: Any) -> Array:
    """A layer of `dense`."""
    return x + jax.nn.gelu(normed(x, w["norm"]) @ w["up"]) @ w["down"]


def apply_block(x: Array, w: Any, causal: bool = True) -> Array:
    """A layer of `blocks`."""
    q, k, v = jnp.split(normed(x, w["norm_qkv"]) @ w["qkv"], 3, -1)
    return apply_dense(x + attention(q, k, v, causal) @ w["out"], w)


def apply_all(x: Array, layers: Sequence[Any], layer: Any = apply_dense) -> Array:
    """All layers, one after the other."""
    for w in layers:
        x = layer(x, w)
    return x


def language(layers: list[Any], width: int = WIDTH) -> dict[str, Any]:
    """Parameters of a language model with a tied table."""
    return {"embedding": floats(VOCABULARY, width), "layers": layers}


def logits_of(params: Any, batch: Array, layer: Any = apply_dense) -> Array:
    """Those of the tokens after the first one."""
    x = apply_all(params["embedding"][batch[:, :-1]], params["layers"], layer)
    return normed(x) @ params["embedding"].T


def language_loss(layer: Any = apply_dense) -> Callable[[Any, Array], Array]:
    """The loss of the next token."""

    def loss(params: Any, batch: Array) -> Array:
        return cross_entropy(logits_of(params, batch, layer), batch[:, 1:])

    return loss


def usual(loss: Callable[..., Array]) -> Callable[[Any], Step]:
    """The step of a loss of (params, *inputs)."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, *inputs: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *inputs)
            return *descended(tx, params, state, grads), value

        return step

    return step_of


def descended(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """Parameters and state after an update."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def convolve(x: Array, kernel: Array, stride: int = 1, groups: int = 1) -> Array:
    """A convolution of images, which keeps their size."""
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def plain_layers() -> Ordinary:
    """Twelve layers of two products, and a tied table."""
    return Ordinary(language(dense(12)), usual(language_loss()), (BATCH,))


def deep() -> Ordinary:
    """Twenty-four of them."""
    return Ordinary(language(dense(24)), usual(language_loss()), (BATCH,))


def transformer() -> Ordinary:
    """Twelve layers with attention."""
    loss = language_loss(apply_block)
    return Ordinary(language(blocks(12)), usual(loss), (BATCH,))


def checkpointed_pairs() -> Ordinary:
    """Two layers to a `jax.checkpoint`."""

    def loss(params: Any, batch: Array) -> Array:
        x, layers = params["embedding"][batch[:, :-1]], params["layers"]
        pair = lambda x, *ws: apply_all(x, ws, apply_block)  # noqa: E731
        for i in range(0, len(layers), 2):
            x = jax.checkpoint(pair)(x, *layers[i : i + 2])
        return cross_entropy(normed(x) @ params["embedding"].T, batch[:, 1:])

    return Ordinary(language(blocks(12)), usual(loss), (tokens(8, 257),))


def long_attention() -> Ordinary:
    """One sequence of 4096, in checkpointed layers."""
    loss = language_loss(jax.checkpoint(apply_block))
    return Ordinary(language(blocks(12, 512), 512), usual(loss), (tokens(1, 4097),))


def vision_transformer() -> Ordinary:
    """Images in patches."""
    ends = {"patch": floats(768, WIDTH), "head": floats(WIDTH, 1000)}
    params = ends | {"layers": blocks(12)}

    def loss(params: Any, x: Array, labels: Array) -> Array:
        layer = lambda x, w: apply_block(x, w, causal=False)  # noqa: E731
        x = apply_all(x @ params["patch"], params["layers"], layer)
        return cross_entropy(jnp.mean(x, 1) @ params["head"], labels)

    return Ordinary(params, usual(loss), (floats(8, 196, 768), tokens(8)))


def convnext() -> Ordinary:
    """Depthwise convolutions of 7 by 7, and two products."""
    layer = {"depthwise": floats(7, 7, 1, WIDTH)}
    ends = {"stem": floats(16, 16, 3, WIDTH), "head": floats(WIDTH, 1000)}
    params = ends | {"layers": [layer | w for w in dense(12)]}

    def loss(params: Any, x: Array, labels: Array) -> Array:
        def layer(x: Array, w: Any) -> Array:
            y = normed(convolve(x, w["depthwise"], groups=WIDTH), w["norm"])
            return x + jax.nn.gelu(y @ w["up"]) @ w["down"]

        x = apply_all(convolve(x, params["stem"], 16), params["layers"], layer)
        return cross_entropy(jnp.mean(x, (1, 2)) @ params["head"], labels)

    return Ordinary(params, usual(loss), (floats(32, 224, 224, 3), tokens(32)))


def resnet() -> Ordinary:
    """Residual convolutions, whose BatchNorm has statistics of its own."""
    width = 512
    kernel = floats(3, 3, width, width)
    layer = {"first": kernel, "second": kernel, "scale": floats(width)}
    ends = {"stem": floats(3, 3, 3, width), "head": floats(width, 1000)}
    params = ends | {"layers": [layer] * 10}
    statistics = [{"mean": floats(width), "var": floats(width)}] * 10

    def loss(params: Any, statistics: Any, x: Array, labels: Array) -> Any:
        x, new = convolve(x, params["stem"]), []
        for w, old in zip(params["layers"], statistics, strict=True):
            y = convolve(x, w["first"])
            now = {"mean": jnp.mean(y, (0, 1, 2)), "var": jnp.var(y, (0, 1, 2))}
            new.append(optax.incremental_update(now, old, 0.1))
            y = (y - now["mean"]) * lax.rsqrt(now["var"] + 1e-5) * w["scale"]
            x = jax.nn.relu(x + convolve(jax.nn.relu(y), w["second"]))
        return cross_entropy(jnp.mean(x, (1, 2)) @ params["head"], labels), new

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, statistics: Any, *batch: Any) -> Any:
            found = jax.value_and_grad(loss, has_aux=True)(params, statistics, *batch)
            (value, statistics), grads = found
            return *descended(tx, params, state, grads), statistics, value

        return step

    batch = floats(64, 8, 8, 3), tokens(64)
    return Ordinary(params, step_of, (statistics, *batch))


def u_net() -> Ordinary:
    """Levels down and up, each as wide again, with skips between."""
    widths = [64, 128, 256, 512, 1024]
    square = lambda n, m: floats(3, 3, n, m)  # noqa: E731
    levels = [*itertools.pairwise(widths)]
    down = [{"first": square(n, n), "next": square(n, m)} for n, m in levels]
    up = [{"from": square(m, n), "first": square(2 * n, n)} for n, m in levels]
    layers = {"down": down, "middle": [square(1024, 1024)] * 4, "up": up[::-1]}
    params = {"stem": square(3, 64), "layers": layers, "out": square(64, 3)}

    def loss(params: Any, x: Array, y: Array) -> Array:
        x, skips, layers = convolve(x, params["stem"]), [], params["layers"]
        for w in layers["down"]:
            x = x + jax.nn.silu(convolve(x, w["first"]))
            skips.append(x)
            x = convolve(x, w["next"], 2)
        for w in layers["middle"]:
            x = x + jax.nn.silu(convolve(x, w))
        for w in layers["up"]:
            size = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
            x = convolve(jax.image.resize(x, size, "nearest"), w["from"])
            x = jax.nn.silu(convolve(jnp.concatenate([x, skips.pop()], -1), w["first"]))
        return jnp.mean((convolve(x, params["out"]) - y) ** 2)

    return Ordinary(params, usual(loss), (floats(4, 64, 64, 3),) * 2)


def encoder_decoder() -> Ordinary:
    """Two stacks, of which the second attends to the first."""
    cross = {"q": floats(WIDTH, WIDTH), "kv": floats(WIDTH, 2 * WIDTH)}
    decoder = [{**w, **cross} for w in blocks(6)]
    params = language([]) | {"layers": {"encoder": blocks(6), "decoder": decoder}}

    def loss(params: Any, source: Array, batch: Array) -> Array:
        layer = lambda x, w: apply_block(x, w, causal=False)  # noqa: E731
        x = apply_all(params["embedding"][source], params["layers"]["encoder"], layer)
        y = params["embedding"][batch[:, :-1]]
        for w in params["layers"]["decoder"]:
            k, v = jnp.split(x @ w["kv"], 2, -1)
            y = apply_block(y + attention(normed(y) @ w["q"], k, v, causal=False), w)
        return cross_entropy(normed(y) @ params["embedding"].T, batch[:, 1:])

    return Ordinary(params, usual(loss), (tokens(4, 256), BATCH))


def experts() -> Ordinary:
    """Eight experts in each layer, two of them for a token."""
    count, width = 8, 512
    layer = {
        "router": floats(width, count),
        "up": floats(count, width, 4 * width),
        "down": floats(count, 4 * width, width),
    }

    def route(x: Array, w: Any) -> Array:
        rows = x.reshape(-1, width)
        shares, chosen = lax.top_k(jax.nn.softmax(normed(rows) @ w["router"]), 2)
        room, chosen = 4 * rows.shape[0] // count, chosen.reshape(-1)
        hot = jax.nn.one_hot(chosen, count)
        place = jnp.sum(jnp.cumsum(hot, 0) * hot, -1).astype(jnp.int32) - 1
        taken = jnp.zeros((count, room, width))
        taken = taken.at[chosen, place].add(jnp.repeat(rows, 2, 0), mode="drop")
        y = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", taken, w["up"]))
        y = jnp.einsum("ecf,efd->ecd", y, w["down"])
        y = y.at[chosen, place].get(mode="fill", fill_value=0) * shares.reshape(-1, 1)
        return x + jnp.sum(y.reshape(-1, 2, width), 1).reshape(x.shape)

    params = language([layer] * 8, width)
    return Ordinary(params, usual(language_loss(route)), (BATCH,))


def lstm() -> Ordinary:
    """A scan over time in each layer."""
    width = WIDTH
    layer = {"x": floats(width, 4 * width), "h": floats(width, 4 * width)}

    def recur(x: Array, w: Any) -> Array:
        def cell(carry: Any, z: Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(z + h @ w["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[0], width))
        _, h = lax.scan(cell, (zeros, zeros), jnp.swapaxes(x @ w["x"], 0, 1))
        return x + jnp.swapaxes(h, 0, 1)

    params = language([layer] * 8)
    return Ordinary(params, usual(language_loss(recur)), (tokens(32, 65),))


def time_outside() -> Ordinary:
    """One scan over time, around all layers."""
    layer = {"x": floats(WIDTH, 3 * WIDTH), "h": floats(WIDTH, 3 * WIDTH)}

    def loss(params: Any, batch: Array) -> Array:
        def cell(states: list[Array], x: Array) -> Any:
            new = []
            for w, h in zip(params["layers"], states, strict=True):
                a, b = jnp.split(x @ w["x"], 3, -1), jnp.split(h @ w["h"], 3, -1)
                z, r = jax.nn.sigmoid(a[0] + b[0]), jax.nn.sigmoid(a[1] + b[1])
                new.append((1 - z) * h + z * jnp.tanh(a[2] + r * b[2]))
                x = x + new[-1]
            return new, x

        x = jnp.swapaxes(params["embedding"][batch[:, :-1]], 0, 1)
        zeros = [jnp.zeros((batch.shape[0], WIDTH))] * len(params["layers"])
        _, y = lax.scan(cell, zeros, x)
        return cross_entropy(normed(y) @ params["embedding"].T, batch[:, 1:].T)

    return Ordinary(language([layer] * 10), usual(loss), (tokens(32, 65),))


def shared() -> Ordinary:
    """Two layers, each applied six times."""

    def loss(params: Any, batch: Array) -> Array:
        layers = [w for w in params["layers"] for _ in range(6)]
        x = params["embedding"][batch[:, :-1]] @ params["in"]
        x = apply_all(x, layers, apply_block) @ params["in"].T
        return cross_entropy(normed(x) @ params["embedding"].T, batch[:, 1:])

    params = language(blocks(2, 2048)) | {"in": floats(WIDTH, 2048)}
    return Ordinary(params, usual(loss), (BATCH,))


def kinds() -> Ordinary:
    """Layers with and without attention, in turns."""
    pick = lambda x, w: (apply_block if "qkv" in w else apply_dense)(x, w)  # noqa: E731
    return Ordinary(
        language([*blocks(1), *dense(1)] * 6), usual(language_loss(pick)), (BATCH,)
    )


def large_and_tiny() -> Ordinary:
    """A large layer and three tiny ones, ten times."""
    layers = [
        w for _ in range(10) for w in (*dense(1, inner=8192), *dense(3, inner=16))
    ]
    return Ordinary(language(layers), usual(language_loss()), (BATCH,))


def weight_norm() -> Ordinary:
    """Each kernel is a direction and a length."""
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layer = {k: {"v": floats(*s), "g": floats(s[1])} for k, s in shapes.items()}

    def apply(x: Array, w: Any) -> Array:
        kernel = lambda w: w["v"] * (w["g"] / jnp.linalg.norm(w["v"], axis=0))  # noqa: E731
        return x + jax.nn.gelu(x @ kernel(w["up"])) @ kernel(w["down"])

    return Ordinary(language([layer] * 12), usual(language_loss(apply)), (BATCH,))


def towers() -> Ordinary:
    """Images and texts, as CLIP has them."""
    tower = lambda n: {"in": floats(n, WIDTH), "layers": blocks(8)}  # noqa: E731

    def net(params: Any, x: Array) -> Array:
        layer = lambda x, w: apply_block(x, w, causal=False)  # noqa: E731
        return normed(jnp.mean(apply_all(x @ params["in"], params["layers"], layer), 1))

    def loss(params: Any, images: Array, texts: Array) -> Array:
        scores = net(params["images"], images) @ net(params["texts"], texts).T
        labels = jnp.arange(scores.shape[0])
        return cross_entropy(scores, labels) + cross_entropy(scores.T, labels)

    params = {"images": tower(768), "texts": tower(512)}
    return Ordinary(params, usual(loss), (floats(16, 64, 768), floats(16, 64, 512)))


def adapters() -> Ordinary:
    """Products of rank 16 beside frozen layers."""
    down, rank = floats(WIDTH, 16), {"qkv": 3 * WIDTH, "up": 4 * WIDTH}
    params = {"layers": [{k: (down, floats(16, n)) for k, n in rank.items()}] * 12}

    def loss(params: Any, frozen: Any, batch: Array) -> Array:
        x = frozen["embedding"][batch[:, :-1]]
        for w, pairs in zip(frozen["layers"], params["layers"], strict=True):
            new = {k: w[k] + a @ b for k, (a, b) in pairs.items()}
            x = apply_block(x, w | new)
        return cross_entropy(normed(x) @ frozen["embedding"].T, batch[:, 1:])

    frozen = language(blocks(12))
    return Ordinary(params, usual(loss), (tokens(2, 257),), frozen=frozen)


def distillation() -> Ordinary:
    """The teacher is as large, and frozen."""

    def net(params: Any, batch: Array) -> Array:
        x = apply_all(params["embedding"][batch], params["layers"])
        return normed(x) @ params["embedding"].T

    def loss(params: Any, teacher: Any, batch: Array) -> Array:
        wanted = lax.stop_gradient(jax.nn.softmax(net(teacher, batch)))
        return -jnp.mean(wanted * jax.nn.log_softmax(net(params, batch)))

    params = language(dense(10))
    return Ordinary(params, usual(loss), (tokens(4, 256),), frozen=params)


def averaged_teacher() -> Ordinary:
    """The teacher is an average of the student, and returned."""

    def net(params: Any, x: Array) -> Array:
        return normed(apply_all(x @ params["in"], params["layers"]) @ params["out"])

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, teacher: Any, x: Array, y: Array) -> Any:
            wanted = lax.stop_gradient(net(teacher, y))
            loss = lambda p: -jnp.mean(net(p, x) * wanted)  # noqa: E731
            value, grads = jax.value_and_grad(loss)(params)
            params, state = descended(tx, params, state, grads)
            teacher = optax.incremental_update(params, teacher, 0.004)
            return params, state, teacher, value

        return step

    params = {"in": floats(768, WIDTH), "layers": dense(12), "out": floats(WIDTH, 256)}
    inputs = floats(1024, 768), floats(1024, 768)
    return Ordinary(params, step_of, inputs, frozen=params, donated=(0, 1, 2))


def microbatches() -> Ordinary:
    """Gradients of four microbatches, summed in a Python loop."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            found = [jax.value_and_grad(language_loss())(params, b) for b in batch]
            grads = jax.tree.map(lambda *gs: sum(gs) / 4, *(g for _, g in found))
            return *descended(tx, params, state, grads), sum(x for x, _ in found)

        return step

    return Ordinary(language(dense(12)), step_of, (tokens(4, 4, 257),))


def microbatch_scan() -> Ordinary:
    """Gradients of four microbatches, summed in a scan."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            def one(total: Any, batch: Array) -> Any:
                value, grads = jax.value_and_grad(language_loss())(params, batch)
                return jax.tree.map(jnp.add, total, grads), value

            grads, values = lax.scan(one, jax.tree.map(jnp.zeros_like, params), batch)
            return *descended(tx, params, state, grads), jnp.mean(values)

        return step

    return Ordinary(language(dense(12)), step_of, (tokens(4, 4, 257),))


def epochs() -> Ordinary:
    """Four updates in a scan, as PPO makes them."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            one = lambda c, b: (usual(language_loss())(tx)(*c, b)[:2], None)  # noqa: E731
            return lax.scan(one, (params, state), batch)[0]

        return step

    return Ordinary(language(dense(12)), step_of, (tokens(4, 4, 257),))


def accumulated() -> Ordinary:
    """`optax.MultiSteps`, clipped."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = optax.MultiSteps(inner, 4).gradient_transformation()
    return dataclasses.replace(plain_layers(), optimizer=tx)


def accumulated_norm() -> Ordinary:
    """The norm of what is accumulated is logged, of layers with attention."""
    tx = optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation()

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            value, grads = jax.value_and_grad(language_loss(apply_block))(params, batch)
            count = state.mini_step + 1
            mean = lambda a, g: a + (g - a) / count  # noqa: E731
            norm = optax.tree.norm(jax.tree.map(mean, state.acc_grads, grads))
            return *descended(tx, params, state, grads), value, norm

        return step

    return Ordinary(language(blocks(12)), step_of, (BATCH,), optimizer=tx)


def clipped() -> Ordinary:
    """Gradients that wait for their norm."""
    outer = lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx)  # noqa: E731
    return dataclasses.replace(plain_layers(), outer=outer)


def adafactor() -> Ordinary:
    """Moments of rows and columns."""
    return dataclasses.replace(plain_layers(), optimizer=optax.adafactor(1e-3))


def lamb() -> Ordinary:
    """A ratio of norms for each leaf."""
    return dataclasses.replace(plain_layers(), optimizer=optax.lamb(1e-3))


def muon() -> Ordinary:
    """Orthogonal updates of matrices."""
    return dataclasses.replace(plain_layers(), optimizer=optax.contrib.muon(1e-3))


def cast_gradients() -> Ordinary:
    """Gradients in bfloat16, cast after the backward pass."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            value, grads = jax.value_and_grad(language_loss())(low, batch)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            return *descended(tx, params, state, grads), value

        return step

    return dataclasses.replace(plain_layers(), step=step_of)


def large_head() -> Ordinary:
    """A head of its own for a large vocabulary, and many tokens."""
    ends = {"embedding": floats(32768, WIDTH), "head": floats(WIDTH, 32768)}

    def loss(params: Any, batch: Array) -> Array:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = apply_all(low["embedding"][batch[:, :-1]], low["layers"], apply_block)
        return cross_entropy(normed(x) @ low["head"], batch[:, 1:])

    return Ordinary(ends | {"layers": blocks(6)}, usual(loss), (tokens(32, 129),))


def loss_scaling() -> Ordinary:
    """float16, and an update in a `cond` that skips what is not finite."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array, scale: Array) -> Any:
            half = lambda p: jax.tree.map(lambda x: x.astype(jnp.float16), p)  # noqa: E731
            loss = lambda p: language_loss()(half(p), batch) * scale  # noqa: E731
            value, grads = jax.value_and_grad(loss)(params)
            grads = jax.tree.map(lambda g: g / scale, grads)
            finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
            finite = jnp.all(jnp.stack(finite))
            update = lambda p, s: descended(tx, p, s, grads)  # noqa: E731
            params, state = lax.cond(finite, update, lambda *x: x, params, state)
            return params, state, value, jnp.where(finite, 2.0, 0.5) * scale

        return step

    return Ordinary(language(dense(12)), step_of, (BATCH, floats()))


def decay_in_the_loss() -> Ordinary:
    """The squares of all parameters are in the loss, as in Flax' ImageNet example."""

    def loss(params: Any, batch: Array) -> Array:
        squares = sum(jnp.sum(p * p) for p in jax.tree.leaves(params))
        return language_loss()(params, batch) + 1e-4 * squares

    return dataclasses.replace(plain_layers(), step=usual(loss))


def norms() -> Ordinary:
    """Norms of gradients, updates and parameters are logged, leaf by leaf."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            value, grads = jax.value_and_grad(language_loss())(params, batch)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            norm = lambda tree: jax.tree.map(jnp.linalg.norm, tree)  # noqa: E731
            found = norm(jax.tree.map(jnp.ravel, (grads, updates, params)))
            return params, state, value, found

        return step

    return dataclasses.replace(plain_layers(), step=step_of)


def dropout() -> Ordinary:
    """A key for each layer."""

    def loss(params: Any, batch: Array, key: Array) -> Array:
        x = params["embedding"][batch[:, :-1]]
        for i, w in enumerate(params["layers"]):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = x + jnp.where(kept, apply_dense(x, w) - x, 0)
        return cross_entropy(normed(x) @ params["embedding"].T, batch[:, 1:])

    return Ordinary(language(dense(12)), usual(loss), (BATCH, key()))


def gradient_penalty() -> Ordinary:
    """The gradient of the loss has one of the input in it."""

    def loss(params: Any, x: Array) -> Array:
        net = lambda x: jnp.sum(apply_all(x, params["layers"]) @ params["head"])  # noqa: E731
        value, slopes = jax.value_and_grad(net)(x)
        lengths = jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-8)
        return value / x.shape[0] + 10 * jnp.mean((lengths - 1) ** 2)

    params = {"layers": dense(12), "head": floats(WIDTH, 1)}
    return Ordinary(params, usual(loss), (floats(256, WIDTH),))


def two_passes() -> Ordinary:
    """Sharpness-aware: gradients where the first ones lead."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            grads = jax.grad(language_loss())(params, batch)
            size = 0.05 / optax.tree.norm(grads)
            there = jax.tree.map(lambda p, g: p + size * g, params, grads)
            value, grads = jax.value_and_grad(language_loss())(there, batch)
            return *descended(tx, params, state, grads), value

        return step

    return dataclasses.replace(plain_layers(), step=step_of)


def accuracy() -> Ordinary:
    """It evaluates the model again, as the loss has no other result."""

    def step_of(tx: Any) -> Step:
        def step(params: Any, state: Any, batch: Array) -> Any:
            value, grads = jax.value_and_grad(language_loss())(params, batch)
            found = jnp.argmax(logits_of(params, batch), -1)
            right = jnp.mean(found == batch[:, 1:])
            return *descended(tx, params, state, grads), value, right

        return step

    return dataclasses.replace(plain_layers(), step=step_of)


STEPS: dict[str, Callable[[], Ordinary]] = {
    make.__name__: make
    for make in (
        *(plain_layers, deep, transformer, checkpointed_pairs, long_attention),
        *(vision_transformer, convnext, resnet, u_net, encoder_decoder, experts),
        *(lstm, time_outside, shared, kinds, large_and_tiny, weight_norm, towers),
        *(adapters, distillation, averaged_teacher, microbatches),
        *(microbatch_scan, epochs, accumulated, clipped, adafactor, lamb, muon),
        *(loss_scaling, decay_in_the_loss, norms, dropout, gradient_penalty),
        *(two_passes, accumulated_norm, cast_gradients, large_head, accuracy),
    )
}

"""Random train steps: what a seed draws, and the model, optimizer and step of it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import EVERYTHING, plain
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import INSIDE, OUTSIDE, Wrap

import optax_offload as oo

VOCABULARY, BATCH = 16, 8
COMMON = ["adam", "adamw", "sgd_momentum", "lion", "adafactor", "lamb", "multi_steps"]
COMMON += ["apply_if_finite", "clip_and_schedule", "adam_bfloat16_mu", "muon"]
# They call the loss themselves, as often as they need: its effects cannot be counted.
SEARCHES = {"lbfgs", "backtracking"}
MOMENTS = r".*/(mu|nu)/.*"
# Those whose moments have a codec.
ENCODED = ["adam", "adamw", "nadamw", "radam", "clip_and_schedule", "apply_if_finite"]
# Each with how often it is drawn.
CHOICES: dict[str, dict[Any, int]] = {
    "layers": {2: 2, 3: 2, 4: 3, 5: 1, 6: 1},
    "width": {4: 1, 8: 2, 12: 1},
    "hidden": {8: 2, 4: 1, 16: 1},
    "scan": {
        "forward": 14,
        "reverse": 4,
        "unroll": 3,
        "pairs": 1,
        "nested": 3,
        "shared": 3,
        "two stacks": 4,
        "fori": 1,
        "python": 1,
        "list": 4,
    },
    "layer_axis": {0: 9, 1: 1},
    "body": {"plain": 6, "custom_vjp": 2, "cond": 1, "recurrent": 1, "dropout": 2},
    "remat": {
        "none": 5,
        "layer": 3,
        "layer, no cse": 1,
        "layer, dots": 1,
        "layer, names": 1,
        "scan": 2,
        "loss": 2,
        "layer and loss": 1,
    },
    "params": {"float32": 8, "mixed": 2, "bfloat16": 1},
    "compute": {"float32": 8, "bfloat16": 2},
    "outside": {"none": 6, "norm": 1, "row": 1, "tied": 1},
    "frozen": {
        "none": 10,
        "stop_gradient": 1,
        "zero gradients": 1,
        "set_to_zero": 1,
        "partition": 1,
        "masked": 1,
    },
    "frozen_leaves": {"layers": 1, "half of layers": 2, "others": 1},
    "microbatches": {"none": 16, "scan": 2, "python": 2},
    "effect": {
        "none": 16,
        "debug in layer": 1,
        "debug in loss": 1,
        "debug in step": 1,
        "io in step": 1,
        "ordered io in step": 1,
    },
    "ref": {"none": 19, "loss": 1},
    "results": {
        "loss": 6,
        "statistics of layers": 2,
        "norm of gradients": 1,
        "gradients": 1,
        "difference of parameters": 1,
        "old parameters": 1,
    },
    "clip": {"none": 7, "around": 2, "inside": 2},
    "window": {None: 3, 256: 1, 2048: 1, 2**15: 1},
    "codec": {
        None: 14,
        "int8": 2,
        "int8-companded": 1,
        "float8": 1,
        "bfloat16": 1,
        "bfloat16-stochastic": 1,
    },
    "donated": {"none": 1, "params": 1, "state": 1, "both": 4},
    "order": {"params first": 3, "state first": 1, "batch first": 1},
    "devices": {1: 4, 4: 1},
    "axis_types": {"Auto": 2, "Explicit": 1},
    "sharded": {"last": 3, "middle": 1, "rows": 1, "no": 1},
    "constraint": {"none": 4, "gradients": 1, "params": 1},
    "out_shardings": {False: 3, True: 1},
    "at_rest": {"none": 3, "layers": 1, "all": 1},
    "residuals": {"device": 3, "host": 1},
    "selected": {
        "none": 14,
        "where": 1,
        "where, state": 1,
        "select": 1,
        "cond": 1,
        "cond around": 1,
        "lerp": 1,
        "skip step": 1,
    },
    "predicate": {"finite": 3, "never": 1},
    "shard_map": {False: 3, True: 1},
    "called": {"directly": 8, "compiled": 1, "after make_jaxpr": 1},
}
# The step in the user's own loop, or in a branch: drawn of seeds from here on, so that
# others draw what they did.
LOOPS_FROM = 100_000
LOOPS = {"scan": 2, "fori": 1, "while": 1, "cond": 2, "skipped": 1}
# Layers that no scan runs, cut into as many turns as there may be: from here on.
TURNS_FROM = 200_000
# Two stacks of layers from here on, one of them scanned and one a list of layers.
MIXED_FROM = 300_000
MIXED = {"list, scan": 1, "scan, list": 1}
# The step twice in one function, one after the other: from here on.
TWICE_FROM = 400_000
# A loss with a number of all parameters in it, as their squares: from here on.
PENALTIES_FROM = 500_000
PENALTIES = {
    "squares": lambda x: jnp.sum(x * x),
    "powers": lambda x: jnp.sum(x**2),
    "absolute": lambda x: jnp.sum(jnp.abs(x)),
    "norm": lambda x: jnp.sqrt(jnp.sum(x**2) + 0.01),
}
# A loss with a number of what each layer makes in it, written after the last one, or
# with a gradient: from here on.
ADDED_FROM = 700_000
ADDED = {"none": 1, "outputs": 2, "slopes": 2}
MODES = {
    "jit": 2,
    "auto": 8,
    "host": 5,
    "recompute": 5,
    "device": 1,
    "unfused": 1,
    "stream auto": 1,
    "stream host": 1,
    "stream recompute": 1,
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a seed draws; the default of each is the simplest."""

    seed: int = 0
    modes: tuple[str, ...] = ("auto",)
    optimizer: str = "sgd_momentum"
    wrapped: str = "inside"
    layers: int = 3
    width: int = 4
    hidden: int = 8
    scan: str = "forward"
    layer_axis: int = 0
    body: str = "plain"
    remat: str = "none"
    params: str = "float32"
    compute: str = "float32"
    outside: str = "none"
    frozen: str = "none"
    frozen_leaves: str = "layers"
    microbatches: str = "none"
    effect: str = "none"
    ref: str = "none"
    results: str = "loss"
    clip: str = "none"
    window: int | None = None
    codec: str | None = None
    donated: str = "none"
    order: str = "params first"
    devices: int = 1
    axis_types: str = "Auto"
    sharded: str = "no"
    constraint: str = "none"
    out_shardings: bool = False
    at_rest: str = "none"
    residuals: str = "device"
    selected: str = "none"
    predicate: str = "finite"
    shard_map: bool = False
    called: str = "directly"
    loop: str = "none"
    turns: str = "usual"
    penalty: str = "none"
    added: str = "none"

    def text(self) -> str:
        """What is not the default, as the command takes it."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "modes":
                shown.append(f"modes={'+'.join(value)}")
            elif value != field.default:
                shown.append(f"{field.name}={value}")
        return "; ".join(shown)

    @classmethod
    def of_text(cls, text: str) -> Drawn:
        """What `text` of it gives."""
        types = {f.name: f.default for f in dataclasses.fields(cls)}
        found: dict[str, Any] = {}
        for part in text.split(";"):
            name, value = (x.strip() for x in part.split("=", 1))
            if name == "modes":
                found[name] = tuple(value.split("+"))
            elif isinstance(types[name], bool):
                found[name] = value == "True"
            elif isinstance(types[name], int) or name == "window":
                found[name] = None if value == "None" else int(value)
            else:
                found[name] = None if value == "None" else value
        return cls(**found)


def draw(seed: int, modes: int = 2) -> Drawn:
    """What a seed draws, to be run in so many modes."""
    rng = random.Random(seed)

    def one(weights: dict[Any, int]) -> Any:
        return rng.choices([*weights], [*weights.values()])[0]

    found = {name: one(weights) for name, weights in CHOICES.items()}
    if seed >= TURNS_FROM:
        kinds = {"list": 3, "python": 1}
        if seed >= MIXED_FROM:
            kinds = MIXED if seed < TWICE_FROM else kinds | MIXED
        if seed >= PENALTIES_FROM:
            found["penalty"] = rng.choice(sorted(PENALTIES))
        found |= {"turns": "least", "scan": one(kinds)}
    found["wrapped"] = one({"inside": 5, "outside": 1})
    table = INSIDE if found["wrapped"] == "inside" else OUTSIDE
    if found["wrapped"] == "inside" and rng.random() < 0.6:
        found["optimizer"] = rng.choice(COMMON)
    else:
        found["optimizer"] = rng.choice(sorted(table))
    left, taken = dict(MODES), []
    for _ in range(modes):
        taken.append(one(left))
        del left[taken[-1]]
    if "jit" in taken:  # Nothing streams there.
        found |= {"at_rest": "none", "residuals": "device"}
    if found["codec"]:  # Of leaves with 4096 values or more.
        found |= {"layers": 4, "width": 16, "hidden": 64, "wrapped": "inside"}
        found["optimizer"] = rng.choice(ENCODED)
    if found["devices"] == 4:
        # JAX itself has no ordered effects there, and calls others more than once.
        found |= {"effect": "none", "ref": "none"}
        found |= {"layers": 4} if found["sharded"] == "rows" else {}
        if found["scan"] == "fori":  # Its statistics are of no device.
            found["shard_map"] = False
    else:
        found |= {"axis_types": "Auto", "sharded": "no", "constraint": "none"}
        found["shard_map"] = False
    if found["optimizer"] in SEARCHES:
        found["effect"] = "none"
    if found["frozen"] == "none":
        found["frozen_leaves"] = "layers"
    if found["scan"] == "nested":  # Two layers to a group.
        found["layer_axis"] = 0
    if "list" in found["scan"]:  # Each layer has leaves of its own.
        found |= {"layer_axis": 0, "outside": "none"}
        found["sharded"] = "no" if found["sharded"] == "rows" else found["sharded"]
    if found["selected"] == "none":
        found["predicate"] = "finite"
    if seed >= LOOPS_FROM and found["ref"] == "none":
        loops = LOOPS if seed < TURNS_FROM else {"none": 9, **LOOPS}
        twice = TWICE_FROM <= seed < PENALTIES_FROM
        found["loop"] = "twice" if twice else one(loops)
        # Where a branch leaves what it only hands through is nothing to compare.
        if found["results"] == "old parameters":
            found["results"] = "loss"
    if seed >= ADDED_FROM:
        found["added"] = one(ADDED)
        if found["added"] == "slopes":  # Layers are evaluated twice.
            found |= {"effect": "none", "ref": "none", "shard_map": False}
    return Drawn(seed=seed, modes=tuple(taken), **found)


class Calls:
    """The calls of effects: how many, and with what."""

    def __init__(self):
        self.values: dict[str, list[float]] = collections.defaultdict(list)

    def __call__(self, tag: str, x: Any) -> None:
        self.values[tag].append(float(x))


@jax.custom_vjp
def activation(x: Any) -> Any:
    """With a derivative of its own."""
    return jnp.tanh(x)


def _forward(x: Any) -> tuple[Any, Any]:
    y = jnp.tanh(x)
    return y, y


activation.defvjp(_forward, lambda y, g: (g * (1 - y * y),))


class Program:
    """The train step that a seed draws.

    Attributes:
      drawn: What was drawn.
      calls: Calls of the step's effects.
    """

    def __init__(self, drawn: Drawn):
        self.drawn, self.calls = drawn, Calls()
        self._rng = np.random.default_rng(drawn.seed)
        self.mesh: Mesh | None = None
        if drawn.devices > 1:
            types = (getattr(AxisType, drawn.axis_types),)
            devices = jax.devices()[: drawn.devices]
            self.mesh = Mesh(np.array(devices), ("x",), axis_types=types)
        self._params = self._make_params()
        self.batch = self._rng.integers(0, VOCABULARY, (BATCH,), np.int32)

    @property
    def resting(self) -> str:
        """A regex of the parameters that rest on the host; "" for none."""
        patterns = {"none": "", "layers": "(layers|more)/.*", "all": ".*"}
        return patterns[self.drawn.at_rest]

    def _make_params(self) -> Any:
        """As NumPy arrays in float32."""
        d = self.drawn
        layers = {
            "in": (d.layers, d.width, d.hidden),
            "out": (d.layers, d.hidden, d.width),
            "scale": (d.layers, d.width),
        }
        if d.scan == "nested":
            layers = {k: (d.layers, 2, *s[1:]) for k, s in layers.items()}
        if d.layer_axis:
            layers = {k: (s[1], s[0], *s[2:]) for k, s in layers.items()}
        shapes: dict[str, Any] = {
            "embedding": (VOCABULARY, d.width),
            "head": (d.width, VOCABULARY),
            "bias": (VOCABULARY,),
            "layers": layers,
        }
        if d.scan in ("two stacks", *MIXED):
            shapes["more"] = dict(layers)
        in_list = {"list": "layers", "list, scan": "layers", "scan, list": "more"}
        if d.scan in in_list:
            one = {k: s[1:] for k, s in layers.items()}
            shapes[in_list[d.scan]] = [dict(one) for _ in range(d.layers)]

        def make(shape: tuple[int, ...]) -> Any:
            return self._rng.normal(size=shape).astype(np.float32) / 3

        return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def params(self, noise: float = 0.0, number: int = 0) -> Any:
        """The parameters, each value changed by as much of itself at most."""
        rng = np.random.default_rng(number)

        def make(keys: Any, x: Any) -> Any:
            if noise:
                x = x * (1 + noise * rng.uniform(-1, 1, x.shape)).astype(np.float32)
            of_layers = keys[0].key in ("layers", "more")
            half = {"float32": False, "bfloat16": True, "mixed": of_layers}
            x = x.astype(jnp.bfloat16 if half[self.drawn.params] else np.float32)
            if self.mesh is None:
                return jax.device_put(x, jax.devices()[0])
            return jax.device_put(x, NamedSharding(self.mesh, self._spec(keys, x)))

        return jax.tree_util.tree_map_with_path(make, self._params)

    def placed_batch(self) -> Any:
        """The batch, spread over the devices where shardings follow by themselves."""
        if self.mesh is None:
            return jax.device_put(self.batch, jax.devices()[0])
        spec = P("x") if self.drawn.axis_types == "Auto" else P()
        return jax.device_put(self.batch, NamedSharding(self.mesh, spec))

    def _spec(self, keys: Any, x: Any) -> P:
        axis = {"last": x.ndim - 1, "middle": 1, "rows": 0, "no": -1}
        at = axis[self.drawn.sharded]
        if x.ndim < 2 or not 0 <= at < x.ndim or x.shape[at] % self.drawn.devices:
            return P(*[None] * x.ndim)
        names: list[Any] = [None] * x.ndim
        names[at] = "x"
        return P(*names)

    # The model.

    def _whole(self, tree: Any) -> Any:
        """Parameters as every device uses them, where JAX does not see to that."""
        if self.mesh is None or self.drawn.axis_types == "Auto":
            return tree
        return jax.tree.map(
            lambda x: jax.sharding.reshard(x, P(*[None] * x.ndim)), tree
        )

    def _layer(self, h: Any, w: Any, key: Any, whole: bool) -> tuple[Any, Any]:
        d = self.drawn
        if whole:
            w = self._whole(w)
        if d.compute == "bfloat16":
            w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
        x = h.astype(w["in"].dtype)
        if d.body == "dropout":
            x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
        act = activation if d.body == "custom_vjp" else jnp.tanh
        if d.remat == "layer, names":
            x = checkpoint_name(x, "x")
        if d.body == "recurrent":
            y, _ = lax.scan(
                lambda y, _: (act(y @ w["in"] @ w["out"]), None), x, None, 2
            )
        elif d.body == "cond":
            y = lax.cond(
                jnp.sum(h) > 0,
                lambda x: act(x @ w["in"]) @ w["out"],
                lambda x: x @ w["in"] @ w["out"] / 2,
                x,
            )
        else:
            y = act(x @ w["in"]) @ w["out"]
        h = h + (y * (1 + w["scale"])[None]).astype(h.dtype)
        if d.effect == "debug in layer":
            jax.debug.callback(self.calls, "layer", jnp.sum(h))
        return h, jnp.mean(h * h)

    def _stack(self, h: Any, layers: Any, keys: Any) -> tuple[Any, Any]:
        """All layers of a stack, each device with its part of the batch if so drawn."""
        if not self.drawn.shard_map:
            return self._apply(h, layers, keys)

        def local(h: Any, layers: Any, keys: Any) -> tuple[Any, Any]:
            h, aux = self._apply(h, layers, keys, whole=False)
            return h, lax.pmean(aux, "x")

        explicit = self.drawn.axis_types == "Explicit"
        h = jax.sharding.reshard(h, P("x", None)) if explicit else h
        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P("x"), P(), P()),
            out_specs=(P("x"), P()),
        )
        h, aux = mapped(h, self._whole(layers), keys)
        return self._whole(h), aux

    def _apply(
        self, h: Any, layers: Any, keys: Any, *, whole: bool = True
    ) -> tuple[Any, Any]:
        """All layers of a stack; parameters are made whole on each device if asked."""
        d = self.drawn
        if d.sharded == "rows" and whole:
            layers = self._whole(layers)
        if d.layer_axis:
            layers = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), layers)

        def body(h: Any, x: Any) -> tuple[Any, Any]:
            return self._layer(h, *x, whole=whole and d.sharded != "rows")

        policies = jax.checkpoint_policies
        wrap: dict[str, Callable[[Any], Any]] = {
            "layer": jax.checkpoint,
            "layer and loss": jax.checkpoint,
            "layer, no cse": functools.partial(jax.checkpoint, prevent_cse=False),
            "layer, dots": functools.partial(
                jax.checkpoint, policy=policies.dots_saveable
            ),
            "layer, names": functools.partial(
                jax.checkpoint, policy=policies.save_only_these_names("x")
            ),
        }
        body = wrap.get(d.remat, lambda f: f)(body)
        xs = (layers, keys)

        def apply(h: Any, xs: Any) -> tuple[Any, Any]:
            in_list = isinstance(layers, list)
            odd = d.scan == "pairs" and d.layers % 2
            if in_list or d.scan == "python" or odd:
                aux, outputs = [], []
                for i in range(d.layers):
                    if in_list:
                        x = (xs[0][i], xs[1][i])
                    else:
                        x = jax.tree.map(lambda x, i=i: x[i], xs)
                    h, a = body(h, x)
                    aux.append(a)
                    outputs.append(h)
                if d.added == "outputs":
                    aux = [jnp.mean(jnp.abs(x)) for x in outputs]
                return h, jnp.stack(aux)
            if d.scan == "fori":
                step = lambda i, h: body(h, jax.tree.map(lambda x: x[i], xs))[0]  # noqa: E731
                return lax.fori_loop(0, d.layers, step, h), jnp.zeros(d.layers)
            if d.scan in ("pairs", "nested"):
                if d.scan == "pairs":
                    xs = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), xs)
                return lax.scan(lambda h, x: lax.scan(body, h, x), h, xs)
            options: dict[str, Any] = {"reverse": d.scan == "reverse"}
            if d.scan == "unroll":
                options["unroll"] = 2
            h, aux = lax.scan(body, h, xs, **options)
            if d.scan == "shared":
                h, aux = lax.scan(body, h, xs)
            return h, aux

        apply = jax.checkpoint(apply) if d.remat == "scan" else apply
        return apply(h, xs)

    def _loss(self, params: Any, tokens: Any) -> tuple[Any, Any]:
        d = self.drawn
        if d.frozen == "stop_gradient":
            params = self._map_frozen(lax.stop_gradient, params)
        rest = self._whole({k: params[k] for k in ("embedding", "head", "bias")})
        given = jax.nn.one_hot(tokens, VOCABULARY)
        h = given @ rest["embedding"].astype(jnp.float32)
        shape = (d.layers, 2) if d.scan == "nested" else (d.layers,)
        key = jax.random.fold_in(jax.random.key(d.seed), jnp.sum(tokens))
        keys = jax.random.split(key, shape)
        first = h
        h, aux = self._stack(first, params["layers"], keys)
        if "more" in params:
            h, more = self._stack(h, params["more"], keys)
            aux = aux + more
        if d.outside == "tied":
            logits = h @ rest["embedding"].astype(jnp.float32).T
        else:
            logits = h @ rest["head"].astype(jnp.float32)
        logits = logits + rest["bias"].astype(jnp.float32)[None]
        loss = -jnp.mean(
            jnp.sum(jax.nn.log_softmax(logits) * jnp.roll(given, 1, axis=0), axis=1)
        )
        if d.outside in ("norm", "row"):
            out = self._whole(params["layers"]["out"])
            if d.outside == "norm":
                loss += 0.01 * jnp.sum(jnp.square(out.astype(jnp.float32)))
            else:
                loss += jnp.mean(jnp.sin(out[0].astype(jnp.float32)))
        if d.penalty != "none":
            number = PENALTIES[d.penalty]
            leaves = jax.tree.leaves(params)
            loss += 0.01 * sum(number(x.astype(jnp.float32)) for x in leaves)
        if d.added == "outputs":
            loss += 0.01 * jnp.sum(aux)
        elif d.added == "slopes":
            total = lambda x: jnp.sum(self._stack(x, params["layers"], keys)[0])  # noqa: E731
            loss += 0.01 * jnp.mean(jax.grad(total)(first) ** 2)
        if d.effect == "debug in loss":
            jax.debug.callback(self.calls, "loss", loss)
        return loss, aux

    # The optimizer.

    def _is_frozen(self, keys: Any) -> bool:
        """Whether a parameter stays as it is."""
        of_layers = keys[0].key in ("layers", "more")
        which = self.drawn.frozen_leaves
        if which == "half of layers":
            return of_layers and keys[-1].key == "in"
        return of_layers == (which == "layers")

    def _map_frozen(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda keys, x: fn(x) if self._is_frozen(keys) else x, tree
        )

    def _freeze(self, inner: Any) -> Any:
        """An optimizer that leaves some parameters as they are."""

        def mask(frozen: bool) -> Callable[[Any], Any]:
            return lambda params: jax.tree_util.tree_map_with_path(
                lambda keys, _: self._is_frozen(keys) == frozen, params
            )

        if self.drawn.frozen == "set_to_zero":
            return optax.chain(inner, optax.masked(optax.set_to_zero(), mask(True)))
        if self.drawn.frozen == "masked":
            return optax.masked(inner, mask(False))
        if self.drawn.frozen == "partition":
            return optax.partition(
                {True: optax.set_to_zero(), False: inner}, mask(True)
            )
        return inner

    def rules(self) -> oo.OffloadConfig:
        """Everything is offloaded, some of it encoded."""
        rules = [EVERYTHING]
        if self.drawn.codec:
            codec = oo.Rule(MOMENTS, min_bytes=8, optional=True, codec=self.drawn.codec)
            rules = [codec, EVERYTHING]
        return oo.OffloadConfig(rules, window_bytes=self.drawn.window)

    def transformation(self, offloaded: bool) -> Any:
        """The optimizer, offloaded or plain."""
        d, rules = self.drawn, self.rules()

        def wrap(inner: Any) -> Any:
            inner = self._freeze(plain(inner))
            if d.clip == "inside":
                inner = optax.chain(optax.clip_by_global_norm(0.5), inner)
            if offloaded:
                return oo.offload(inner, rules)
            return oo.low_bit(inner, rules, codec=None) if d.codec else inner

        if d.wrapped == "inside":
            tx = wrap(INSIDE[d.optimizer]())
        else:
            outside: dict[str, Callable[[Wrap], Any]] = OUTSIDE
            tx = plain(outside[d.optimizer](wrap))
        if d.clip == "around":
            tx = optax.chain(optax.clip_by_global_norm(0.5), tx)
        if d.selected == "skip step":
            tx = self._skipping(tx)
        return optax.with_extra_args_support(tx)

    def _skipping(self, tx: Any) -> Any:
        """Around an optimizer: whether a step is made is seen from its updates."""
        tx = optax.with_extra_args_support(tx)

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            updates, new = tx.update(grads, state, params, **extra)
            ok = self._predicate(extra["value"], updates)
            updates = jax.tree.map(lambda x: jnp.where(ok, x, 0 * x), updates)
            return updates, jax.tree.map(functools.partial(jnp.where, ok), new, state)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    # The step.

    def _predicate(self, value: Any, grads: Any) -> Any:
        """Whether what is new is taken."""
        if self.drawn.predicate == "never":
            return value < 0
        return jnp.isfinite(optax.global_norm(grads))

    def _selected(self, ok: Any, new: Any, old: Any) -> Any:
        """Parameters and state: the new ones, the old ones, or between them."""
        how = self.drawn.selected
        if how == "where":
            return jax.tree.map(functools.partial(jnp.where, ok), new, old)
        if how == "where, state":
            return new[0], jax.tree.map(
                functools.partial(jnp.where, ok), new[1], old[1]
            )
        if how == "select":
            return jax.tree.map(functools.partial(lax.select, ok), new, old)
        if how == "cond":
            return lax.cond(ok, lambda new, old: new, lambda new, old: old, new, old)
        if how == "lerp":

            def between(a: Any, b: Any) -> Any:
                some = jnp.issubdtype(a.dtype, jnp.floating)
                return (
                    (b + jnp.where(ok, 0.5, 0.0).astype(a.dtype) * (a - b))
                    if some
                    else a
                )

            return jax.tree.map(between, new, old)
        return new

    def _gradients(self, params: Any, tokens: Any) -> tuple[Any, Any, Any]:
        d = self.drawn
        loss = jax.checkpoint(self._loss) if "loss" in d.remat else self._loss
        compute = jax.value_and_grad(loss, has_aux=True)
        if d.microbatches == "none":
            (value, aux), grads = compute(params, tokens)
            return value, aux, grads
        halves = tokens.reshape(2, -1)
        if d.microbatches == "python":
            found = [compute(params, half) for half in halves]
            grads = jax.tree.map(lambda a, b: (a + b) / 2, found[0][1], found[1][1])
            return (found[0][0][0] + found[1][0][0]) / 2, found[1][0][1], grads

        def one(total: Any, half: Any) -> tuple[Any, Any]:
            (value, aux), grads = compute(params, half)
            return jax.tree.map(lambda a, b: a + b / 2, total, grads), (value, aux)

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, (value, aux) = lax.scan(one, zeros, halves)
        return jnp.mean(value), aux, grads

    def step(self, tx: Any, *, apart: bool = False) -> Callable[..., Any]:
        """A train step with an optimizer; if asked, in parts to the compiler."""
        d = self.drawn

        def step(*args: Any) -> Any:
            given = dict(zip(self.takes, args, strict=True))
            params, state = given["params"], given["state"]
            tokens = given["batch"]
            value, aux, grads = self._gradients(params, tokens)
            if apart:
                grads = lax.optimization_barrier(grads)
            if d.frozen == "zero gradients":
                grads = self._map_frozen(jnp.zeros_like, grads)
            if d.constraint == "gradients":
                grads = self._constrained(grads)

            def updated(params: Any, state: Any) -> tuple[Any, Any]:
                updates, state = tx.update(
                    grads,
                    state,
                    params,
                    value=value,
                    grad=grads,
                    value_fn=lambda p: self._loss(p, tokens)[0],
                )
                return optax.apply_updates(params, updates), state

            if d.selected == "cond around":
                ok = self._predicate(value, grads)
                new, state = lax.cond(ok, updated, lambda *old: old, params, state)
            else:
                old = (params, state)
                new, state = updated(*old)
                if d.selected not in ("none", "skip step"):
                    ok = self._predicate(value, grads)
                    new, state = self._selected(ok, (new, state), old)
            if d.constraint == "params":
                new = self._constrained(new)
            count = functools.partial(self.calls, "step")
            if d.effect == "debug in step":
                jax.debug.callback(count, value)
            if d.effect == "io in step":
                io_callback(count, None, optax.global_norm(new))
            if d.effect == "ordered io in step":
                io_callback(count, None, value, ordered=True)
            if "ref" in given:
                given["ref"][...] = given["ref"][...] * 2 + value
            more: dict[str, Callable[[], Any]] = {
                "loss": lambda: value,
                "statistics of layers": lambda: (value, aux),
                "norm of gradients": lambda: (value, optax.global_norm(grads)),
                "gradients": lambda: grads,
                "difference of parameters": lambda: jax.tree.map(
                    lambda a, b: a - b, new, params
                ),
                "old parameters": lambda: params,
            }
            results = {"params": new, "state": state, "batch": more[d.results]()}
            return tuple(results[name] for name in self.takes if name != "ref")

        return step if d.loop == "none" else self._looped(step)

    def _looped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step twice, in a loop maybe, or in a branch that is taken or not."""
        loop, at = self.drawn.loop, self.takes.index("batch")

        def given(carry: Any, tokens: Any) -> list[Any]:
            return [*carry[:at], tokens, *carry[at:]]

        def apart(found: Any) -> tuple[Any, Any]:
            return (*found[:at], *found[at + 1 :]), found[at]

        def steps(*args: Any) -> Any:
            carry, tokens = apart(args)

            def once(carry: Any) -> tuple[Any, Any]:
                return apart(step(*given(carry, tokens)))

            if loop == "twice":
                carry, more = once(once(carry)[0])
                return tuple(given(carry, more))
            if loop == "scan":
                carry, more = lax.scan(lambda c, _: once(c), carry, None, length=2)
                return tuple(given(carry, more))
            empty = jax.eval_shape(once, carry)[1]
            more = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
            count = jnp.sum(tokens) * 0 + 2 if loop == "while" else 2
            if loop in ("fori", "while"):
                carry, more = lax.fori_loop(
                    0, count, lambda _, c: once(c[0]), (carry, more)
                )
            else:
                taken = jnp.sum(tokens) >= (0 if loop == "cond" else 10**6)
                carry, more = lax.cond(taken, once, lambda c: (c, more), carry)
            return tuple(given(carry, more))

        return steps

    def _constrained(self, tree: Any) -> Any:
        """With shardings that the step asks for, the parameters' own."""
        assert self.mesh is not None
        mesh = self.mesh

        def constrain(keys: Any, x: Any) -> Any:
            sharding = NamedSharding(mesh, self._spec(keys, x))
            if self.drawn.axis_types == "Explicit":
                return jax.sharding.reshard(x, sharding)
            return lax.with_sharding_constraint(x, sharding)

        return jax.tree_util.tree_map_with_path(constrain, tree)

    @property
    def takes(self) -> Sequence[str]:
        """The arguments in their order, which is that of the results."""
        orders = {
            "params first": ["params", "state", "batch"],
            "state first": ["state", "params", "batch"],
            "batch first": ["batch", "state", "params"],
        }
        return orders[self.drawn.order] + ["ref"] * (self.drawn.ref != "none")

    @property
    def donates(self) -> tuple[int, ...]:
        """The positions of the arguments that are donated."""
        names = {
            "none": (),
            "params": ("params",),
            "state": ("state",),
            "both": ("params", "state"),
        }
        return tuple(
            i for i, x in enumerate(self.takes) if x in names[self.drawn.donated]
        )

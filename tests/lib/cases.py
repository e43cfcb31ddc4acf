"""The table of train steps whose memory is checked, on chips that are here or not.

A new case is one line.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import INSIDE, OUTSIDE, Wrap

import optax_offload as oo
from optax_offload._places.rules import as_config

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
LR = 1e-2
Carry = Any


@dataclasses.dataclass(frozen=True)
class Train:
    """A training with an optimizer, as pure functions of what goes from step to step.

    Wherever it is in there, the optimizer's state is under the name ``opt_state``.

    Attributes:
      start: Makes what goes from step to step, given the parameters.
      gradients: Makes the gradients, given what goes from step to step and a batch.
      apply: Makes the next of what goes from step to step, given it and gradients.
    """

    start: Callable[[Any], Carry]
    gradients: Callable[[Carry, Any], Any]
    apply: Callable[[Carry, Any], Carry]

    def step(self, carry: Carry, batch: Any) -> Carry:
        return self.apply(carry, self.gradients(carry, batch))


@dataclasses.dataclass(frozen=True)
class Model:
    """Something to train.

    Attributes:
      params: Makes the parameters; it can be jitted.
      batch: Makes a batch, its examples along the first axis.
      train: Makes a training with an optimizer.
    """

    params: Callable[[], Any]
    batch: Callable[[], Any]
    train: Callable[[optax.GradientTransformation], Train]


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step, and which state has to be on the host.

    Attributes:
      optimizer: Makes the optimizer, given what wraps a part of it: `offload`, or
        nothing for the plain one.
      host: Regex of paths: leaves of the optimizer state whose whole path matches, of
        at least `min_bytes`, are on the host, and all others on the device.
      model: Makes what is trained; called when needed, as it may need Flax.
      rules: Rules of the offloaded part.
      min_bytes: Bytes under which leaves stay on the device, as in the rules.
      devices: Number of devices that parameters and their state are sharded over, as
        with FSDP.
      donate: Whether a step takes over the memory of what it updates.
      computed_on_host: Operations that compilers are known to leave to the host (F19).
      copied_on_host: Platforms whose compilers are known to use as many bytes of host
        memory again, if not in all versions (F18).
      refused_by: Platforms whose compilers fail on it.
    """

    optimizer: Callable[[Wrap], Any]
    host: str
    model: Callable[[], Model]
    rules: Any = ".*"
    min_bytes: int = 2**16
    devices: int = 1
    donate: bool = True
    computed_on_host: tuple[str, ...] = ()
    copied_on_host: tuple[str, ...] = ()
    refused_by: tuple[str, ...] = ()

    def training(self, wrap: Wrap | None = None) -> Train:
        """The training, offloaded, or in another way."""
        if wrap is None:
            wrap = functools.partial(oo.offload, rules=self.rules)
        return self.model().train(self.optimizer(wrap))

    def plain(self) -> Train:
        """The training without offload, with state in the formats of the rules."""
        if not any(rule.codec for rule in as_config(self.rules).rules):
            return self.training(lambda inner: inner)
        return self.training(lambda inner: oo.low_bit(inner, self.rules, codec=None))

    def jit(self, fn: Callable[[Carry, Any], Carry], carry: Carry) -> Any:
        """The jitted step; it keeps arguments that it does not use, to be counted."""
        options: dict[str, Any] = {"donate_argnums": 0} if self.donate else {}
        if self.devices > 1:
            # Left alone, the compiler shards what is replicated as its gradients (F37).
            options["out_shardings"] = jax.tree.map(_out_sharding, carry)
        return jax.jit(fn, keep_unused=True, **options)

    def params_sharding(self, shape: tuple[int, ...], mesh: Any) -> NamedSharding:
        """Along the last axis of what has more than one, as far as it divides."""
        divides = len(shape) > 1 and shape[-1] % self.devices == 0
        if self.devices == 1 or not divides:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*[None] * (len(shape) - 1), "x"))

    def batch_sharding(self, mesh: Any) -> NamedSharding:
        return NamedSharding(mesh, P("x") if self.devices > 1 else P())

    def templates(self, train: Train, mesh: AbstractMesh | Mesh) -> tuple[Any, Any]:
        """What goes from step to step, and a batch, on a mesh."""

        def struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        model = self.model()
        params = jax.tree.map(
            lambda x: struct(x, self.params_sharding(x.shape, mesh)),
            jax.eval_shape(model.params),
        )
        batch = struct(jax.eval_shape(model.batch), self.batch_sharding(mesh))
        return oo.eval_shape(train.start, params), batch

    def arrays(self, train: Train, mesh: Mesh) -> tuple[Any, Any]:
        """The same, made on the devices of the mesh."""
        model = self.model()
        params = jax.tree.map(
            lambda x: jax.device_put(x, self.params_sharding(x.shape, mesh)),
            jax.jit(model.params)(),
        )
        carry = train.start(params)
        # A step returns all arrays committed, and is compiled again if they were not.
        committed = jax.tree.map(
            lambda x, template: jax.device_put(x, template.sharding),
            carry,
            self.templates(train, mesh)[0],
        )
        return committed, jax.device_put(model.batch(), self.batch_sharding(mesh))

    def kind(self, path: str, nbytes: int) -> str:
        """Where a leaf of what goes from step to step has to be."""
        match = re.fullmatch(r"(?:.*/)?opt_state/(.*)", path)
        is_host = match and re.fullmatch(self.host, match[1])
        return "pinned_host" if is_host and nbytes >= self.min_bytes else "device"


def _out_sharding(x: Any) -> NamedSharding:
    kind = x.sharding.memory_kind
    # Not named where it is the default: a mesh without devices does not know it.
    return x.sharding.with_memory_kind(None if kind == "device" else kind)


def _bare(
    loss: Callable[[Any, Any], Any],
    dtype: Any = jnp.float32,
    width: int = 128,
    vocabulary: int = 512,
) -> Model:
    """Parameters in a dict, and nothing of Flax."""
    shapes = {
        "embedding": {"embedding": (vocabulary, width)},
        "head": {"kernel": (width, 256), "bias": (256,)},
        "layers": {"kernel": (2, width, width)},
    }

    def params() -> Any:
        leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: type(x) is tuple)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        made = [
            (jax.random.normal(k, s) / 16).astype(dtype)
            for k, s in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, made)

    return Model(params, lambda: jnp.arange(16) * 31 % 256, _bare_train(loss))


def _bare_train(loss: Callable[[Any, Any], Any]) -> Callable[[Any], Train]:
    def train(tx: optax.GradientTransformation) -> Train:
        def apply(carry: Any, grads: Any) -> Any:
            params = carry["params"]
            updates, state = tx.update(grads, carry["opt_state"], params)
            return {
                "params": optax.apply_updates(params, updates),
                "opt_state": state,
            }

        return Train(
            start=lambda params: {"params": params, "opt_state": tx.init(params)},
            gradients=lambda carry, batch: jax.grad(loss)(carry["params"], batch),
            apply=apply,
        )

    return train


def _bowl(params: Any, batch: Any) -> jax.Array:
    """Whose gradient is arithmetic on one element: quick to compile."""
    scale = 1 + jnp.mean(batch.astype(jnp.float32)) / 512
    terms = [jnp.sum(jnp.cos(p * scale)) for p in jax.tree.leaves(params)]
    return sum(terms, start=jnp.float32(0))


def _network(params: Any, tokens: Any) -> jax.Array:
    """A lookup, layers under `lax.scan`, and a head."""
    x, _ = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None),
        params["embedding"]["embedding"][tokens],
        params["layers"]["kernel"],
    )
    y = x @ params["head"]["kernel"] + params["head"]["bias"][None]
    return jnp.mean(y.astype(jnp.float32) ** 2)


@functools.cache
def bare() -> Model:
    """Leaves without a model, in float32."""
    return _bare(_bowl)


@functools.cache
def bare_bfloat16() -> Model:
    """The same in bfloat16."""
    return _bare(_bowl, jnp.bfloat16, width=256)


@functools.cache
def bare_wide() -> Model:
    """Whose last axes have blocks of 256."""
    return _bare(_bowl, width=256)


@functools.cache
def bare_large() -> Model:
    """With a leaf of 16 MiB."""
    return _bare(_bowl, vocabulary=2**15)


@functools.cache
def bare_even() -> Model:
    """All leaves but one of the same size, 128 KiB."""
    return _bare(_bowl, vocabulary=256)


@functools.cache
def scanned() -> Model:
    """Layers under a scan."""
    return _bare(_network)


@functools.cache
def deep(width: int = 512, layers: int = 8) -> Model:
    """Deep enough for the state of one layer to be little beside that of all."""

    def loss(params: Any, tokens: Any) -> jax.Array:
        x = jax.nn.one_hot(tokens, width)
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def params() -> Any:
        return {f"w{i:02}": jnp.full((width, width), 0.1) for i in range(layers)}

    return Model(params, lambda: jnp.arange(64), _bare_train(loss))


def _settings(layers: int) -> Any:
    lm_program = pytest.importorskip("lm_program", reason="needs the examples' extra")
    return lm_program.Settings(layers=layers, width=128, heads=4, context=16, batch=8)


def _tokens() -> jax.Array:
    return jnp.arange(8 * 17).reshape(8, 17) * 37 % 256


@functools.cache
def linen() -> Model:
    """The model of examples/train_lm.py: a Transformer under `nn.scan`."""
    settings = _settings(layers=2)
    train_lm = pytest.importorskip("train_lm", reason="needs Flax")
    model = train_lm.Transformer(settings)

    def params() -> Any:
        return model.init(jax.random.key(0), _tokens()[:, :-1])["params"]

    def train(tx: Any) -> Train:
        return Train(
            start=lambda params: train_lm.TrainState.create(
                apply_fn=model.apply, params=params, tx=tx
            ),
            gradients=lambda state, batch: jax.grad(train_lm.loss_fn)(
                state.params, state, batch
            ),
            apply=lambda state, grads: state.apply_gradients(grads=grads),
        )

    return Model(params, _tokens, train)


@functools.cache
def nnx() -> Model:
    """The model of examples/train_nnx.py: the same, not scanned."""
    settings = _settings(layers=1)
    train_nnx = pytest.importorskip("train_nnx", reason="needs Flax")
    nnx = train_nnx.nnx

    def make() -> Any:
        return nnx.split(train_nnx.Transformer(settings, rngs=nnx.Rngs(0)))

    graph, _ = jax.eval_shape(make)

    def train(tx: Any) -> Train:
        def start(params: Any) -> Any:
            model = nnx.merge(graph, params)
            return nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

        def gradients(carry: Any, batch: Any) -> Any:
            model, _ = nnx.merge(*carry)
            return nnx.grad(train_nnx.loss_fn)(model, batch)

        def apply(carry: Any, grads: Any) -> Any:
            model, optimizer = nnx.merge(*carry)
            optimizer.update(model, grads)
            return nnx.split((model, optimizer))

        return Train(start, gradients, apply)

    return Model(lambda: make()[1], _tokens, train)


def _config(name: str, optimizer: str, host: str, **fields: Any) -> Case:
    """A rule file with an optimizer that it is for."""
    fields = {"model": bare} | fields
    return Case(
        lambda wrap: wrap(INSIDE[optimizer]()),
        host,
        rules=oo.load_config(CONFIGS / f"{name}.toml"),
        **fields,
    )


def _adamw(wrap: Wrap) -> Any:
    return wrap(optax.adamw(LR))


def _clipped(wrap: Wrap) -> Any:
    """The optimizer of the examples."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, LR, 2, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), wrap(optax.adamw(schedule)))


MOMENTS = r"(.*/)?(mu|nu)/.*"
# The moments of one parameter, so that each group waits for the one before it.
NARROW = oo.OffloadConfig([oo.Rule(".*")], window_bytes=2 * 2**17)

RULE_FILES: dict[str, Case] = {
    **{
        f"adam_moments-{name}": _config("adam_moments", name, MOMENTS)
        for name in ("adam", "adamw", "nadamw", "radam", "lamb", "adabelief", "yogi")
    },
    "adam_moments_int8-adamw": _config(
        "adam_moments_int8", "adamw", MOMENTS, model=bare_wide
    ),
    "all_but_embeddings-adamw": _config(
        "all_but_embeddings", "adamw", r"(.*/)?(mu|nu)/(head|layers)/.*"
    ),
    "all_states-adafactor": _config("all_states", "adafactor_momentum", r".*/ema/.*"),
    "all_states-amsgrad": _config("all_states", "amsgrad", r"(.*/)?(mu|nu|nu_max)/.*"),
    "ema_and_accumulation-ema": _config("ema_and_accumulation", "ema", ".*/ema/.*"),
    "ema_and_accumulation-multi_steps": _config(
        "ema_and_accumulation", "multi_steps", "acc_grads/.*"
    ),
    "large_leaves-adamw": _config(
        "large_leaves", "adamw", MOMENTS, model=bare_large, min_bytes=2**24
    ),
    "lion-lion": _config("lion", "lion", r".*/mu/.*"),
    "lion-sgd": _config("lion", "sgd_momentum", r".*/trace/.*"),
    "second_moment-adamw": _config("second_moment", "adamw", r".*/nu/.*"),
}

OTHERS: dict[str, Case] = {
    "linen": Case(_clipped, MOMENTS, linen),
    "nnx": Case(_clipped, MOMENTS, nnx),
    "scanned": Case(_adamw, MOMENTS, scanned),
    "fsdp_4": Case(_clipped, MOMENTS, scanned, devices=4),
    "fsdp_8": Case(_adamw, MOMENTS, scanned, devices=8),
    "multi_steps-inside": Case(
        lambda wrap: wrap(INSIDE["multi_steps"]()), r".*(mu|nu|acc_grads)/.*", bare
    ),
    "apply_if_finite-inside": Case(
        lambda wrap: wrap(INSIDE["apply_if_finite"]()), MOMENTS, bare
    ),
    # JAX 0.10.2: on a GPU what comes out of its conditional is copied.
    "apply_if_finite-around": Case(
        OUTSIDE["apply_if_finite"], MOMENTS, bare, copied_on_host=("gpu",)
    ),
    "bfloat16": Case(_adamw, MOMENTS, bare_bfloat16),
    "bfloat16_mu": Case(
        lambda wrap: wrap(INSIDE["adam_bfloat16_mu"]()), MOMENTS, scanned
    ),
    # Slices are written in place: what must not be written to is copied first.
    "not_donated": Case(
        _adamw, MOMENTS, scanned, donate=False, copied_on_host=("gpu", "tpu")
    ),
    "narrow_window": Case(_adamw, MOMENTS, bare_even, rules=NARROW),
    # Why it belongs inside: its `where` over the old state and the new.
    "multi_steps-around": Case(
        OUTSIDE["multi_steps"],
        MOMENTS,
        bare,
        computed_on_host=("select_n",),
        copied_on_host=("gpu", "tpu"),
        refused_by=("tpu",),
    ),
}

CASES = RULE_FILES | OTHERS

"""EasyLM's llama_train.py: specs by regex over paths, and a streaming checkpoint.

`jax.jit` has taken the place of the pjit there, and `jax.set_mesh` that of its mesh.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import flax.linen as nn
import jax
import optax
import pattern
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import optax_offload as oo

PARTITION_RULES = (("kernel", P("fsdp", None)), (".*", P()))


def match_partition_rules(rules: Any, tree: Any) -> Any:
    """A spec for each leaf, by the first rule that its path matches."""

    def spec_of(keys: Any, x: Any) -> P:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if x.ndim == 0:
            return P()
        return next(spec for pattern, spec in rules if re.search(pattern, path))

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def make_shard_and_gather_fns(partition: Any) -> tuple[Any, Any]:
    """What brings each leaf of a checkpoint to its place, and back."""

    def make_shard_fn(place: Any) -> Any:
        return jax.jit(lambda x: x, out_shardings=place)

    gather = jax.tree.map(lambda _: jax.device_get, partition)
    return jax.tree.map(make_shard_fn, partition), gather


class Trainer(pattern.Trainer):
    """As its main."""

    under = "opt_state"

    def __init__(self, setup: pattern.Setup):
        self._mesh = mesh = pattern.mesh("fsdp")
        model = nn.Dense(pattern.OUT)
        tx: Any = setup.offload(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
            pattern.RULES,
        )

        def init_fn(rng: jax.Array) -> TrainState:
            params = model.init(rng, pattern.batch(0))
            return TrainState.create(params=params, tx=tx, apply_fn=model.apply)

        def train_step(
            state: TrainState, rng: jax.Array, x: jax.Array
        ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
            x = jax.lax.with_sharding_constraint(x, P("fsdp"))

            def loss_fn(params: Any) -> jax.Array:
                return pattern.loss_of(model.apply(params, x))  # pyright: ignore

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            state = state.apply_gradients(grads=grads)
            metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
            return state, jax.random.split(rng)[0], metrics

        self._rng = jax.random.PRNGKey(0)
        shapes = jax.eval_shape(init_fn, self._rng)
        train_state_partition = match_partition_rules(PARTITION_RULES, shapes)
        if setup.second_line:
            train_state_partition = oo.state_shardings(
                init_fn,
                jax.random.PRNGKey(0),
                shardings=train_state_partition,
                mesh=mesh,
            )
        self._step = jax.jit(
            train_step,
            in_shardings=(train_state_partition, P(), P()),
            out_shardings=(train_state_partition, P(), P()),
            donate_argnums=(0, 1),
        )
        self._path = setup.directory / "streaming_train_state"
        with jax.set_mesh(mesh):
            shard_fns, self._gather_fns = make_shard_and_gather_fns(
                train_state_partition
            )
            if self._path.exists():
                values = jax.tree.unflatten(
                    jax.tree.structure(shapes), pickle.loads(self._path.read_bytes())
                )
                self._state = jax.tree.map(lambda f, x: f(x), shard_fns, values)
            else:
                self._state = jax.jit(
                    init_fn, in_shardings=P(), out_shardings=train_state_partition
                )(self._rng)

    def step(self, x: jax.Array) -> jax.Array:
        with jax.set_mesh(self._mesh):
            self._state, self._rng, metrics = self._step(self._state, self._rng, x)
        return metrics["loss"]

    def state(self) -> Any:
        return self._state

    def save(self) -> None:
        values = jax.tree.map(lambda f, x: f(x), self._gather_fns, self._state)
        self._path.write_bytes(pickle.dumps(jax.tree.leaves(values)))

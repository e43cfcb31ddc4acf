"""tunix's PeftTrainer: nnx.jit, gradients accumulated, and a trainer's device_put.

It puts the optimizer's state where metadata says when the step is jitted, and makes
restore templates of metadata: neither knows memory kinds.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pattern
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

MICRO_STEPS = 2


class Model(nnx.Module):
    """A base that is frozen, and an adapter that is trained."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
        self.base = nnx.Linear(pattern.IN, pattern.OUT, rngs=rngs)
        self.a = nnx.LoRAParam(kernel(rngs.params(), (pattern.IN, pattern.OUT)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.base(x) + x @ self.a[...]


class Accumulator(nnx.Module):
    """The sum of the gradients since the last update."""

    def __init__(self, model: Model):
        zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam))
        self.grads = nnx.data(zeros)

    def add(self, grads: Any) -> None:
        jax.tree.map(
            lambda sum_, g: sum_.set_value(sum_[...] + g[...]),
            self.grads,
            grads,
            is_leaf=is_variable,
        )

    def take(self) -> Any:
        mean = jax.tree.map(lambda g: g / MICRO_STEPS, self.grads)
        jax.tree.map(
            lambda sum_: sum_.set_value(jnp.zeros_like(sum_[...])),
            self.grads,
            is_leaf=is_variable,
        )
        return mean


def is_variable(x: Any) -> bool:
    """Where a tree of variables ends."""
    return isinstance(x, nnx.Variable)


def shard(state: Any, mesh: Any) -> Any:
    """As metadata says."""
    named = nnx.get_named_sharding(state, mesh)
    return jax.tree.map(jax.device_put, state, named)


class PeftTrainer:
    """What of tunix's PeftTrainer touches the state."""

    def __init__(self, model: Model, tx: Any, mesh: Any, path: Any):
        self.model, self._mesh, self._path = model, mesh, path
        self.optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
        self._align_opt_state_dtypes()
        self.accumulator = Accumulator(model)
        self._jitted: Any = None
        if path.exists():
            self._restore()

    def _align_opt_state_dtypes(self) -> None:
        """Asks what dtypes an update gives, of state as it was made."""
        params, state = (
            jax.tree.map(lambda x: x[...], tree, is_leaf=is_variable)
            for tree in (
                nnx.state(self.model, nnx.LoRAParam),
                self.optimizer.opt_state,
            )
        )
        _, probed = jax.eval_shape(self.optimizer.tx.update, params, state, params)
        assert jax.tree.structure(probed) == jax.tree.structure(state)

    def _restore(self) -> None:
        saved = nnx.state((self.model, self.optimizer))
        template = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            saved,
            nnx.get_named_sharding(saved, self._mesh),
        )
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(self._path, template)
        nnx.update((self.model, self.optimizer), restored)

    def jit_train_and_eval_step(self, *, cache_nnx_graph: bool = False) -> Any:
        """What is cached is as the first call asks for."""
        if self._jitted is None:
            state = nnx.state(self.optimizer, nnx.optimizer.OptState)
            nnx.update(self.optimizer, shard(state, self._mesh))
            step = nnx.jit(
                self._train_step, donate_argnames=("optimizer", "accumulator")
            )
            held = step, self.model, self.optimizer, self.accumulator
            if cache_nnx_graph:
                self._jitted = functools.partial(nnx.cached_partial(*held))
            else:
                self._jitted = functools.partial(*held)
        return self._jitted

    def train(self, x: jax.Array, is_update_step: bool) -> jax.Array:
        step = self.jit_train_and_eval_step(cache_nnx_graph=True)
        assert step.func.jitted_fn._cache_size() >= 0
        return step(x, jnp.asarray(is_update_step))

    @staticmethod
    def _train_step(
        model: Model,
        optimizer: nnx.Optimizer,
        accumulator: Accumulator,
        x: jax.Array,
        is_update_step: jax.Array,
    ) -> jax.Array:
        trained = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(
            lambda model: pattern.loss_of(model(x)), argnums=trained
        )(model)
        accumulator.add(grads)

        def apply(
            model: Model, optimizer: nnx.Optimizer, accumulator: Accumulator
        ) -> None:
            optimizer.update(model, accumulator.take())

        def skip(*args: Any) -> None:
            del args

        nnx.cond(is_update_step, apply, skip, model, optimizer, accumulator)
        return loss

    def save(self) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self._path, nnx.state((self.model, self.optimizer)))


class Trainer(pattern.Trainer):
    """A script that uses it."""

    under = "opt_state"

    def __init__(self, setup: pattern.Setup):
        mesh, rules = pattern.mesh("fsdp"), pattern.RULES
        with jax.set_mesh(mesh):
            model = Model(nnx.Rngs(0))
            nnx.update(model, shard(nnx.state(model), mesh))
            on_misplaced = {"on_misplaced": "move"} if setup.second_line else {}
            tx = setup.offload(optax.adamw(1e-2), rules, **on_misplaced)
            with warnings.catch_warnings():
                # NNX shards what it makes on the device; it is moved back below.
                warnings.simplefilter("ignore", oo.OffloadWarning)
                trainer = PeftTrainer(model, tx, mesh, setup.directory / "checkpoint")
            if setup.second_line:
                trainer.jit_train_and_eval_step(cache_nnx_graph=True)
                oo.place(trainer.optimizer, rules, under="opt_state")
        self._trainer, self._mesh = trainer, mesh

    def step(self, x: jax.Array) -> jax.Array:
        x = jax.device_put(x, NamedSharding(self._mesh, P("fsdp")))
        with jax.set_mesh(self._mesh):
            losses = [self._trainer.train(x, i == 1) for i in range(MICRO_STEPS)]
        return sum(losses[1:], start=losses[0])

    def state(self) -> Any:
        return nnx.state(self._trainer.optimizer)

    def save(self) -> None:
        self._trainer.save()

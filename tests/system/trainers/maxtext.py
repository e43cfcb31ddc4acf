"""MaxText's abstract states, how they are set up, step and restore, of both paths.

Its own ``optimizer_memory_host_offload`` stays off.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pattern
from flax import nnx
from flax.linen import spmd
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

LOGICAL_AXIS_RULES = (("embed", ("fsdp",)), ("mlp", None))


class Model(nn.Module):
    """Layers under a scan, as MaxText's are."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = nn.with_logical_partitioning(
            nn.initializers.lecun_normal(), ("embed", "mlp")
        )

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                return nn.tanh(nn.Dense(pattern.IN, kernel_init=kernel)(x)), None

        scanned = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.meta.PARTITION_NAME: "layers"},
        )
        return scanned(name="layers")(x, None)[0]


def init_initial_state(model: Any, tx: Any, key: jax.Array) -> TrainState:
    """The state, with boxes that name logical axes."""
    params = model.init(key, jnp.ones((pattern.BATCH, pattern.IN)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def get_optimizer(setup: pattern.Setup) -> Any:
    """As optimizers.py has it."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return setup.offload(optax.adamw(schedule, eps_root=0.0), pattern.RULES)


def get_abstract_state(
    model: Any, tx: Any, key: jax.Array, mesh: Any, second_line: bool
) -> tuple[Any, Any]:
    """A template to restore, and the shardings."""
    init_state_partial = functools.partial(init_initial_state, model, tx, key)
    with nn.logical_axis_rules(LOGICAL_AXIS_RULES):
        abstract = jax.eval_shape(init_state_partial)
    annotations = nn.get_partition_spec(abstract)
    state_mesh_shardings = spmd.logical_to_mesh_sharding(
        annotations, mesh, LOGICAL_AXIS_RULES
    )
    if second_line:
        state_mesh_shardings = oo.state_shardings(
            init_state_partial, shardings=state_mesh_shardings
        )
    abstract = jax.jit(
        init_state_partial, out_shardings=state_mesh_shardings
    ).eval_shape()
    return nn.unbox(abstract), state_mesh_shardings


class Trainer(pattern.Trainer):
    """As setup_train_loop and train_loop."""

    under = "opt_state"

    def __init__(self, setup: pattern.Setup):
        mesh, model, key = pattern.mesh("fsdp"), Model(), jax.random.key(0)
        tx = get_optimizer(setup)
        abstract, shardings = get_abstract_state(
            model, tx, key, mesh, setup.second_line
        )
        self._path = setup.directory / "items"
        if self._path.exists():
            with ocp.StandardCheckpointer() as checkpointer:
                state = checkpointer.restore(self._path, abstract)
        else:
            init = functools.partial(init_initial_state, model, tx)
            with jax.set_mesh(mesh), nn.logical_axis_rules(LOGICAL_AXIS_RULES):
                state = jax.jit(init, out_shardings=shardings)(key)
            state = nn.unbox(state)
        self._state = state
        data = NamedSharding(mesh, P("fsdp"))
        self._step = jax.jit(
            functools.partial(self._train_step, model),
            in_shardings=(shardings, data),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )

    @staticmethod
    def _train_step(
        model: Any, state: TrainState, x: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(params: Any) -> jax.Array:
            return pattern.loss_of(model.apply(params, x))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
        state = state.apply_gradients(grads=grads)
        return state, {"loss": loss, "param_norm": optax.tree.norm(state.params)}

    def step(self, x: jax.Array) -> jax.Array:
        self._state, metrics = self._step(self._state, x)
        return metrics["loss"]

    def state(self) -> Any:
        return self._state

    def save(self) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self._path, self._state)


class NnxModel(nnx.Module):
    """One layer, sharded over its inputs."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
        self.dense = nnx.Linear(pattern.IN, pattern.OUT, kernel_init=kernel, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class TrainStateNnx(nnx.Module):
    """A model and its optimizer."""

    def __init__(self, model: NnxModel, optimizer: nnx.Optimizer):
        self.model, self.optimizer = model, optimizer


def get_abstract_state_nnx(
    mesh: Any, nnx_init_trainstate_fn: Any, second_line: bool
) -> tuple[Any, Any]:
    """A template to restore, and the shardings."""
    _, abstract_state = nnx.split(nnx.eval_shape(nnx_init_trainstate_fn))
    state_mesh_shardings = nnx.get_named_sharding(abstract_state, mesh)
    if second_line:
        state_mesh_shardings = oo.state_shardings(
            lambda: nnx.state(nnx_init_trainstate_fn()), shardings=state_mesh_shardings
        )
    template = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract_state,
        state_mesh_shardings,
    )
    return template, state_mesh_shardings


class NnxTrainer(pattern.Trainer):
    """As with `pure_nnx: true`."""

    under = "optimizer/opt_state"

    def __init__(self, setup: pattern.Setup):
        mesh, tx = pattern.mesh("fsdp"), get_optimizer(setup)

        def create_train_state_fn() -> TrainStateNnx:
            # Shardings are given when it is jitted.
            with nnx.use_eager_sharding(False):
                model = NnxModel(nnx.Rngs(0))
            return TrainStateNnx(model, nnx.Optimizer(model, tx, wrt=nnx.Param))

        template, shardings = get_abstract_state_nnx(
            mesh, create_train_state_fn, setup.second_line
        )
        self._path = setup.directory / "items"
        if self._path.exists():
            with ocp.StandardCheckpointer() as checkpointer:
                state = checkpointer.restore(self._path, template)
        else:
            state = jax.jit(
                lambda: nnx.state(create_train_state_fn()), out_shardings=shardings
            )()
        self._state = state
        graphdef = nnx.graphdef(nnx.eval_shape(create_train_state_fn))
        self._step = jax.jit(
            functools.partial(self._train_step, graphdef),
            in_shardings=(shardings, NamedSharding(mesh, P("fsdp"))),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )

    @staticmethod
    def _train_step(graphdef: Any, state: Any, x: jax.Array) -> Any:
        train_state = nnx.merge(graphdef, state)

        def loss_fn(model: NnxModel) -> jax.Array:
            return pattern.loss_of(model(x))

        loss, grads = nnx.value_and_grad(loss_fn)(train_state.model)
        train_state.optimizer.update(train_state.model, grads)
        return nnx.state(train_state), loss

    def step(self, x: jax.Array) -> jax.Array:
        self._state, loss = self._step(self._state, x)
        return loss

    def state(self) -> Any:
        return self._state

    def save(self) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self._path, self._state)

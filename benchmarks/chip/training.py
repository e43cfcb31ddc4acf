"""A step compiled for the attached device, and arrays for it to begin with."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from benchmarks.common.steps import LAYERS, MODES, Mode, of_workload, train_step
from benchmarks.common.workloads import Workload, gated
from optax_offload import aot

# Tokens are below this, which every vocabulary is not.
TOKENS = 128
TOY = {"tokens": 32, "layers": 3, "width": 64, "inner": 256, "vocabulary": TOKENS}


def gated_or_toy(dry: bool, **sizes: int) -> Workload:
    """Gated layers of some sizes, or as many of toys."""
    layers = {"layers": sizes["layers"]} if "layers" in sizes else {}
    found: dict[str, Any] = {**TOY, **layers} if dry else sizes
    return gated(**found)


def first_device() -> NamedSharding:
    """On a mesh of one device: types of arrays say there what memory they are in."""
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1])
    return NamedSharding(mesh, P())


def counted_peak() -> int | None:
    """The first device's own count; None if it does not count."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def count(work: Workload) -> int:
    """The parameters of a model."""
    return sum(p.size for p in jax.tree.leaves(work.params))


def halved(work: Workload) -> Workload:
    """Parameters in bfloat16, and float32 copies of them in the state."""
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), work.params
    )
    optimizer: Any = oo.master_weights(work.optimizer)
    return dataclasses.replace(work, params=params, optimizer=optimizer)


def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Weights whose products are about as large as what they are applied to."""
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * shape[0] ** -0.5


def random_params(work: Workload, key: jax.Array) -> Any:
    """Random numbers; those of scanned layers a row at a time."""

    def leaf(path: Any, p: Any, key: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not (p.ndim and re.fullmatch(LAYERS, name)):
            return _random(key, p.shape, p.dtype)
        row = functools.partial(_random, shape=p.shape[1:], dtype=p.dtype)
        return lax.map(row, jax.random.split(key, p.shape[0]))

    structure = jax.tree.structure(work.params)
    keys = structure.unflatten(jax.random.split(key, structure.num_leaves))
    return jax.tree_util.tree_map_with_path(leaf, work.params, keys)


class Training:
    """A compiled train step of one mode on the first device, and its arrays.

    Attributes:
      compiled: The step.
      work: What is trained.
      carry: Parameters and state; None before they are made.
    """

    def __init__(self, work: Workload, mode: str | Mode):
        self.work = work
        self._mode = MODES[mode] if isinstance(mode, str) else mode
        self._here = first_device()
        params, x = jax.tree.map(self._struct, (work.params, work.x))
        self._tx, self._args = of_workload(work, params, x, self._mode)
        self._kinds = jax.tree.map(lambda s: s.sharding, self._args[:2])
        self._jitted = self._mode.jit(
            train_step(work, self._tx),
            donate_argnums=(0, 1),
            out_shardings=self._kinds,
        )
        self.compiled = self._jitted.lower(*self._args).compile()
        self.carry: Any = None
        self._x: Any = None

    def _struct(self, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._here)

    def schedule(self) -> str:
        """What is done with the step, in the library's words."""
        if self._mode.streamed is None:
            return str(self._tx.schedule(self._args[0]))
        return str(self._jitted.schedule(*self._args))

    def peak(self) -> aot.Peak:
        """What the compiled step needs."""
        return aot.peak(self.compiled)

    def make(self, params: Any = None) -> None:
        """Makes parameters, state and a batch, where each rests.

        Args:
          params: What copies are taken of; None makes random ones, row by row.
        """
        if params is None:
            make = oo.jit(self.init, out_shardings=self._kinds)
            carry = make(jax.random.key(0))
        else:
            params = jax.device_put(jax.tree.map(np.array, params), self._kinds[0])
            carry = params, self._tx.init(params)
        # What is there already is not copied.
        self.carry = jax.block_until_ready(jax.device_put(carry, self._kinds))
        x, random = self.work.x, np.random.default_rng(1)
        if jnp.issubdtype(x.dtype, jnp.integer):
            batch = random.integers(0, TOKENS, x.shape)
        else:
            batch = random.standard_normal(x.shape)
        self._x = jax.device_put(batch.astype(x.dtype), self._here)

    def init(self, key: jax.Array) -> Any:
        """Parameters and state; a function to be jitted."""
        params = random_params(self.work, key)
        if self._mode.on_host:
            params = oo.set_memory_kind(params, self._mode.on_host, "pinned_host")
        return params, self._tx.init(params)

    def run(self, steps: int) -> float:
        """The seconds of a step, of so many."""
        params, state = self.carry
        self.carry = None
        started = time.perf_counter()
        for _ in range(steps):
            params, state = self.compiled(params, state, self._x)
        jax.block_until_ready((params, state))
        seconds = (time.perf_counter() - started) / steps
        self.carry = params, state
        return seconds

    def is_finite(self) -> bool:
        """Whether all parameters are numbers."""
        # Of what is stacked, one row is enough.
        leaves = jax.tree.leaves(self.carry[0])
        parts = (np.asarray(x[:1] if x.ndim > 2 else x) for x in leaves)
        return all(np.isfinite(part).all() for part in parts)

    def free(self) -> None:
        """Gives the arrays' memory back, and the program's."""
        for x in jax.tree.leaves(self.carry):
            x.delete()
        self.carry = None

"""Training with a plain and an offloaded optimizer, side by side."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import optax_offload as oo

# Everything that is no scalar goes: the leaves of these tests are small.
EVERYTHING = oo.Rule(".*", min_bytes=8, optional=True)


def of_processes() -> dict[str, str]:
    """The variables of a program that a test starts: as `conftest.py` has it for tests.

    Such programs find what others of them have compiled. Not in the directory of the
    tests themselves: one that is killed leaves half of a file there.
    """
    directory = jax.config.values["jax_compilation_cache_dir"]
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "JAX_COMPILATION_CACHE_DIR": f"{directory}-of-processes",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def xla_flags(devices: int) -> str:
    """The flags of XLA that tests have, for a program with so many devices."""
    count = "--xla_force_host_platform_device_count="
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(
        [*(x for x in flags if not x.startswith(count)), f"{count}{devices}"]
    )


def quick_of(cases: Iterable[tuple[Any, ...]], quick: Collection[Any]) -> list[Any]:
    """Cases of a table, of which all others than the quick ones are slow."""
    return [
        pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]


def make_params(dtype: Any = jnp.float32) -> Any:
    """A stacked leaf, matrices and a vector, nested as Flax nests them."""
    shapes = {
        "embed": {"embedding": (40, 16)},
        "layers_9": {"kernel": (16, 24), "bias": (24,)},
        "layers_10": {"kernel": (3, 16, 8)},
    }
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(7), len(leaves))
    params = [
        jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, leaves, strict=True)
    ]
    return committed(jax.tree.unflatten(treedef, params))


def loss(params: Any) -> jax.Array:
    """A bowl whose bottom is away from the start; in float32, whatever the dtype."""
    terms = [
        jnp.sum(jnp.cos(p.astype(jnp.float32) * (i + 1)) ** 2)
        for i, p in enumerate(jax.tree.leaves(params))
    ]
    return sum(terms, start=jnp.float32(0))


gradient = jax.jit(jax.value_and_grad(loss))
apply_updates = jax.jit(optax.apply_updates)


def extra_args(value: Any, grad: Any) -> dict[str, Any]:
    """What optimizers may ask for beside gradients; the others ignore it."""
    return {"value": value, "grad": grad, "value_fn": loss}


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """A tree as something whose equality means the same dtypes, shapes and bits."""
    return [
        (str(x.dtype), x.shape, np.asarray(_data(x)).tobytes())
        for x in jax.tree.leaves(tree)
    ]


def assert_close(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """The numbers of two trees of one structure are near each other."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want
    )


def _data(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def committed(tree: Any) -> Any:
    """The tree, what is in device memory on the first device for good.

    As a step's results are when some of them are in host memory: JAX compiles a step
    a second time when arguments that were uncommitted come back committed.
    """
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, jax.devices()[0])
            if x.sharding.memory_kind == "device"
            else x
        ),
        tree,
    )


def on_host(tree: Any, pattern: str = ".*") -> Any:
    """A copy whose leaves of these paths rest on the host."""
    return oo.set_memory_kind(jax.tree.map(jnp.copy, tree), pattern, "pinned_host")


def mistyped(tree: Any) -> Any:
    """A copy whose leaves on the host are values of the device to JAX's types (F28).

    As a checkpoint gives them that is restored onto one device.
    """

    def made(x: Any) -> Any:
        if x.sharding.memory_kind != "pinned_host":
            return x
        (device,), value = x.devices(), np.asarray(x)
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        return jax.make_array_from_callback(x.shape, host, lambda index: value[index])

    return jax.tree.map(made, tree)


def kinds(tree: Any) -> list[str | None]:
    """The memory kind of each leaf."""
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def kinds_in(tree: Any) -> set[str | None]:
    """The memory kinds that there are in a tree."""
    return set(kinds(tree))


def mesh_of(devices: int = 4, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of one axis."""
    return jax.make_mesh((devices,), ("x",), axis_types=(axis_type,))


def run_updates(
    tx: Any, params: Any, state: Any, steps: int = 3
) -> tuple[list[Any], int]:
    """Trains, with the update in a jit of its own.

    Returns:
      (updates, state, params) after each step, and how often the update was compiled.
    """

    @jax.jit
    def update(updates: Any, state: Any, params: Any, value: Any) -> Any:
        return tx.update(updates, state, params, **extra_args(value, updates))

    tx = optax.with_extra_args_support(tx)
    history = []
    for _ in range(steps):
        value, grads = gradient(params)
        updates, state = update(grads, state, params, value)
        params = apply_updates(params, updates)
        history.append((updates, state, params))
    return history, update._cache_size()


def plain(inner: Any) -> Any:
    """The transformation as `offload` takes it: `MultiSteps` is no tuple."""
    if isinstance(inner, optax.MultiSteps):
        return inner.gradient_transformation()
    return inner

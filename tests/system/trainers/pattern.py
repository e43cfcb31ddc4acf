"""What the trainers here have in common: data, a mesh, rules, and their interface."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

RULES = r".*/(mu|nu)/.*"
# Of float32: kernels are 128 KiB, and biases, of 512 bytes, are under `min_bytes`.
IN, OUT, BATCH = 256, 128, 8


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a trainer is to be built.

    Attributes:
      offload: `oo.offload`, or what leaves an optimizer as it is.
      second_line: Whether the trainer has the lines of docs/trainers.md, beside the
        one that wraps the optimizer.
      directory: Where checkpoints go.
    """

    offload: Callable[..., Any]
    second_line: bool
    directory: pathlib.Path


class Trainer(abc.ABC):
    """A trainer in the manner of a public one.

    Attributes:
      under: The path of the state that `offload` has, in ``state()``.
    """

    under: str

    @abc.abstractmethod
    def __init__(self, setup: Setup):
        """Builds the state, and resumes from the directory if it has a checkpoint."""

    @abc.abstractmethod
    def step(self, x: jax.Array) -> jax.Array:
        """Trains a step and returns the loss."""

    @abc.abstractmethod
    def state(self) -> Any:
        """The whole state."""

    @abc.abstractmethod
    def save(self) -> None:
        """Writes a checkpoint."""


def mesh(
    name: str = "data", axis_type: jax.sharding.AxisType = jax.sharding.AxisType.Auto
) -> jax.sharding.Mesh:
    """Four devices on one axis, in Auto mode as most trainers' meshes are."""
    return jax.make_mesh((4,), (name,), axis_types=(axis_type,))


def batch(step: int) -> jax.Array:
    """The data of a step."""
    return jax.random.normal(jax.random.key(step), (BATCH, IN))


def loss_of(y: jax.Array) -> jax.Array:
    """Something to minimize."""
    return jnp.mean((y - 1.0) ** 2)

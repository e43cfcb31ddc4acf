"""The machine that a step is compiled for, and what its compiler is told of it."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import backend
from jax.sharding import Sharding

from optax_offload._ground import compat
from optax_offload._places.step_options import LatencyHiding
from optax_offload._schedule import FusedStep

# XLA's option, as `compiler_options` of `jax.jit` and `XLA_FLAGS` name it.
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
ON = {SCHEDULER: True}
# For the estimator's sake JAX 0.10's compiler turns its scheduler on again (F01).
OFF = {SCHEDULER: False, "xla_gpu_enable_analytical_sol_latency_estimator": False}
# How many copies of whole leaves may be in flight, both ways together. Of two, one that
# takes longer than the product beside it holds up the next ones (F15).
IN_FLIGHT = "xla_gpu_experimental_parallel_async_compute_limit"
MANY_IN_FLIGHT = {IN_FLIGHT: 16}
# What CUDA graphs may hold: all that they may by default, but no slices. Before JAX
# 0.12 a graph has its nodes in turn, and no copy in it overlaps anything (F79).
GRAPHS = "xla_gpu_enable_command_buffer"
NO_COPIES = {GRAPHS: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL"}
_GPUS = ("gpu", "cuda", "rocm")


class Machine(NamedTuple):
    """The devices that a program is compiled for.

    Attributes:
      platform: JAX's name of their platform.
      devices: The number of devices.
    """

    platform: str
    devices: int


_target: contextvars.ContextVar[Machine | None] = contextvars.ContextVar(
    "_target", default=None
)


@contextlib.contextmanager
def compiling_for(platform: str, devices: int) -> Iterator[None]:
    """Traces are for devices that are not attached, of a platform and so many."""
    token = _target.set(Machine(platform, devices))
    try:
        yield
    finally:
        _target.reset(token)


def target() -> Machine | None:
    """The devices that traces are for; None for those that their arguments are on."""
    return _target.get()


def may_be_a_gpu() -> bool:
    """Returns whether what is traced now can be for a GPU."""
    found = target()
    if found is not None:
        return found.platform in _GPUS
    return any(name in _GPUS for name in backend.backends())


def machine_of(tree: Any) -> Machine:
    """The machine that a call is compiled for.

    Args:
      tree: Its arguments, and the shardings that its function was jitted with.
    """
    found = target()
    if found is not None:
        return found
    config: Any = jax.config  # Its flags are no attributes to a type checker.
    default: Any = config.jax_default_device or jax.default_backend()
    machine = Machine(getattr(default, "platform", default), 1)
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        machine = machine._replace(devices=context.size)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.committed:
            continue
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", 0)
        devices = _devices_of(sharding) if isinstance(sharding, Sharding) else []
        if devices and len(devices) >= machine.devices:
            machine = Machine(devices[0].platform, len(devices))
    return machine


def _devices_of(sharding: Sharding) -> list[Any]:
    try:
        return [*sharding.device_set]
    except ValueError:  # Its mesh is abstract.
        return []


def told(asked: LatencyHiding, plan: FusedStep) -> dict[str, Any]:
    """What a GPU's compiler is told of a step.

    Args:
      asked: What was asked for.
      plan: The plan of the step.
    """
    found: dict[str, Any] = {}
    if asked == "on" or (asked == "auto" and plan.hides_in_turns):
        found |= ON
    elif asked == "off" or plan.hides_nothing:
        found |= OFF
    if plan.chain and plan.chain.moves_much:
        found |= MANY_IN_FLIGHT
    if plan.step.at_rest is not None and not compat.GRAPHS_OVERLAP:
        found |= NO_COPIES
    return found


def compiler_options(
    given: Mapping[str, Any] | None,
    asked: LatencyHiding,
    found: Mapping[str, Any],
    machine: Machine,
) -> dict[str, Any] | None:
    """The options of a compiler, or None for those that were given.

    Args:
      given: Those that the user gave, which stand.
      asked: What the user asked for.
      found: What `told` says.
      machine: The machine.
    """
    given, found = dict(given or {}), dict(found)
    if machine.platform not in _GPUS:
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    # On several GPUs it hides collectives, so that there it is a choice.
    several = machine.devices > 1 and not found.get(SCHEDULER)
    its_own = several or SCHEDULER in flags
    if SCHEDULER in given or (its_own and asked == "auto"):
        found = {k: x for k, x in found.items() if k not in OFF}
    named = [k for k in (GRAPHS, IN_FLIGHT) if k in flags]
    found = {k: x for k, x in found.items() if k not in (*given, *named)}
    return found | given if found else None

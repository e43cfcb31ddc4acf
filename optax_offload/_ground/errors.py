"""Errors and warnings of the library, in addition to Python's own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from typing import Any, Literal

import jax
import optax


class OffloadWarning(UserWarning):
    """The library could not do, or not fully do, what was asked."""


_OURS = os.path.dirname(__file__)
_INTERNAL = tuple(map(os.path.dirname, (jax.__file__, optax.__file__, _OURS)))


def warn(message: str) -> None:
    """Warns at the caller's own line that led here, past JAX's, optax's and ours."""
    frame, depth = sys._getframe(1), 2
    files = (*_INTERNAL, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(files):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, OffloadWarning, stacklevel=depth)


def is_called_by(function: Any) -> bool:
    """Returns whether a Python function is among those that led to the caller."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


class OffloadError(RuntimeError):
    """A transfer of a state stopped half way. The message says if anything is lost.

    Args:
      message: The reason why the transfer stopped, and the fix.
      tree: The whole tree as it is now.

    Attributes:
      tree: The whole tree as it is now, with the leaves that were transferred where
        they were to go, and all others where they were.
    """

    def __init__(self, message: str, tree: Any):
        """Keeps the tree beside the message."""
        super().__init__(message)
        self.tree = tree


class MemoryKindError(RuntimeError):
    """State is not in the memory that its rule asks for."""


class CodecError(RuntimeError):
    """State is not in the form that its rule names: its codec, or no codec."""


# A traceback has them as they are imported.
for _error in (OffloadWarning, OffloadError, MemoryKindError, CodecError):
    _error.__module__ = "optax_offload"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known about state that came from the wrong memory.

    Attributes:
      was_on_host: An earlier update of this optimizer took its state from the host.
      made: Where the ``init`` of this optimizer ran, if it did.
      on_mesh: Whether the state is on several devices.
      in_body: Whether it is in a loop or a branch, where only its type says where.
      mapped: Whether the update is mapped over a named axis, as by `jax.pmap`.
      of_nnx: Whether it is of Flax NNX.
    """

    was_on_host: bool = False
    made: Literal["", "eagerly", "traced"] = ""
    on_mesh: bool = False
    in_body: bool = False
    mapped: bool = False
    of_nnx: bool = False


# Known ways to undo offloading, each with its fix.
_CAUSES = {
    "restored": (
        "a checkpoint restored without memory kinds, or NumPy arrays",
        "state = optax_offload.place(state, optax_offload.eval_shape(tx.init, "
        "params)), or restore with that template; with Flax NNX "
        "optax_offload.place(optimizer, rules, under='opt_state'), or 'opt_state/1' "
        "where offload is second in a chain",
    ),
    "another": (
        "state that the init of another optimizer made",
        "make it with that of the offloaded one: state = tx.init(params)",
    ),
    "out_shardings": (
        "in_shardings or out_shardings of a jitted init or step without memory kinds, "
        "or jax.eval_shape of init, whose structs have none",
        "make them with optax_offload.state_shardings, jit with optax_offload.jit, or "
        "use optax_offload.eval_shape",
    ),
    "device_put": (
        "a device_put in the trainer",
        "give it the shardings of optax_offload.state_shardings, or bring the state "
        "back: optax_offload.place(state, rules)",
    ),
    "constraint": (
        "an eager with_sharding_constraint, as in equinox.filter_shard and in Flax NNX "
        "on a mesh in Auto mode",
        "call it within jit, where it moves nothing, or bring the state back: "
        "optax_offload.place(state, rules), or with an nnx.Optimizer "
        "optax_offload.place(optimizer, rules, under='opt_state')",
    ),
    "pmap": (
        "jax.pmap or flax.jax_utils.replicate, whose results are on the device",
        "jit a step over arrays that are sharded along a leading axis",
    ),
    "before": (
        "state that the step changes before its update",
        "change it after the update",
    ),
    "types": (
        "arrays in host memory that JAX types as on the device, as of some checkpoint "
        "libraries",
        "state = optax_offload.place(state, state) before a loop, a branch or a jit "
        "within the step",
    ),
}


def causes(evidence: Evidence) -> str:
    """The two likeliest ways in which state was moved, with fixes, and the others."""
    first: tuple[str, ...] = ("restored", "another")
    if evidence.was_on_host or (evidence.made == "traced" and evidence.on_mesh):
        first = ("out_shardings", "restored")
    elif evidence.of_nnx:
        first = ("constraint", "restored")
        if not evidence.on_mesh:
            first = first[::-1]
    elif evidence.made == "eagerly" and evidence.on_mesh:
        first = ("restored", "device_put")
    elif evidence.made:
        first = ("restored", "out_shardings")
    if evidence.mapped:
        first = ("pmap", *first)
    elif evidence.in_body:
        first = ("types", *first)
    likely = [f"- {': '.join(_CAUSES[name])}" for name in first[:2]]
    others = [what for name, (what, _) in _CAUSES.items() if name not in first[:2]]
    return (
        "Something moved it there and undid the offloading. The two likeliest causes, "
        "and their fixes:\n"
        + "\n".join(likely)
        + f"\nOther causes: {'; '.join(others)}.\n"
        'For a first step after a restore: offload(..., on_misplaced="move")'
    )


# What no compiled program can name (F31).
UNPINNED = (
    "unpinned_host is for whole states between steps: a compiled step takes and "
    "returns values in device and pinned_host. Bring them back first: tree = "
    "optax_offload.reload_states(tree), or optax_offload.set_memory_kind(tree, '.*', "
    "'pinned_host')"
)

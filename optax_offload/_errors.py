"""Errors and warnings of the library, in addition to Python's own."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any

import jax


class OffloadWarning(UserWarning):
    """The library could not do, or not fully do, what was asked."""


_INTERNAL = tuple(os.path.dirname(file) for file in (jax.__file__, __file__))


def warn(message: str) -> None:
    """Warns at the line of the caller's own that led here, past JAX's and ours."""
    frame, depth = sys._getframe(1), 2
    files = (*_INTERNAL, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(files):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, OffloadWarning, stacklevel=depth)


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


# Known ways to undo offloading, each with its fix.
CAUSES = (
    "Something moved it there and undid the offloading. Possible causes, and their "
    "fixes:\n"
    "- shardings that name no memory kind, as in_shardings or out_shardings of the "
    "jitted init or step: make them with optax_offload.state_shardings, or jit the "
    "step with optax_offload.jit\n"
    "- a device_put in the trainer: give it those shardings\n"
    "- an eager jax.lax.with_sharding_constraint or equinox.filter_shard: give it "
    "those shardings, or call it within jit, where it moves nothing\n"
    "- jax.pmap and flax.jax_utils.replicate, whose results are on the device: jit a "
    "step over arrays that are sharded along a leading axis\n"
    "- a checkpoint restored without memory kinds: restore with a template of "
    "optax_offload.eval_shape, or state = optax_offload.place(state, template)\n"
    "- a template of jax.eval_shape: use optax_offload.eval_shape\n"
    "- none of these, if its memory_kind is pinned_host: on one device, JAX types "
    "arrays of some checkpoint libraries as device values. A step takes them as "
    "arguments; for a loop, a branch or a jit within it: state = "
    "optax_offload.place(state, state)\n"
    'For a first step after such a restore: offload(..., on_misplaced="move")'
)


# What no compiled program can name (F31).
UNPINNED = (
    "unpinned_host is for whole states between steps: a compiled step takes and "
    "returns values in device and pinned_host. Bring them back first: tree = "
    "optax_offload.reload_states(tree), or optax_offload.set_memory_kind(tree, '.*', "
    "'pinned_host')"
)

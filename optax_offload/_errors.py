"""What the library raises and warns of, beside Python's own errors."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any

import jax


class OffloadWarning(UserWarning):
    """Something asked for was not, or not fully, done."""


_INTERNAL = tuple(os.path.dirname(file) for file in (jax.__file__, __file__))


def warn(message: str) -> None:
    """Warns at the line of the caller's own that led here, past JAX's and ours."""
    frame, depth = sys._getframe(1), 2
    files = (*_INTERNAL, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(files):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, OffloadWarning, stacklevel=depth)


class OffloadError(RuntimeError):
    """A transfer of a state stopped half way. Its message says what is lost, if any is.

    Args:
      message: What stopped the transfer, and what to do.
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
    """State is not where it was planned to be."""


class CodecError(RuntimeError):
    """State is not in the form that its rule names: in its codec, or in none."""


# What was seen to undo offloading, and what mends it.
CAUSES = (
    "Something moved it there, and offloading is undone. What does that, and what "
    "mends it:\n"
    "- shardings that name no memory kind, as in_shardings or out_shardings of the "
    "jitted init or step: make them with optax_offload.state_shardings, or jit the "
    "step with optax_offload.jit\n"
    "- a device_put of the trainer's own: give it those shardings\n"
    "- an eager jax.lax.with_sharding_constraint or equinox.filter_shard: give it "
    "those shardings, or call it within jit, where it moves nothing\n"
    "- jax.pmap and flax.jax_utils.replicate, whose results are on the device: jit a "
    "step over arrays that are sharded along a leading axis\n"
    "- a checkpoint restored without memory kinds: restore with a template of "
    "optax_offload.eval_shape, or state = optax_offload.place(state, template)\n"
    "- a template of jax.eval_shape: use optax_offload.eval_shape\n"
    "- nothing, where its memory_kind is pinned_host: some checkpoint libraries make "
    "such arrays on one device, and JAX types them as device values. A step that has "
    "them as arguments takes them; for a loop, a branch or a jit within it: "
    "state = optax_offload.place(state, state)\n"
    'For a first step after such a restore: offload(..., on_misplaced="move")'
)

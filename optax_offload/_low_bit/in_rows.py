"""A function of leaves in host memory, computed row by row, as new state is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_offload._places import memory
from optax_offload._places.rules import OffloadConfig, Rule
from optax_offload._program import Caller, call_update, trace

# The first of two results goes to the host: all of it, whatever its size.
_FIRST = OffloadConfig((Rule("0(/.*)?", min_bytes=0),))


def in_its_memory(fn: Callable[..., tuple[Any, Any]], x: Any, *more: Any) -> Any:
    """A leaf made of another, in the memory of that, and what is made beside it.

    Args:
      fn: Returns the new leaf, and what stays on the device.
      x: The leaf, an array or an encoded one.
      *more: Further arrays that the function takes.
    """
    if memory.is_traced((x, more)):
        return fn(x, *more)
    if any(map(_is_on_host, jax.tree.leaves(x))):
        fn = by_rows(fn, [_is_on_host(a) for a in jax.tree.leaves((x, more))])
    return jax.jit(fn)(x, *more)


def by_rows(
    fn: Callable[..., tuple[Any, Any]], on_host: Sequence[bool]
) -> Callable[..., tuple[Any, Any]]:
    """The same function, for `jax.jit`: it loads, computes and stores row by row.

    Args:
      fn: Returns the new leaf, which goes to host memory, and what does not.
      on_host: Whether each array among the arguments comes from there.
    """
    loads = {i for i, here in enumerate(on_host) if here}

    def made(*args: Any) -> tuple[tuple[()], Any]:
        return (), fn(*args)

    def streamed(*args: Any) -> tuple[Any, Any]:
        update, structure = trace(made, _FIRST, args, ())
        update = update.with_inputs_on_host(loads)
        caller = Caller(None, lambda *_: None, lambda _, args: made(*args))
        return call_update(update, args, structure, caller)[1]

    return streamed


def _is_on_host(x: Any) -> bool:
    return memory.memory_kind_of(x) == "pinned_host"

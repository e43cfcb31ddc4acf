"""Small updates, as values, of functions of gradients and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from small_jaxprs import on_device, program_of

from optax_offload._program import Input, Output, Update


def update_of(
    fn: Callable[..., Any],
    gradients: Sequence[tuple[int, ...]],
    state: Sequence[tuple[int, ...]],
    *,
    made: Sequence[int] = (),
    axis: Any = 0,
) -> Update:
    """An update that returns an update for each gradient, and all new state.

    Args:
      fn: A function of gradients and of state; returns updates, then new state.
      gradients: The shapes of the gradients. Their paths are `g0`, `g1` and so on.
      state: The shapes of the state, all on the host. Their paths are `s0` and so on.
      made: The state that replaces nothing, as when it is new; counted from the first.
      axis: The axis along which state may be sliced.
    """
    count = len(gradients)
    program = program_of(fn, *(on_device(*s) for s in (*gradients, *state)))
    outputs = [
        Output(f"g{i}", "device", i, is_update=True) for i in range(len(gradients))
    ]
    outputs += [
        Output(
            f"s{n}",
            "pinned_host",
            None if n in made else count + n,
            is_update=False,
            made_along=0 if n in made else None,
        )
        for n in range(len(program.outvars) - count)
    ]
    inputs = [Input()] * count + [Input(True, axis)] * len(state)
    return Update(program, tuple(inputs), tuple(outputs))

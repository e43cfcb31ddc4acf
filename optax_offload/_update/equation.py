"""A scheduled update as one equation, which also says what it is an update of.

So whoever reads a step's jaxpr before it is compiled finds its updates there.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex
from jax.interpreters import mlir

from optax_offload import _memory, _trees
from optax_offload._errors import warn
from optax_offload._update.arguments import Cell, check_pairs
from optax_offload._update.schedule import OverWindow, Schedule
from optax_offload._update.stream import run
from optax_offload._update.update import Input, Update


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """What an equation carries out.

    Attributes:
      update: The update.
      window_bytes: The window that was asked for.
      cells: For inputs, what their shardings are noted in, by position.
    """

    update: Update
    window_bytes: int | None
    cells: Mapping[int, Cell]

    def __repr__(self) -> str:
        return f"<{len(self.update.outputs)} outputs>"


def closed(update: Update, args: Sequence[Any]) -> tuple[Update, list[Any]]:
    """An update that closes over no traced value, and its arguments."""
    constants = update.program.constants
    traced = {v: x for v, x in constants.items() if isinstance(x, jax.core.Tracer)}
    program = dataclasses.replace(
        update.program,
        invars=[*update.program.invars, *traced],
        constants={v: x for v, x in constants.items() if v not in traced},
    )
    inputs = (*update.inputs, *(Input(_memory.on_host(x)) for x in traced.values()))
    update = dataclasses.replace(update, program=program, inputs=inputs)
    return update, [*args, *traced.values()]


def defer(what: Deferred, schedule: Schedule, args: Sequence[Any]) -> list[Any]:
    """The values of an update's outputs, each in its memory kind, as one equation.

    When it is lowered, it warns of what is on the device over the window: not before,
    since who moves its parts elsewhere (`fuse_backward`) may need less.

    Args:
      what: The update, which closes over no traced value.
      schedule: How it is carried out.
      args: The values of its inputs.
    """
    # JAX looks through the bodies of equations to learn whether anything is moved.
    body = jax.make_jaxpr(lambda *args: run(what.update, schedule, args, what.cells))
    over = tuple(_over_window(what, schedule))
    return _update.bind(*args, jaxpr=body(*args), what=what, over=over)


def _over_window(what: Deferred, schedule: Schedule) -> Iterator[str]:
    for straight in schedule.straights():
        for over in straight.over_window(what.window_bytes):
            paths = [what.update.paths[k] for k in over.outputs]
            yield (
                f"{over.nbytes} bytes of state are on the device at once, over the "
                f"window of {straight.window.nbytes}: {_trees.listed(paths)}: "
                f"{over.because}{_instead(what.update, over)}"
            )


def _instead(update: Update, over: OverWindow) -> str:
    """What to write where some leaves join the state of all, as a norm of them does."""
    if not over.joined:
        return ""
    found = (
        ". Instead, take norms of each step's own gradients, before what keeps state: "
        "optax.chain(optax.clip_by_global_norm(...), offload(...))"
    )
    paths = [o.path for o in update.outputs if o.alias in over.joined]
    prefix = posixpath.commonpath(paths) if paths else ""
    if prefix:
        pattern = prefix if len(paths) == 1 else f"{prefix}/.*"
        found += (
            f". Or leave on the device what it is of: Rule({pattern!r}, 'device') as "
            "the first rule"
        )
    return found


def deferred(e: jex.JaxprEqn) -> Deferred | None:
    """What an equation carries out, if it is an update."""
    return e.params["what"] if e.primitive is _update else None


def _run(*args: Any, jaxpr: jex.ClosedJaxpr, **_: Any) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def _types(*_: Any, jaxpr: jex.ClosedJaxpr, **__: Any) -> Any:
    return jaxpr.out_avals, jaxpr.jaxpr.effects


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
    check_pairs(ctx)
    for message in params["over"]:
        warn(message)
    return mlir.lower_fun(_run, multiple_results=True)(ctx, *args, **params)


_update = jex.Primitive("offloaded_update")
_update.multiple_results = True
_update.def_impl(_run)
_update.def_effectful_abstract_eval(_types)
# Not as a function of its own, in which nothing would be an argument of the program.
mlir.register_lowering(_update, _lower, cacheable=False)

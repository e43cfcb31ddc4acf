"""New parameters that an offloaded update makes itself, in place of the old ones.

The update of a parameter that is in no scan, such as an embedding, would be on the
device whole before it is added to the parameter: in float32, twice the size of a
parameter in bfloat16. So the part of an update that runs outside of scans makes the
new parameter too, slice by slice, in the place of the old one; on the host, if that
rests there. Where an update takes the place of its gradient nothing would be saved, and
on an H100 such a loop takes longer: there the step adds it as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    InlinedUpdate,
    Output,
    Step,
    Update,
    as_zero,
    is_transfer,
    shape,
    variables,
)
from optax_offload._rows import is_arithmetic
from optax_offload._schedule.grown import Grown


class Replacement(NamedTuple):
    """A result that replaces an argument of a step, given an update.

    Attributes:
      inlined: The offloaded update.
      output: The position of the output that it takes.
      positions: The equations that lead to it, as positions.
      takes: The variables of the step that these take besides.
      argument: The argument that it replaces, one of these.
      result: The variable that it is.
    """

    inlined: InlinedUpdate
    output: int
    positions: tuple[int, ...]
    takes: frozenset[jex.Var]
    argument: jex.Var
    result: jex.Var


def replacements(step: Step, *, of_gradients: bool = True) -> Iterator[Replacement]:
    """Finds results made elementwise of updates and arguments, which they replace.

    Args:
      step: The step.
      of_gradients: Whether updates can take the place of their gradients.
    """
    program = step.program
    users: dict[jex.Var, list[int]] = {}
    for i in sorted(step.live):
        for v in dict.fromkeys(variables(program.equations[i].invars)):
            users.setdefault(v, []).append(i)
    for inlined in step.inlined_updates:
        for k, a in enumerate(inlined.results):
            output = inlined.what.update.outputs[k]
            if not isinstance(a, jex.Var) or not output.is_update or output.stored:
                continue
            if shape(a) and program.producers.get(a, -1) in inlined.positions:
                beside = not of_gradients or inlined.what.update.in_place(k) is None
                found = _replacement(step, users, inlined, k, beside)
                if found is not None:
                    yield found


def _replacement(
    step: Step,
    users: Mapping[jex.Var, Sequence[int]],
    inlined: InlinedUpdate,
    k: int,
    beside: bool,
) -> Replacement | None:
    """The last that follows from an output, which nothing else takes.

    Where the output has the place of its gradient, and not one beside that, only what
    rests on the host is replaced.
    """
    program = step.program
    (v,) = variables([inlined.results[k]])
    results = set(variables(program.outvars))
    positions: set[int] = set()
    takes: set[jex.Var] = set()
    found: Replacement | None = None
    while v not in results:
        outside = [i for i in users.get(v, ()) if i not in inlined.positions]
        if len(outside) != 1 or not _of_each_number(step, outside[0], shape(v)):
            break
        (at,) = outside
        e = program.equations[at]
        others = [x for x in variables(e.invars) if x is not v]
        made_by = _made_by(step, inlined.positions[0], others, shape(v))
        if made_by is None:
            break
        positions |= {at, *made_by[0]}
        takes |= made_by[1]
        (v,) = e.outvars
        argument = next((x for x in takes if _replaces(step, v, x)), None)
        if argument is not None and (beside or memory.on_host(argument.aval)):
            found = Replacement(
                inlined, k, tuple(sorted(positions)), frozenset(takes), argument, v
            )
    return found


def _replaces(step: Step, v: jex.Var, x: jex.Var) -> bool:
    """Returns whether a variable can take the place of an argument."""
    new, old = (y.aval.update(weak_type=False) for y in (v, x))
    return x in step.program.invars and new == old


def _of_each_number(step: Step, i: int, sizes: tuple[int, ...]) -> bool:
    """Returns whether an equation computes each number from one, or moves it."""
    e = step.program.equations[i]
    return (
        i not in step.inlined_at
        and len(e.outvars) == 1
        and shape(e.outvars[0]) == sizes
        and all(shape(a) in ((), sizes) for a in e.invars)
        and (is_transfer(e) or is_arithmetic(e))
    )


def _made_by(
    step: Step, before: int, wanted: Sequence[jex.Var], sizes: tuple[int, ...]
) -> tuple[set[int], set[jex.Var]] | None:
    """The equations that make variables of arguments, and what these take.

    None if they need more than arithmetic. Scalars are taken as they are, where they
    are known before a position.
    """
    program = step.program
    positions: set[int] = set()
    takes: set[jex.Var] = set()
    waiting = list(wanted)
    while waiting:
        v = waiting.pop()
        i = program.producers.get(v)
        if i is None or (not shape(v) and i < before):
            takes.add(v)
        elif _of_each_number(step, i, sizes):
            positions.add(i)
            waiting += variables(program.equations[i].invars)
        else:
            return None
    return positions, takes


def with_replacements(
    step: Step,
    update: Update,
    operands: Sequence[Atom],
    made: Sequence[Replacement],
) -> tuple[Update, list[Atom]]:
    """An update whose last outputs replace arguments of the step.

    Args:
      step: The step.
      update: The update. Its last outputs are those that the replacements take.
      operands: The operands that the step gives it.
      made: The replacements.

    Returns:
      The update, and what the step gives it.
    """
    program = update.program
    grown = Grown(update, operands)
    first = len(program.outvars) - len(made)
    dropped = as_zero(update)
    for k, each in enumerate(made, first):
        (a,) = variables([program.outvars[k]])
        if a in dropped:
            predicate, value = dropped[a]
            a = grown.zero_if(predicate, value, a)
        names = dict.fromkeys(variables([each.inlined.results[each.output]]), a)
        equations = (step.program.equations[i] for i in each.positions)
        grown.follow(equations, names, each.takes)
        (grown.outvars[k],) = grown.read_all([each.result])
        grown.outputs[k] = Output(
            grown.outputs[k].path,
            memory.kind_of_type(each.result.aval),
            grown.input(each.argument),
            is_update=True,
        )
    return grown.update(), grown.operands

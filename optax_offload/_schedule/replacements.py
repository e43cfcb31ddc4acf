"""New parameters that an offloaded update makes itself, in place of the old ones.

The update of a parameter that is in no scan, such as an embedding, would be on the
device whole before it is added to the parameter: in float32, twice the size of a
parameter in bfloat16. So the part of an update that runs outside of scans makes the
new parameter too, slice by slice, in the place of the old one; on the host, if that
rests there. Where an update takes the place of its gradient nothing would be saved, and
on an H100 such a loop takes longer: there the step adds it as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    InlinedUpdate,
    MadeOf,
    Output,
    Step,
    Update,
    as_zero,
    shape,
    variables,
)
from optax_offload._rows import is_elementwise
from optax_offload._schedule.chosen_state import is_reduced
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
      kept: What these equations make that the step takes too, to reduce it.
    """

    inlined: InlinedUpdate
    output: int
    positions: tuple[int, ...]
    takes: tuple[jex.Var, ...]
    argument: jex.Var
    result: jex.Var
    kept: tuple[jex.Var, ...] = ()


def replacements(step: Step, *, of_gradients: bool = True) -> Iterator[Replacement]:
    """Finds results made elementwise of updates and arguments, which they replace.

    Args:
      step: The step.
      of_gradients: Whether updates can take the place of their gradients.
    """
    program = step.program
    for inlined in step.inlined_updates:
        for k, a in enumerate(inlined.results):
            output = inlined.what.update.outputs[k]
            if not isinstance(a, jex.Var) or not output.is_update or output.stored:
                continue
            if shape(a) and program.producers.get(a, -1) in inlined.positions:
                beside = not of_gradients or inlined.what.update.in_place(k) is None
                following = _Following(step, inlined, k, beside=beside)
                yield from following.replacements()


class _Following:
    """What follows, number by number, from an output of an update."""

    def __init__(
        self,
        step: Step,
        inlined: InlinedUpdate,
        output: int,
        *,
        beside: bool,
    ):
        """An output that something follows from.

        Args:
          step: The step.
          inlined: The update.
          output: The position of the output.
          beside: Whether its place is beside that of its gradient. Otherwise only what
            rests on the host is replaced.
        """
        self._step = step
        self._inlined, self._output, self._beside = inlined, output, beside

    def replacements(self) -> Sequence[Replacement]:
        """The last results that follow from it, which nothing else takes.

        From new parameters an average of them may follow. Their norm is no such taker.
        """
        (v,) = variables([self._inlined.results[self._output]])
        return self._after(v, frozenset(), ()) or ()

    def _after(
        self, v: jex.Var, positions: frozenset[int], takes: Sequence[jex.Var]
    ) -> Sequence[Replacement] | None:
        """What follows from a variable, or itself; None where it is needed elsewhere.

        Args:
          v: The variable.
          positions: The equations that lead to it.
          takes: What these take besides, the last of it first.
        """
        own = self._replacement(v, positions, takes)
        step = self._step
        users = step.live.intersection(step.program.users.get(v, ()))
        outside = sorted(users.difference(self._inlined.positions))
        found: list[Replacement] = []
        reduces = False
        for at in outside:
            after = self._through(at, v, positions, takes)
            if after:
                found += after
            elif self._is_reduced(at):
                reduces = True
            else:
                return own
        is_result = v in self._step.program.results
        if is_result or not found:
            found += own or ()
        arguments = [x.argument for x in found]
        if len({*arguments}) < len(arguments):  # No two take the place of one.
            return own
        made_here = not positions or any(x.result is v for x in found)
        if reduces and found and not made_here:
            found[0] = found[0]._replace(kept=(*found[0].kept, v))
        return found if own or not is_result else None

    def _is_reduced(self, at: int) -> bool:
        step = self._step
        return at not in step.inlined_at and is_reduced(step.program, at)

    def _through(
        self,
        at: int,
        v: jex.Var,
        positions: frozenset[int],
        takes: Sequence[jex.Var],
    ) -> Sequence[Replacement] | None:
        """What follows from an equation that takes a variable."""
        step = self._step
        if not _of_each_number(step, at, shape(v)):
            return None
        e = step.program.equations[at]
        others = [x for x in variables(e.invars) if x is not v]
        of = _made_of(step, self._inlined.positions[0], others, shape(v))
        if of is None:
            return None
        (made,) = e.outvars
        more = [x for x in of.takes if x not in takes]
        return self._after(made, positions | {at, *of.positions}, [*more, *takes])

    def _replacement(
        self, v: jex.Var, positions: frozenset[int], takes: Sequence[jex.Var]
    ) -> list[Replacement] | None:
        """A variable, if it takes the place of an argument that leads to it."""
        alike = [x for x in takes if _replaces(self._step, v, x)]
        known = self._step.replaced.get(v)
        argument = known if known in alike else next(iter(alike), None)
        if argument is None:
            return None
        if not (self._beside or memory.on_host(argument.aval)):
            return None
        made = (tuple(sorted(positions)), tuple(takes), argument, v)
        return [Replacement(self._inlined, self._output, *made)]


def _replaces(step: Step, v: jex.Var, x: jex.Var) -> bool:
    """Returns whether a variable can take the place of an argument."""
    new, old = (y.aval.update(weak_type=False) for y in (v, x))
    return x in step.program.invars and new == old


def _of_each_number(step: Step, i: int, sizes: tuple[int, ...]) -> bool:
    """Returns whether an equation computes each number from one, or moves it."""
    e = step.program.equations[i]
    return (
        i not in step.inlined_at and is_elementwise(e) and shape(e.outvars[0]) == sizes
    )


def _made_of(
    step: Step, before: int, wanted: Sequence[jex.Var], sizes: tuple[int, ...]
) -> MadeOf | None:
    """The equations that make variables of arguments, and what these take.

    None if they need more than arithmetic. Scalars are taken as they are, where they
    are known before a position.
    """
    producers = step.program.producers

    def known(v: jex.Var) -> bool:
        return v not in producers or (not shape(v) and producers[v] < before)

    made = step.program.made_of(
        wanted,
        lambda _, v: not known(v) and _of_each_number(step, producers[v], sizes),
    )
    return made if all(map(known, made.takes)) else None


def with_replacements(
    step: Step,
    update: Update,
    operands: Sequence[Atom],
    made: Sequence[Replacement],
) -> tuple[Update, list[Atom]]:
    """An update whose last outputs replace arguments of the step, or are kept.

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
    kept: list[tuple[Atom, str]] = []
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
        kept += [(a, grown.outputs[k].path) for a in grown.read_all(each.kept)]
        grown.outputs[k] = Output(
            grown.outputs[k].path,
            memory.kind_of_type(each.result.aval),
            grown.input(each.argument),
            is_update=True,
        )
    for a, path in kept:
        grown.outvars.append(a)
        grown.outputs.append(Output(path, "device", None, is_update=True))
    return grown.update(), grown.operands

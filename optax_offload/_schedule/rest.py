"""The part of a step that is evaluated outside of the scans that have updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import Atom, InlinedUpdate, Step, Update, variables
from optax_offload._schedule.fused import FusedScan
from optax_offload._schedule.late import NOTHING, Reduced, with_scaled
from optax_offload._schedule.replacements import (
    Replacement,
    replacements,
    with_replacements,
)
from optax_offload._schedule.updates.update import schedule
from optax_offload._schedule.updates.window import MOST_WINDOW_BYTES


class RemainingUpdate(NamedTuple):
    """The part of an update that is left.

    Attributes:
      inlined: The whole of it.
      results: The variables of the step that its outputs are.
      update: The update for these.
      operands: The operands that the step gives it.
      at_once: Whether all that it takes is there before it.
    """

    inlined: InlinedUpdate
    results: tuple[jex.Var, ...]
    update: Update
    operands: tuple[Atom, ...]
    at_once: bool = False


class Outer(NamedTuple):
    """An equation that is evaluated, or the part of an update that remains.

    Attributes:
      position: The position of the equation, or of the update's last.
      reads: The variables that it takes; see `Step.reads`.
      defines: Those that it makes; see `Step.defines`.
      left: The part of the update that remains; None for an equation.
      in_turns: Whether it is a scan with turns of its own, as they are planned.
    """

    position: int
    reads: tuple[jex.Var, ...]
    defines: tuple[jex.Var, ...]
    left: RemainingUpdate | None = None
    in_turns: bool = False

    @property
    def at_rest(self) -> bool:
        """Whether it takes or leaves anything that rests on the host."""
        return any(memory.on_host(v.aval) for v in (*self.reads, *self.defines))

    @classmethod
    def equation(cls, step: Step, i: int) -> Outer:
        """An equation of a step."""
        return cls(i, tuple(step.reads(i)), tuple(step.defines(i)))

    @classmethod
    def update(cls, position: int, left: RemainingUpdate) -> Outer:
        """What is left of the update whose last equation has a position."""
        reads = dict.fromkeys(variables(left.operands))
        return cls(position, tuple(reads), left.results, left)


def rest(
    step: Step,
    scans: Sequence[FusedScan],
    reduced: Reduced | None = None,
    wanted: Collection[jex.Var] = (),
) -> list[Outer]:
    """The equations and updates outside of scans, and the scans, in order.

    Equations that only the updates in the scans need are left out. Those with effects
    never are: if an update has some, they and all that they take are evaluated in their
    place in the step, and not with the part of the update that remains.

    Args:
      step: The step.
      scans: The scans that have updates.
      reduced: What is reduced over gradients that may wait on the host. Updates take
        that, and can replace no gradient.
      wanted: What is evaluated too, as updates in the scans take it.
    """
    made = list(replacements(step, of_gradients=reduced is None))
    reduced = reduced or NOTHING
    found = _rest(step, scans, made, reduced, wanted)
    whole = {v for node in found if node.left for v in _made_whole(step, node.left)}
    inside = [x for x in made if x.result not in whole]
    return _rest(step, scans, inside, reduced, wanted) if whole else found


def _rest(
    step: Step,
    scans: Sequence[FusedScan],
    inside: Iterable[Replacement],
    reduced: Reduced,
    wanted: Collection[jex.Var],
) -> list[Outer]:
    """Returns the rest, with these replacements made inside of updates."""
    program = step.program
    at = {each.scan.position for each in scans}
    fused = [f for each in scans for f in each.fused]
    results = {v for f in fused for v in f.component.results}
    sums = {s.position for f in fused for s in f.component.sums}
    beforehand = (*sums, *reduced.sums)
    known = {v for i in beforehand for v in program.equations[i].outvars}
    replacing = {x.result: x for x in inside}
    # By the position of the last equation of the update that makes them.
    here: dict[int, list[Replacement]] = {}
    kept: set[jex.Var] = set()
    needed = {*wanted, *variables(program.outvars)} - results
    # What is needed of an update beside what is left of it.
    beside: set[jex.Var] = set()
    found: list[Outer] = []
    for i in reversed(range(len(program.equations))):
        e = program.equations[i]
        inlined = step.inlined_at.get(i)
        if inlined is not None and i == inlined.positions[-1]:
            node = _left(step, inlined, needed, known, here.get(i, ()))
            if node.left and reduced.scaled:
                node = _with_scaled(step, node, node.left, reduced)
            found += [node] if node.left else []
            needed.update(node.reads)
        if i in sums:
            continue
        made = next((replacing[v] for v in e.outvars if v in replacing), None)
        if made is not None and made.result in needed:
            here.setdefault(made.inlined.positions[-1], []).append(made)
            kept.update(made.kept)
            continue
        if not kept.isdisjoint(e.outvars):
            continue
        takers = needed if inlined is None or i in reduced.sums else beside
        if i in at or step.tokens(i) or not takers.isdisjoint(e.outvars):
            found.append(Outer.equation(step, i))
            needed.update(variables(e.invars))
            if inlined is not None:
                beside.update(variables(e.invars))
    return found[::-1]


def _left(
    step: Step,
    inlined: InlinedUpdate,
    needed: Collection[jex.Var],
    known: Collection[jex.Var],
    made: Sequence[Replacement],
) -> Outer:
    """Returns the part of an update that is left, and makes what replaces arguments."""
    producers = step.program.producers
    found = {
        k: a
        for k, a in enumerate(inlined.results)
        if isinstance(a, jex.Var)
        and a in needed
        and producers.get(a, -1) in inlined.positions
    }
    if not (found or made):
        return Outer(inlined.positions[-1], (), ())
    wanted = [*found, *(x.output for x in made)]
    update, operands = inlined.left(wanted, known)
    if made:
        update, operands = with_replacements(step, update, operands, made)
    results = (
        *found.values(),
        *(x.result for x in made),
        *(v for x in made for v in x.kept),
    )
    left = RemainingUpdate(inlined, results, update, tuple(operands))
    return Outer.update(inlined.positions[-1], left)


def _with_scaled(
    step: Step, node: Outer, left: RemainingUpdate, reduced: Reduced
) -> Outer:
    """What is left of an update, that makes what it takes of gradients as they are."""
    update, operands = with_scaled(step, left.update, left.operands, reduced.scaled)
    left = left._replace(update=update, operands=tuple(operands))
    return Outer.update(node.position, left)


def _made_whole(step: Step, left: RemainingUpdate) -> Iterator[jex.Var]:
    """The replacements that would be loaded with state that is on the device whole."""
    arguments = {v for v in step.program.invars if memory.on_host(v.aval)}
    made = {
        k: left.results[k]
        for k, output in enumerate(left.update.outputs)
        if output.is_update
        and output.alias is not None
        and left.operands[output.alias] in arguments
    }
    if not made:
        return
    asked = left.inlined.what.caller.window_bytes
    for update, straight in schedule(left.update, asked).updates(left.update):
        for group in straight.whole:
            if group.nbytes > (asked or MOST_WINDOW_BYTES):
                for k in group.outputs:
                    if update.outputs[k].is_update and k in made:
                        yield made[k]

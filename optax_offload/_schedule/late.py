"""Gradients of layers that no scan runs, where their update needs all of them first.

What is reduced over them, as for a clip's norm, is reduced where they are made. They
rest on the host then, and the update itself makes of them what the norm scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    Builder,
    Input,
    MadeOf,
    Output,
    Program,
    Step,
    Update,
    dependents,
    facts,
    is_load,
    shape,
    variables,
)
from optax_offload._rows import is_arithmetic, is_elementwise, makes_number


class Reduced(NamedTuple):
    """What is reduced over gradients, and what is made of that outside of updates.

    Attributes:
      sums: The equations that reduce gradients to numbers, as positions.
      early: These, with those that lead to them, and what follows from them alone; and
        those that add, scale or cast gradients, or reduce them with what rests. They
        are evaluated as soon as they can be.
      scaled: The equations that make arrays of these numbers and of gradients, as
        positions, by what they make.
    """

    sums: frozenset[int]
    early: frozenset[int]
    scaled: Mapping[jex.Var, int]


NOTHING = Reduced(frozenset(), frozenset(), {})


def are_late(step: Step, taken: Iterable[Atom], reduced: Reduced | None) -> bool:
    """Returns whether updates take what is reduced over gradients of others.

    Those that do not begin when their own gradient is complete, and free it, in turns
    and without.

    Args:
      step: The step.
      taken: What updates take.
      reduced: What is reduced over gradients.
    """
    equations = step.program.equations
    sums = {v for i in (reduced or NOTHING).sums for v in equations[i].outvars}
    return not dependents(step.program, sums).isdisjoint(variables(taken))


def reduced(step: Step) -> Reduced:
    """Finds what is reduced over nothing but gradients, and what takes that.

    A norm of what a norm has scaled is not among it, nor is one that state or
    parameters at rest are a part of: the update takes these itself.
    """
    program = step.program
    gradients = _gradients(step)
    numbers: set[jex.Var] = set()
    sums: set[int] = set()
    leading: set[int] = set()
    following: set[int] = set()
    scaled: dict[jex.Var, int] = {}
    for i in sorted(step.live):
        e = program.equations[i]
        taken = variables(e.invars)
        arrays = any(map(shape, (*taken, *e.outvars)))
        late = not numbers.isdisjoint(taken) or not scaled.keys().isdisjoint(taken)
        if late and not arrays:
            numbers.update(e.outvars)
            following.add(i)
        elif late and i not in step.inlined_at and is_elementwise(e):
            scaled |= dict.fromkeys(e.outvars, i)
        elif not late and makes_number(e):
            before = _before(program, taken, gradients)
            others = {v for v in before.takes if not _is_known(v, numbers)} - gradients
            if not others:
                sums.add(i)
                leading.update(before.positions)
                numbers.update(e.outvars)
            elif others.isdisjoint(program.producers) and others < {*before.takes}:
                leading.update((*before.positions, i))
        elif not late and is_elementwise(e) and gradients.issuperset(e.outvars):
            leading.add(i)
    early = sums | leading | following
    early |= _numbers_for(step, early)
    return Reduced(frozenset(sums), frozenset(early), scaled)


def _numbers_for(step: Step, positions: set[int]) -> set[int]:
    """The equations that make of numbers what others, and updates, take."""
    equations, found = step.program.equations, set[int]()
    wanted = {v for i in positions for v in variables(equations[i].invars)}
    wanted.update(v for x in step.inlined_updates for v in variables(x.operands))
    for i in sorted(step.live, reverse=True):
        e = equations[i]
        numbers = not any(map(shape, (*variables(e.invars), *e.outvars)))
        if numbers and not (compat.has_effects(e) or wanted.isdisjoint(e.outvars)):
            found.add(i)
            wanted.update(variables(e.invars))
    return found


def _is_known(v: jex.Var, numbers: set[jex.Var]) -> bool:
    """Returns whether a variable is a number that no gradients are reduced to."""
    return not shape(v) and v not in numbers


def _gradients(step: Step) -> set[jex.Var]:
    """The arrays that updates take, and those that they are elementwise made of."""
    program, found = step.program, set[jex.Var]()
    waiting = [v for x in step.inlined_updates for v in variables(x.operands)]
    while waiting:
        v = waiting.pop()
        i = program.producers.get(v)
        if v in found or i is None or not shape(v) or memory.on_host(v.aval):
            continue
        found.add(v)
        if is_elementwise(program.equations[i]):
            waiting += variables(program.equations[i].invars)
    return found


def _before(
    program: Program, taken: Sequence[jex.Var], gradients: set[jex.Var]
) -> MadeOf:
    """What makes variables by arithmetic, as far back as gradients."""
    return program.made_of(
        taken,
        lambda e, v: (
            v not in gradients
            and bool(shape(v))
            and (is_arithmetic(e) or facts(e).layout)
        ),
    )


def with_scaled(
    step: Step, update: Update, operands: Sequence[Atom], scaled: Mapping[jex.Var, int]
) -> tuple[Update, list[Atom]]:
    """An update that makes what it takes of gradients, where numbers have scaled them.

    Args:
      step: The step.
      update: The update.
      operands: The operands that the step gives it.
      scaled: See `Reduced`.

    Returns:
      The update, and what the step gives it.
    """
    wanted = [a for a in operands if isinstance(a, jex.Var) and a in scaled]
    if not wanted:
        return update, list(operands)
    positions, named = _made_by(step.program, wanted, scaled)
    takes = [*dict.fromkeys(named.values())]
    old = update.program
    kept = [i for i, a in enumerate(operands) if a not in wanted]
    given: dict[Atom, int] = {}
    for at, i in enumerate(kept):
        given.setdefault(operands[i], at)
    new = [v for v in takes if v not in given]
    inner = [jex.Var(memory.device_type(v.aval)) for v in new]
    invars = [*(old.invars[i] for i in kept), *inner]
    given |= {v: len(kept) + n for n, v in enumerate(new)}
    builder = Builder(old.constants)
    builder.rename(named, [invars[given[v]] for v in named.values()])
    for i in positions:
        e = step.program.equations[i]
        builder.add(e, [jex.Var(v.aval) for v in e.outvars])
    gone = [i for i, a in enumerate(operands) if a in wanted]
    made = builder.read_all(variables(operands[i] for i in gone))
    builder.rename([old.invars[i] for i in gone], made)
    for e in old.equations:
        builder.add(e)
    program = dataclasses.replace(builder.program(old), invars=invars)
    moved: dict[int | None, int] = {i: at for at, i in enumerate(kept)}
    for i in gone:  # What an update replaces is what its gradient was made of.
        like = next((v for v in takes if v.aval == operands[i].aval), None)
        if like is not None:
            moved[i] = given[like]
    outputs = tuple(
        dataclasses.replace(x, alias=moved.get(x.alias), like=moved.get(x.like))
        for x in update.outputs
    )
    inputs = (
        *(update.inputs[i] for i in kept),
        *(Input(memory.on_host(v.aval)) for v in new),
    )
    return Update(program, inputs, outputs), [*(operands[i] for i in kept), *new]


def _made_by(
    program: Program, wanted: Iterable[jex.Var], scaled: Mapping[jex.Var, int]
) -> tuple[list[int], dict[jex.Var, jex.Var]]:
    """The equations that make variables of numbers, and what these take.

    What is loaded for them is where it rests, by the variable that it is taken as.
    """
    positions: set[int] = set()
    takes: dict[jex.Var, jex.Var] = {}
    waiting = list(wanted)
    while waiting:
        v = waiting.pop()
        i = scaled.get(v, program.producers.get(v, -1))
        e = program.equations[i] if i >= 0 else None
        if e is not None and is_load(e):
            (takes[v],) = variables(e.invars)
        elif e is not None and (v in scaled or _of_loads(program, v)):
            positions.add(i)
            waiting += variables(e.invars)
        else:
            takes[v] = v
    return sorted(positions), takes


def _of_loads(program: Program, v: jex.Var) -> bool:
    """Returns whether a variable is arithmetic of nothing but what is loaded."""
    if v not in program.producers:
        return False
    e = program.equations[program.producers[v]]
    arrays = [x for x in variables(e.invars) if shape(x)]
    if is_load(e) or not (arrays and is_elementwise(e)):
        return is_load(e)
    return all(_of_loads(program, x) for x in arrays)


def stored(of: Update, v: jex.Var, path: str) -> Update:
    """An update that stores a gradient, which waits on the host.

    Args:
      of: The update that takes it.
      v: The gradient.
      path: The path of the leaf that is updated.
    """
    inner = jex.Var(memory.device_type(v.aval))
    output = Output(path, "pinned_host", None, is_update=False, like=0)
    program = Program([], {}, [inner], [inner], of.program.debug_info)
    return Update(program, (Input(),), (output,))

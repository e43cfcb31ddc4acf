"""A train step as one value: its equations, those of its updates among them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.ref
import numpy as np
from jax import lax
from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program import remats
from optax_offload._program.accounts import AtRest
from optax_offload._program.at_rest import makes_rows, resting
from optax_offload._program.bodies import entered
from optax_offload._program.branches import as_zero
from optax_offload._program.build import Builder, flatten
from optax_offload._program.call import Call, called
from optax_offload._program.conds import split
from optax_offload._program.graph import (
    Atom,
    Program,
    passed_on,
    variables,
    within,
)
from optax_offload._program.loaded import Loaded
from optax_offload._program.merged import merged
from optax_offload._program.primitives import (
    handed_on,
    singly,
)
from optax_offload._program.replaced import returning
from optax_offload._program.resting_scans import with_resting_scans
from optax_offload._program.update import Update


@dataclasses.dataclass(frozen=True)
class InlinedUpdate:
    """An offloaded update in a step.

    Attributes:
      what: The update.
      operands: The operands that the step gives it.
      results: The results that the step takes from it.
      positions: The positions of its equations.
      names: The names that the step has for the variables of the update.
    """

    what: Call
    operands: tuple[Atom, ...]
    results: tuple[Atom, ...]
    positions: range
    names: Mapping[jex.Var, Atom]

    def left(
        self, wanted: Sequence[int], known: Collection[jex.Var]
    ) -> tuple[Update, list[Atom]]:
        """The update for some of its outputs only, without what has effects.

        Args:
          wanted: The outputs, as positions.
          known: Variables of the step that are computed elsewhere, besides the results
            of what has effects.

        Returns:
          The update, and what the step gives it.
        """
        names = self.names.items()
        done = {
            v
            for e in self.what.update.program.equations
            if compat.has_effects(e)
            for v in e.outvars
        }
        inner = [
            v for v, a in names if v in done or (isinstance(a, jex.Var) and a in known)
        ]
        update, kept = self.what.update.restricted(wanted, inner)
        operands = [self.operands[i] for i in kept]
        return update, [*operands, *(self.names[v] for v in inner)]


class Origin(NamedTuple):
    """A result of an offloaded update.

    Attributes:
      inlined: The update.
      output: The position of it among the outputs.
    """

    inlined: InlinedUpdate
    output: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step.

    Attributes:
      program: All equations. A transfer to or from the host is an equation too.
      inlined_updates: The offloaded updates whose equations are among them.
      jaxpr: The step as it was traced, of the values of its refs.
      refs: The refs that it closes over. Their values are its last arguments, and the
        new values of all refs are its last results.
      at_rest: The values that rest on the host, if the step was traced as if all were
        on the device. Then the types in `jaxpr` say where values rest.
    """

    program: Program
    inlined_updates: tuple[InlinedUpdate, ...]
    jaxpr: jex.Jaxpr
    refs: tuple[Any, ...]
    at_rest: AtRest | None = None

    def with_checkpoints_apart(self) -> Step:
        """The step with the equations of each `jax.checkpoint` among its own."""
        if not any(map(remats.is_checkpoint, self.program.equations)):
            return self
        consts = [self.program.constants[v] for v in self.jaxpr.constvars]
        closed = jex.ClosedJaxpr(self.jaxpr, consts)
        return in_equations(closed, self.refs, self.at_rest, checkpoints=True)

    @functools.cached_property
    def inlined_at(self) -> Mapping[int, InlinedUpdate]:
        """The region that an equation is of, by position."""
        return {
            i: inlined for inlined in self.inlined_updates for i in inlined.positions
        }

    @functools.cached_property
    def replaced(self) -> Mapping[Atom, jex.Var]:
        """The argument at rest that a result replaces, for each such result."""
        program = self.program
        return {
            program.outvars[x.result]: program.invars[x.position]
            for x in (self.at_rest.arguments if self.at_rest else ())
            if x.result is not None
        }

    @functools.cached_property
    def live(self) -> frozenset[int]:
        """The equations that a result or an effect needs, as positions."""
        return frozenset(self.program.live)

    @functools.cached_property
    def origins(self) -> Mapping[jex.Var, Sequence[Origin]]:
        """The outputs of offloaded updates that variables are, maybe constrained.

        A step may constrain the sharding of new state after the update, or move it.
        """
        found: dict[jex.Var, list[Origin]] = {}
        for inlined in self.inlined_updates:
            for k, a in enumerate(inlined.results):
                if isinstance(a, jex.Var):
                    found.setdefault(a, []).append(Origin(inlined, k))
        for e in self.program.equations:
            for a, v in handed_on(e):
                if a in found and v not in found:
                    found[v] = found[a]
        return found

    @functools.cached_property
    def planned(self) -> Mapping[jex.Var, str]:
        """Paths of the state that rules put in host memory, as updates take it."""
        calls = [(called(e), e.invars) for e in self.program.equations]
        calls += [(x.what, x.operands) for x in self.inlined_updates]
        of_host = (
            (operands[i], path)
            for what, operands in calls
            for i, path in (what.caller.planned.items() if what else ())
        )
        return {a: path for a, path in of_host if isinstance(a, jex.Var)}

    @property
    def misplaced(self) -> Sequence[str]:
        """Paths of such state with types of the device, which may be wrong (F28)."""
        planned = self.planned.items()
        return [path for v, path in planned if not memory.on_host(v.aval)]

    @property
    def moves_rows(self) -> bool:
        """Returns whether scans of it load or store rows of what rests on the host."""
        return self.at_rest is not None and self.at_rest.positions != "none"

    def reads(self, i: int) -> list[jex.Var]:
        """The variables that an equation takes; with effects, also their tokens."""
        before, _ = self._tokens.get(i, ((), ()))
        return [*variables(self.program.equations[i].invars), *before]

    def defines(self, i: int) -> list[jex.Var]:
        """The variables that an equation defines; with effects, also its tokens."""
        _, after = self._tokens.get(i, ((), ()))
        return [*self.program.equations[i].outvars, *after]

    def tokens(self, i: int) -> Sequence[jex.Var]:
        """The variables that stand for the effects of an equation, if it has some."""
        return self._tokens.get(i, ((), ()))[1]

    @functools.cached_property
    def _tokens(self) -> Mapping[int, tuple[Sequence[jex.Var], Sequence[jex.Var]]]:
        """The tokens that an equation with effects takes and gives, by position.

        Each takes the one of the equation before, so that whatever follows what values
        need keeps effects in their order too.
        """
        found: dict[int, tuple[Sequence[jex.Var], Sequence[jex.Var]]] = {}
        before: Sequence[jex.Var] = ()
        for i, e in enumerate(self.program.equations):
            if compat.has_effects(e):
                found[i] = before, (jex.Var(_TOKEN),)
                before = found[i][1]
        return found


_TOKEN = jax.core.ShapedArray((), np.dtype(bool))


def take_apart(
    closed: jex.ClosedJaxpr,
    types: Sequence[Any] | None = None,
    refs: tuple[Any, ...] = (),
    returns: Mapping[int, int] | None = None,
    *,
    residuals: bool = False,
) -> Step:
    """The equations of a step, and of the updates in it.

    Args:
      closed: The step, of the values of its refs.
      types: The types of its arguments, where they rest, if it was traced as if all
        were on the device; else None.
      refs: The refs that it closes over.
      returns: The argument at rest that each result replaces, as positions; those that
        `returning` finds if it is None.
      residuals: Whether what scans stack for scans alone rests on the host.
    """
    at_rest = None
    if types is None and makes_rows(closed):
        types = closed.in_avals
    if types is not None:
        if returns is None:
            returns = returning(closed, types)
        closed, at_rest = resting(closed, types, returns, residuals=residuals)
    return in_equations(with_resting_scans(closed), refs, at_rest)


def in_equations(
    closed: jex.ClosedJaxpr,
    refs: tuple[Any, ...],
    at_rest: AtRest | None,
    *,
    checkpoints: bool = False,
) -> Step:
    """A step of values where they rest, in its equations.

    Args:
      closed: The step.
      refs: See `Step`.
      at_rest: See `Step`.
      checkpoints: Whether those of all `jax.checkpoint` are among them, and not only
        those around scans.
    """
    outer = merged(flatten(closed, once=True))
    taken = _Taken(outer, checkpoints)
    for e in outer.equations:
        taken.take(e)
    program = taken.builder.program(outer)
    inlined = tuple(taken.inlined_updates)
    return Step(program, inlined, closed.jaxpr, refs, at_rest)


def of_values(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, tuple[Any, ...]]:
    """A step of the values of its refs, and the refs that it closes over.

    Values that are read and written are then followed as others are, and no equation
    remains that reads something else in another place of the program. Refs that the
    step makes itself are gone.
    """
    jaxpr = closed.jaxpr
    constants = list(zip(jaxpr.constvars, closed.consts, strict=True))
    refs = [(v, x) for v, x in constants if isinstance(x, jax.Ref)]
    if not (refs or any(map(_is_ref, jaxpr.invars)) or _makes_refs(jaxpr)):
        return closed, ()
    others = [(v, x) for v, x in constants if not isinstance(x, jax.Ref)]
    jaxpr = jex.Jaxpr(
        constvars=[v for v, _ in others],
        invars=[*jaxpr.invars, *(v for v, _ in refs)],
        outvars=jaxpr.outvars,
        eqns=jaxpr.eqns,
        effects=jaxpr.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    pure = compat.without_refs(jex.ClosedJaxpr(jaxpr, [x for _, x in others]))
    return pure, tuple(x for _, x in refs)


def _makes_refs(jaxpr: jex.Jaxpr) -> bool:
    equations = (x for e in jaxpr.eqns for x in (e, *within(e)))
    return any(_is_ref(v) for e in equations for v in e.outvars)


def _is_ref(v: jex.Var) -> bool:
    return isinstance(v.aval, jax.ref.AbstractRef)


class _Taken:
    """Equations taken out of a step one after the other."""

    def __init__(self, outer: Program, checkpoints: bool = False):
        self._checkpoints = checkpoints
        self._loaded = Loaded({*outer.invars, *outer.constants})
        self.builder = Builder(outer.constants)
        self.inlined_updates: list[InlinedUpdate] = []

    def take(self, e: jex.JaxprEqn) -> None:
        """Takes an equation, or an update's own in its place."""
        builder = self.builder
        operands = builder.read_all(e.invars)
        what = called(e)
        # What comes from the host and has a type of the device is left as it is (F28).
        if what is not None and _as_typed(what.update, operands):
            operands = [
                self._key(a, what.given.impls[i]) if i in what.given.impls else a
                for i, a in enumerate(operands)
            ]
            inlined = self._inlined(what, operands)
            self.inlined_updates.append(inlined)
            results = [
                builder.trace(jax.random.key_data, a)[0] if k in what.made.impls else a
                for k, a in enumerate(inlined.results)
            ]
            builder.rename(e.outvars, results)
        elif remats.is_checkpoint(e) and (self._checkpoints or remats.has_scan(e)):
            opened = remats.opened(e, operands, self._loaded)
            builder.close_over(opened.constants)
            for inner in opened.equations:
                self.take(inner)
            builder.rename(e.outvars, builder.read_all(opened.outvars))
        else:
            for small in apart(e):
                builder.add(small)
                if self._checkpoints:
                    self._loaded.add(builder.equations[-1])
            for body in entered(builder.equations[-1]):
                same = passed_on(body)
                builder.rename(same, (body.equation.invars[i] for i in same.values()))

    def _inlined(self, what: Call, operands: list[Atom]) -> InlinedUpdate:
        what = _split(what)
        dropped = as_zero(what.update)
        program, builder = what.update.program, self.builder
        first = len(builder.equations)
        builder.close_over(program.constants)
        builder.rename(program.invars, [builder.move(a, "device") for a in operands])
        for e in program.equations:
            builder.add(e, [jex.Var(v.aval) for v in e.outvars])
            for v in e.outvars:
                if v in dropped:
                    predicate, value = dropped[v]
                    builder.rename([v], [self._zero_if(predicate, value, v)])
        results = [
            builder.move(builder.read(program.outvars[k]), output.memory_kind)
            for k, output in enumerate(what.update.outputs)
        ]
        inside = [*program.invars, *(v for e in program.equations for v in e.outvars)]
        return InlinedUpdate(
            what,
            tuple(operands),
            tuple(results),
            range(first, len(builder.equations)),
            {v: builder.read(v) for v in inside},
        )

    def _zero_if(self, predicate: jex.Var, value: int, update: jex.Var) -> Atom:
        """An update, or zero where it is dropped, as where the two are programs apart.

        `optax.MultiSteps` multiplies it by zero, which is NaN where it is not finite.
        """
        (result,) = self.builder.trace(
            lambda p, u: lax.select(p == value, lax.full_like(u, 0), u),
            *self.builder.read_all([predicate, update]),
        )
        return result

    def _key(self, a: Atom, impl: Any) -> Atom:
        """A random key, given its data."""
        (key,) = self.builder.trace(lambda x: jax.random.wrap_key_data(x, impl=impl), a)
        return key


def _as_typed(update: Update, operands: Sequence[Atom]) -> bool:
    """Returns whether what comes from the host has such a type."""
    typed = [i for i, a in enumerate(operands) if memory.on_host(a.aval)]
    return typed == update.loads


def apart(e: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """An equation over many leaves, as one for each where it treats each alone."""
    return [x for one in singly(e) for x in split(one)]


def _split(what: Call) -> Call:
    """An update whose equations over many leaves are taken apart."""
    program = what.update.program
    equations = [small for e in program.equations for small in apart(e)]
    program = dataclasses.replace(program, equations=equations)
    return dataclasses.replace(
        what, update=dataclasses.replace(what.update, program=program)
    )

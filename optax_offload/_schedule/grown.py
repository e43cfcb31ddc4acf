"""An update that grows by equations of the step, or that these alone are."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    Builder,
    Call,
    Caller,
    Input,
    Places,
    Program,
    Update,
    bound,
    equation_of,
    is_transfer,
    variables,
)


class Grown:
    """An update that grows by equations of the step.

    Attributes:
      operands: The operands that the step gives it.
      outputs: The facts about each result.
      outvars: The variable that each result is.
    """

    def __init__(self, update: Update, operands: Sequence[Atom]):
        self._update, self.operands = update, list(operands)
        self._at: dict[Atom, int] = {}
        for i, v in enumerate(self.operands):
            if isinstance(v, jex.Var):
                self._at.setdefault(v, i)
        program = update.program
        self._inputs, self._invars = list(update.inputs), list(program.invars)
        self.outputs, self.outvars = list(update.outputs), list(program.outvars)
        self._builder = Builder(program.constants)
        self._builder.equations += program.equations

    @classmethod
    def of(
        cls, program: Program, positions: Iterable[int], takes: Iterable[jex.Var]
    ) -> Grown:
        """An update that is equations of a step, and has no results yet.

        Args:
          program: The step.
          positions: The equations.
          takes: What they take of the step.
        """
        empty = Program([], {}, [], [], program.debug_info)
        grown = cls(Update(empty, (), ()), [])
        grown.follow([program.equations[i] for i in positions], {}, list(takes))
        return grown

    def equation(
        self,
        caller: Caller,
        paths: Collection[str],
        like: jex.JaxprEqn,
        results: Sequence[jex.Var],
    ) -> jex.JaxprEqn:
        """The equation of an update that is equations of a step.

        Args:
          caller: Whose update it is.
          paths: The paths of the state that it has to itself: these are its first
            operands, and its results. Empty where nobody asks for them.
          like: An equation in whose place it is.
          results: The results.
        """
        state: Any = dict.fromkeys(paths, 0)
        others = [0] * (len(self.operands) - len(state))
        what = Call(
            self.update(),
            caller,
            jax.tree.structure(((), state, others)),
            jax.tree.structure(((), state or [0] * len(results))),
            Places({}),
            Places({}),
        )
        return equation_of(what, like, self.operands, list(results))

    def load(self, some: Container[Atom]) -> None:
        """Has operands come from host memory: these, and no others."""
        self._inputs = [
            dataclasses.replace(x, on_host=a in some)
            for x, a in zip(self._inputs, self.operands, strict=True)
        ]

    def update(self) -> Update:
        """The update as it is now."""
        program = dataclasses.replace(
            self._update.program,
            equations=self._builder.equations,
            constants=self._builder.constants,
            invars=self._invars,
            outvars=self.outvars,
        )
        return Update(program, tuple(self._inputs), tuple(self.outputs))

    def zero_if(self, predicate: jex.Var, value: int, v: jex.Var) -> jex.Var:
        """An output, or zero in the version of the update that drops it."""

        def chosen(p: Any, x: Any) -> Any:
            cases = [x, x]
            cases[value] = lax.full_like(x, 0)
            return lax.select_n(p, *cases)

        (found,) = variables(self._builder.trace(chosen, predicate, v))
        return found

    def follow(
        self,
        equations: Iterable[jex.JaxprEqn],
        names: Mapping[jex.Var, Atom],
        takes: Collection[jex.Var],
    ) -> None:
        """Adds equations of the step.

        Args:
          equations: The equations.
          names: The variables of the update that those of the step are.
          takes: The variables of the step that they take besides.
        """
        self._builder.rename(names, names.values())
        self._builder.rename(takes, [self._invars[self.input(x)] for x in takes])
        for e in equations:
            if is_transfer(e):
                self._builder.rename(e.outvars, self.read_all(e.invars))
            else:
                self._builder.add(e, [jex.Var(x.aval) for x in e.outvars])

    def read_all(self, atoms: Iterable[Atom]) -> list[Atom]:
        """The variables of the update that those of the step are."""
        return self._builder.read_all(atoms)

    def input(self, x: jex.Var) -> int:
        """The position of the input that a variable of the step is, maybe a new one."""
        if x not in self._at:
            self._at[x] = len(self.operands)
            self.operands.append(x)
            self._invars.append(jex.Var(memory.device_type(x.aval)))
            self._inputs.append(Input(memory.on_host(x.aval)))
        return self._at[x]


class GrownCall(NamedTuple):
    """An update that makes results of the step, in place of new state.

    Attributes:
      before: The equation of the update as it was.
      what: The update as it was.
      grown: The update as it is now.
      replaced: The results that it makes, by the new state in whose place.
    """

    before: jex.JaxprEqn
    what: Call
    grown: Grown
    replaced: Mapping[jex.Var, jex.Var]

    def equation(self, beside: Sequence[jex.Var]) -> jex.JaxprEqn:
        """The equation of the update.

        Args:
          beside: New state that something else needs too; it is on the device.
        """
        update, before, what = self.grown.update(), self.before, self.what
        updates = sum(x.is_update for x in update.outputs)
        old = bound(before.outvars, what.update.program.outvars)
        facts = bound(before.outvars, what.update.outputs)
        outputs = [
            dataclasses.replace(facts[v], memory_kind="device", alias=None)
            for v in beside
        ]
        outvars = update.program.outvars
        program = dataclasses.replace(
            update.program,
            outvars=[*outvars[:updates], *(old[v] for v in beside), *outvars[updates:]],
        )
        update = Update(
            program,
            update.inputs,
            (*update.outputs[:updates], *outputs, *update.outputs[updates:]),
        )
        results = [self.replaced.get(v, v) for v in before.outvars]
        results[updates:updates] = beside
        arguments = list(what.arguments.children())
        more = len(self.grown.operands) - len(before.invars)
        traced = arguments[-1].num_leaves
        arguments[-1] = jax.tree.structure([0] * (traced + more))
        of_updates, of_state = what.results.children()
        of_updates = _tuple([of_updates, jax.tree.structure([0] * len(beside))])
        made = {
            k + len(beside) * (k >= updates): impl
            for k, impl in what.made.impls.items()
        }
        what = dataclasses.replace(
            what,
            update=update,
            arguments=_tuple(arguments),
            results=_tuple([of_updates, of_state]) if beside else what.results,
            made=Places(made),
        )
        return equation_of(what, before, self.grown.operands, results)


def _tuple(structures: Sequence[Any]) -> Any:
    return jax.tree_util.treedef_tuple(structures)

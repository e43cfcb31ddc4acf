"""Making programs of others: the only place where a variable gets another name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program.bodies import of_call
from optax_offload._program.graph import Atom, Program, bound
from optax_offload._program.primitives import facts


class Builder:
    """Writes equations, and keeps the names of variables in them.

    Equations that are added take their operands by the names that these have by then.

    Attributes:
      equations: The equations so far.
      constants: The values that they close over.
    """

    def __init__(self, constants: Mapping[jex.Var, Any] | None = None):
        self.equations: list[jex.JaxprEqn] = []
        self.constants: dict[jex.Var, Any] = {}
        self._names: dict[jex.Var, Atom] = {}
        # Scalars of which the value is known.
        self._known: dict[jex.Var, Any] = {}
        # Many leaves are of a type, and tracing takes its time.
        self._moves: dict[tuple[Any, str], jex.JaxprEqn] = {}
        self.close_over(constants or {})

    def close_over(self, constants: Mapping[jex.Var, Any]) -> None:
        """Has equations close over values."""
        self.constants |= constants
        self._known |= {v: c for v, c in constants.items() if _is_known_scalar(c)}

    def rename(self, before: Iterable[jex.Var], after: Iterable[Atom]) -> None:
        """Has variables stand for others, or for literals, from here on."""
        self._names |= bound(before, after)

    def read(self, a: Atom) -> Atom:
        """Returns the atom that replaces an atom."""
        return a if isinstance(a, jex.Literal) else self._names.get(a, a)

    def read_all(self, atoms: Iterable[Atom]) -> list[Atom]:
        """Returns the atoms that replace atoms."""
        return [self.read(a) for a in atoms]

    def value(self, a: Atom) -> Any:
        """The value of a literal, or of a scalar that is known; None of others."""
        return a.val if isinstance(a, jex.Literal) else self._known.get(a)

    def add(
        self,
        e: jex.JaxprEqn,
        results: Sequence[jex.Var] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds an equation.

        Args:
          e: The equation, in variables as they were called before.
          results: The names of its results from here on; None for the same names.
          params: The parameters that change.
        """
        operands = self.read_all(e.invars)
        changed: dict[str, Any] = {"params": {**e.params, **params}} if params else {}
        if operands != list(e.invars):  # Atoms are equal only to themselves.
            changed["invars"] = operands
        if results is not None:
            self.rename(e.outvars, results)
            changed["outvars"] = list(results)
        # Most are as they were, of steps with tens of thousands.
        self.equations.append(e.replace(**changed) if changed else e)
        # Enough to know a predicate, and what a selection is multiplied with.
        if facts(e).folded is not None:
            self._fold(e, operands, self.equations[-1].outvars[0])

    def _fold(self, e: jex.JaxprEqn, operands: Sequence[Atom], result: jex.Var) -> None:
        """Knows the value of a result, if those of all operands are known."""
        fold = facts(e).folded
        assert fold is not None
        values: list[Any] = []
        for a in operands:
            values.append(self.value(a))
            if values[-1] is None:
                return
        types: list[Any] = [a.aval for a in (*operands, result)]
        *given, made = (t.dtype for t in types)
        arrays = [np.asarray(v, dtype) for v, dtype in zip(values, given, strict=True)]
        with np.errstate(all="ignore"):
            self._known[result] = np.asarray(fold(*arrays), made)

    def inline(
        self, closed: jex.ClosedJaxpr, operands: Sequence[Atom], *, once: bool = False
    ) -> list[Atom]:
        """Adds the equations of a jaxpr, with variables of its own each time.

        Args:
          closed: The jaxpr.
          operands: The atoms that stand for its arguments.
          once: Whether it is inlined nowhere else, so that its variables can stay. The
            bodies in it may be: what is traced once is called many times.

        Returns:
          The atoms that stand for its results.
        """
        self.close_over(bound(closed.jaxpr.constvars, closed.consts))
        self.rename(closed.jaxpr.invars, operands)
        for e in closed.jaxpr.eqns:
            body, inside = self._body(e)
            if body is None:
                self.add(e, None if once else [jex.Var(v.aval) for v in e.outvars])
            else:
                self.rename(e.outvars, self.inline(body, inside))
        return self.read_all(closed.jaxpr.outvars)

    def trace(self, fn: Callable[..., Any], *operands: Atom) -> list[Atom]:
        """Adds the equations of a function of values.

        Args:
          fn: The function, which returns a pytree.
          *operands: The atoms that stand for its arguments.

        Returns:
          The atoms that stand for the leaves of its result.
        """
        # JAX may have traced the function before, and returns that jaxpr again.
        closed = jax.make_jaxpr(fn)(*(a.aval for a in operands))
        return self.inline(closed, operands)

    def move(self, a: Atom, memory_kind: str) -> Atom:
        """Returns the value of an atom in a memory; random keys stay where they are."""
        here = memory.kind_of_type(a.aval) == memory_kind
        if here or memory.movable_nbytes(a.aval) is None:
            return a
        how = a.aval, memory_kind
        if how not in self._moves:
            move = functools.partial(memory.transfer, memory_kind=memory_kind)
            (self._moves[how],) = jax.make_jaxpr(move)(a.aval).jaxpr.eqns
        e = self._moves[how]
        result = jex.Var(e.outvars[0].aval)
        self.equations.append(e.replace(invars=[self.read(a)], outvars=[result]))
        return result

    def program(self, of: Program) -> Program:
        """A program with the equations so far in the place of its own."""
        return dataclasses.replace(
            of,
            equations=self.equations,
            constants=self.constants,
            outvars=self.read_all(of.outvars),
        )

    def _body(self, e: jex.JaxprEqn) -> tuple[jex.ClosedJaxpr | None, list[Atom]]:
        """Returns the body to inline for an equation, if it has one, and operands."""
        operands = self.read_all(e.invars)
        called = of_call(e)
        if called is not None:
            shardings = [e.params.get(k, ()) for k in ("in_shardings", "out_shardings")]
            constrained = any(
                isinstance(s, jax.sharding.Sharding) for some in shardings for s in some
            )
            return (None if constrained else called), operands
        if e.primitive.name == "cond":
            index = self.value(operands[0])
            if index is not None:
                branches = e.params["branches"]
                taken = min(max(int(index), 0), len(branches) - 1)
                return branches[taken], operands[1:]
        return None, operands


def flatten(closed: jex.ClosedJaxpr, *, once: bool = False) -> Program:
    """Inlines nested jits, calls with own derivatives, and conds of a known branch.

    optax jits its bias correction: left whole, it ties every leaf to every other. So
    does the cond of `optax.MultiSteps`, whose predicate is the constant False unless
    steps are to be skipped. A jit that constrains shardings is left as it is.

    Args:
      closed: The jaxpr.
      once: Whether its equations are part of no other program, so that its variables
        can stay.
    """
    builder = Builder()
    invars = list(closed.jaxpr.invars)
    outvars = builder.inline(closed, invars, once=once)
    # The names of arguments and results are those of a function that is taken apart.
    debug_info = closed.jaxpr.debug_info.with_unknown_names()
    return Program(builder.equations, builder.constants, invars, outvars, debug_info)


def _is_known_scalar(c: Any) -> bool:
    return not isinstance(c, jax.core.Tracer) and getattr(c, "shape", None) == ()

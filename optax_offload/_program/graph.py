"""A program, and what can be asked of it: what needs what, what belongs together."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.core
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program.bodies import Body, as_they_are, entered

Atom: TypeAlias = jex.Var | jex.Literal
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Program:
    """Equations, without nested jits.

    Attributes:
      equations: The equations, in their order.
      constants: The values that they close over.
      invars: The arguments.
      outvars: The results.
      debug_info: The names that JAX keeps of the function for its messages.
    """

    equations: list[jex.JaxprEqn]
    constants: dict[jex.Var, Any]
    invars: list[jex.Var]
    outvars: list[Atom]
    debug_info: Any

    @functools.cached_property
    def producers(self) -> Mapping[jex.Var, int]:
        """The position of the equation that defines each variable."""
        return {v: i for i, e in enumerate(self.equations) for v in e.outvars}

    @functools.cached_property
    def users(self) -> Mapping[jex.Var, Sequence[int]]:
        """The positions of the equations that take each variable, in order."""
        found: dict[jex.Var, list[int]] = {}
        for i, e in enumerate(self.equations):
            for v in dict.fromkeys(variables(e.invars)):
                found.setdefault(v, []).append(i)
        return found

    @functools.cached_property
    def used(self) -> frozenset[jex.Var]:
        """The variables that equations take or that are results."""
        return self.results.union(self.users)

    @functools.cached_property
    def results(self) -> frozenset[jex.Var]:
        """The variables that are results."""
        return frozenset(variables(self.outvars))

    @functools.cached_property
    def live(self) -> Sequence[int]:
        """The positions of the equations that a result or an effect needs, in order."""
        return needed(self.equations, self.results, effects=True)

    def closed(self, like: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """The program as a jaxpr, with the effects and names of the one it is of."""
        jaxpr = jex.Jaxpr(
            constvars=list(self.constants),
            invars=self.invars,
            outvars=self.outvars,
            eqns=self.equations,
            effects=like.jaxpr.effects,
            debug_info=like.jaxpr.debug_info,
        )
        return jex.ClosedJaxpr(jaxpr, list(self.constants.values()))

    def made_of(
        self, wanted: Iterable[Atom], through: Callable[[jex.JaxprEqn, jex.Var], bool]
    ) -> MadeOf:
        """What values are made of, followed back through some equations.

        It takes the time of these, and not that of a look at the whole program.

        Args:
          wanted: The values.
          through: Whether an equation is one of these, asked for a variable that it
            makes. Otherwise the variable is taken as it is.
        """
        positions: set[int] = set()
        takes: dict[jex.Var, None] = {}
        waiting = variables(wanted)
        while waiting:
            v = waiting.pop()
            i = self.producers.get(v)
            if i is None or not through(self.equations[i], v):
                takes[v] = None
            elif i not in positions:
                positions.add(i)
                waiting += variables(self.equations[i].invars)
        return MadeOf(sorted(positions), [*takes])


class MadeOf(NamedTuple):
    """What values are made of.

    Attributes:
      positions: The equations that make them, as positions, in order.
      takes: The variables that these take, and no equation of them makes.
    """

    positions: list[int]
    takes: list[jex.Var]


def needed(
    equations: Sequence[jex.JaxprEqn],
    wanted: Iterable[jex.Var],
    known: Collection[jex.Var] = (),
    *,
    effects: bool = False,
) -> list[int]:
    """The positions of the equations that variables need, in order.

    Args:
      equations: The equations.
      wanted: The variables.
      known: Variables that need nothing.
      effects: Whether an equation with effects is needed, whoever wants its results.
    """
    missing = {v for v in wanted if v not in known}
    found: list[int] = []
    for i in reversed(range(len(equations))):
        e = equations[i]
        if (effects and compat.has_effects(e)) or not missing.isdisjoint(e.outvars):
            found.append(i)
            missing.update(v for v in variables(e.invars) if v not in known)
    return found[::-1]


def ordered(program: Program, equations: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """The equations that a program needs, each after those that it needs.

    Args:
      program: The program.
      equations: The equations, most of which are in order.
    """
    producers = {v: i for i, e in enumerate(equations) for v in e.outvars}

    def before(i: int) -> list[int]:
        taken = variables(equations[i].invars)
        return sorted({producers[v] for v in taken if v in producers}, reverse=True)

    waiting = [producers[v] for v in variables(program.outvars) if v in producers]
    waiting += [i for i, e in enumerate(equations) if compat.has_effects(e)]
    alive: set[int] = set()
    while waiting:
        i = waiting.pop()
        if i not in alive:
            alive.add(i)
            waiting += before(i)
    done: dict[int, None] = {}
    for i in sorted(alive):
        stack = [i]
        while stack:
            at = stack[-1]
            missing = [x for x in before(at) if x not in done]
            stack += missing
            if not missing:
                done[stack.pop()] = None
    return [equations[i] for i in done]


def dependents(program: Program, start: Collection[jex.Var]) -> set[jex.Var]:
    """The variables that depend on any of these, which are among them."""
    found = set(start)
    for e in program.equations:
        if not found.isdisjoint(variables(e.invars)):
            found.update(e.outvars)
    return found


class Components(Generic[T]):
    """Disjoint sets of things, which are joined one by one. Each begins by itself."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def of(self, x: T) -> T:
        """One that stands for all that belong with a thing."""
        while (parent := self._parent.get(x, x)) != x:
            x = parent
        return x

    def join(self, things: Iterable[T]) -> None:
        """Joins things, under the one that stands for the first of them."""
        first, *rest = dict.fromkeys(map(self.of, things))
        self._parent |= dict.fromkeys(rest, first)


def nested(e: jex.JaxprEqn) -> Iterator[jex.Jaxpr]:
    """The bodies among the parameters of an equation."""
    for value in e.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex.Jaxpr):
                yield item


def within(e: jex.JaxprEqn) -> Iterator[jex.JaxprEqn]:
    """The equations in the bodies of an equation, and in theirs."""
    for body in nested(e):
        for inner in body.eqns:
            yield inner
            yield from within(inner)


def handed_through(body: jex.Jaxpr) -> dict[int, int]:
    """Returns which arguments results of a body are, through checkpoints and calls."""
    known = {v: i for i, v in enumerate(body.invars)}
    for e in body.eqns:
        once = as_they_are(e)
        if once is None:
            continue
        for k, i in handed_through(once.jaxpr).items():
            operand = e.invars[i]
            if isinstance(operand, jex.Var) and operand in known:
                known[e.outvars[k]] = known[operand]
    return {
        k: known[a]
        for k, a in enumerate(body.outvars)
        if isinstance(a, jex.Var) and a in known
    }


def passed_on(body: Body) -> dict[jex.Var, int]:
    """Returns which operands stacked results are, row by row, as `nnx.scan` has them.

    Args:
      body: The body of a scan, whose operands are given as positions.
    """
    through = handed_through(body.jaxpr)
    # Of what is loaded, or stored, there is another one.
    taken = {x.position for x in body.rows_taken if not x.rests}
    rows = [x for x in body.rows_given if through.get(x.position) in taken]
    return {x.stack: through[x.position] for x in rows if not x.rests}


def whole_and_rows(e: jex.JaxprEqn) -> tuple[list[jex.Var], list[jex.Var]]:
    """The operands that an equation takes whole, and those that it takes row by row."""
    rows = [a for body in entered(e) for a in body.xs]
    return variables(e.invars[: len(e.invars) - len(rows)]), variables(rows)


def variables(atoms: Iterable[Atom]) -> list[jex.Var]:
    """The atoms that are no literals."""
    return [a for a in atoms if isinstance(a, jex.Var)]


def bound(names: Iterable[T], values: Iterable[Any]) -> dict[T, Any]:
    """Values by their names, of which there are as many."""
    return dict(zip(names, values, strict=True))


def in_pairs(e: jex.JaxprEqn) -> Iterator[tuple[Atom, jex.Var]]:
    """Yields each operand of an equation, with the result that it becomes."""
    return zip(e.invars, e.outvars, strict=True)


def nbytes(some: Iterable[Atom]) -> int:
    """The bytes of variables on each device."""
    return sum(memory.nbytes_on_each_device(v.aval) for v in some)


def shape(a: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    aval: Any = a.aval
    return aval.shape


def dtype(a: Atom) -> Any:
    """The dtype of a variable or literal."""
    aval: Any = a.aval
    return aval.dtype


def signature(
    equations: Sequence[jex.JaxprEqn],
    inputs: Sequence[jex.Var],
    outputs: Sequence[Atom],
) -> Hashable:
    """Equal for equations that only the names of their variables tell apart."""
    numbers = {v: i for i, v in enumerate(inputs)}

    def of(a: Atom) -> Hashable:
        if isinstance(a, jex.Literal):
            return a.aval, np.asarray(a.val).tobytes()
        return numbers[a]

    parts: list[Hashable] = [v.aval for v in inputs]
    for e in equations:
        operands = tuple(of(a) for a in e.invars)
        numbers |= {v: len(numbers) + i for i, v in enumerate(e.outvars)}
        parts.append((e.primitive, operands, tuple(e.params.items()), e.ctx))
    parts += [of(a) for a in outputs]
    return tuple(parts)


def read(a: Atom, lookup: Callable[[jex.Var], Any]) -> Any:
    """The value of a variable or literal."""
    return a.val if isinstance(a, jex.Literal) else lookup(a)


def evaluate(
    program: Program, positions: Sequence[int], lookup: Callable[[jex.Var], Any]
) -> dict[jex.Var, Any]:
    """Evaluates equations of a program. See `evaluated`."""
    equations = [program.equations[i] for i in positions]
    return evaluated(equations, lookup, program.debug_info)


def evaluated(
    equations: Sequence[jex.JaxprEqn],
    lookup: Callable[[jex.Var], Any],
    debug_info: Any,
) -> dict[jex.Var, Any]:
    """The value of each variable that equations define, given those that they take."""
    results = [v for e in equations for v in e.outvars]
    defined = set(results)
    used = (v for e in equations for v in variables(e.invars))
    free = [v for v in dict.fromkeys(used) if v not in defined]
    # JAX's own interpreter knows how each version of it binds an equation, and keeps
    # the name stack and the context (mesh, matmul precision) it was traced in.
    jaxpr = jex.Jaxpr(
        constvars=(),
        invars=free,
        outvars=results,
        eqns=equations,
        debug_info=debug_info,
    )
    values = jax.core.eval_jaxpr(jaxpr, (), *map(lookup, free))
    return bound(results, values)


_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+):\d+ \((?P<function>.*)\)")


def described(e: jex.JaxprEqn) -> str:
    """Describes an equation as its author knows it, by its function and line.

    A function that only adds up the leaves of any tree says less than its caller.
    """
    added = e.primitive.name == "add" and not any(map(shape, e.outvars))
    name = "a sum over leaves" if added else repr(e.primitive.name)
    lines = source_info_util.summarize(e.source_info, num_frames=30).splitlines()
    frames = [found for line in lines if (found := _FRAME.fullmatch(line))]
    telling = [f for f in frames if "/optax/tree_utils/" not in f["file"]]
    if not telling:
        return name
    last = telling[-1]
    function = last["function"].partition(".<locals>")[0]
    return f"{name} in {function} ({last['file']}:{last['line']})"

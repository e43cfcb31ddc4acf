"""Values that follow from rows at rest alone are computed again from these."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program.bodies import Body
from optax_offload._program.build import Builder, flatten
from optax_offload._program.graph import Program, bound, passed_on, variables
from optax_offload._program.primitives import facts
from optax_offload._program.row_rules import ByRows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sources", "given"],
    meta_fields=["count", "jaxpr"],
)
@dataclasses.dataclass(frozen=True)
class RowValue:
    """A value that is computed row by row from values that rest on the host.

    Attributes:
      count: The number of rows.
      sources: The values. Smaller ones may be on the device.
      given: What each row takes besides, as it is: on the device.
      jaxpr: The equations for a block of rows (`row_rules.py`). They take a row of each
        source, with its axis of size one, and what is given.
    """

    count: int
    sources: tuple[Any, ...]
    given: tuple[Any, ...]
    jaxpr: jex.Jaxpr

    def row(self, rows: Sequence[Any]) -> Any:
        """It, given the rows."""
        return lax.squeeze(self._block(rows), (0,))

    def whole(self) -> Any:
        """All rows of it, on the device."""
        loaded = [memory.transfer(x, "device") for x in self.sources]
        _, blocks = lax.scan(lambda _, rows: (None, self._block(rows)), None, loaded)
        count, size, *others = blocks.shape
        return lax.reshape(blocks, (count * size, *others))

    def _block(self, rows: Sequence[Any]) -> Any:
        blocks = (lax.expand_dims(x, (0,)) for x in rows)
        (value,) = jax.core.eval_jaxpr(self.jaxpr, (), *blocks, *self.given)
        return value


def rests(x: Any) -> bool:
    """Returns whether a value is not on the device, so that it has to be loaded."""
    return isinstance(x, RowValue) or (
        isinstance(x, jax.core.Tracer) and memory.on_host(x)
    )


def of_stack(x: Any) -> RowValue:
    """A stack, as rows of itself."""
    aval = memory.device_type(x)
    block = aval.update(shape=(1, *aval.shape[1:]))
    return RowValue(x.shape[0], (x,), (), jax.make_jaxpr(lambda x: x)(block).jaxpr)


def computed(
    e: jex.JaxprEqn, by_rows: ByRows, operands: Sequence[Any], count: int
) -> list[RowValue]:
    """The results of an equation, row by row.

    Args:
      e: The equation.
      by_rows: The same for a block of rows.
      operands: The operands, each as a `RowValue` where a block takes one of it, or
        else on the device.
      count: The number of rows.
    """
    parts = [x for x, has in zip(operands, by_rows.rows, strict=True) if has]
    given: dict[jex.Var, Any] = {}
    taken: list[Any] = []
    for a, x, has in zip(e.invars, operands, by_rows.rows, strict=True):
        if has:
            taken.append(x.jaxpr.outvars[0])
        elif isinstance(a, jex.Literal):
            taken.append(a)
        else:
            taken.append(jex.Var(a.aval))
            given[taken[-1]] = x
    made: list[jex.Var] = []
    for v in e.outvars:
        aval: Any = v.aval
        size, *others = aval.shape
        made.append(jex.Var(aval.update(shape=(size // count, *others))))
    params = {**e.params, **by_rows.params}
    last = e.replace(invars=taken, outvars=made, params=params)
    return [_joined(parts, given, [last], v, count) for v in made]


def made_of_rows(
    body: Body,
    xs: Sequence[Any],
    kept: Sequence[bool],
    consts: Sequence[Any] = (),
) -> dict[jex.Var, Any]:
    """Finds the stacked results of a scan that follow from rows at rest alone.

    Args:
      body: The body of the scan.
      xs: The values that it takes rows of.
      kept: For each of these, whether its body takes it where it rests.
      consts: The values that it takes as they are, which results may follow from too.
    """
    program = flatten(body.closed)
    arguments = body.split(program.invars)
    source = {
        v: x
        for v, x, keep in zip(arguments.xs, xs, kept, strict=True)
        if rests(x) and not keep
    }
    given = program.constants | {
        v: x for v, x in zip(arguments.consts, consts, strict=False) if not rests(x)
    }
    found: dict[jex.Var, Any] = {
        v: source[program.invars[i]]
        for v, i in passed_on(body).items()
        if program.invars[i] in source
    }
    for v, a in zip(body.stacked, body.given(program.outvars).stacked, strict=True):
        if not isinstance(a, jex.Var) or not source or v in found:
            continue
        positions = _of_rows(program, a, {*source, *given})
        if positions is None:
            continue
        equations = [program.equations[i] for i in positions]
        used = {x for e in equations for x in variables(e.invars)}
        if not used.isdisjoint(source):
            some = {x: one for x, one in source.items() if x in used}
            others = {x: one for x, one in given.items() if x in used}
            count = body.equation.params["length"]
            found[v] = _made(equations, some, others, a, count)
    return found


def _of_rows(
    program: Program, wanted: jex.Var, known: Collection[jex.Var]
) -> list[int] | None:
    """The equations that lead from what is known to a value; None if they take more."""
    positions, takes = program.made_of(
        [wanted], lambda e, v: v not in known and facts(e).again
    )
    return positions if all(v in known for v in takes) else None


def _made(
    equations: Sequence[jex.JaxprEqn],
    source: Mapping[jex.Var, Any],
    given: Mapping[jex.Var, Any],
    result: jex.Var,
    count: int,
) -> RowValue:
    """What equations for a row make of rows, and of what is given."""
    parts = [x if isinstance(x, RowValue) else of_stack(x) for x in source.values()]
    builder = Builder()
    for v, x in zip(source, parts, strict=True):
        row = builder.trace(lambda x: lax.squeeze(x, (0,)), x.jaxpr.outvars[0])
        builder.rename([v], row)
    here = {v: jex.Var(v.aval) for v in given}
    builder.rename(here.keys(), here.values())
    for e in equations:
        builder.add(e)
    (block,) = builder.trace(lambda x: lax.expand_dims(x, (0,)), builder.read(result))
    assert isinstance(block, jex.Var)
    values = {here[v]: x for v, x in given.items()}
    return _joined(parts, values, builder.equations, block, count)


def _joined(
    parts: Sequence[RowValue],
    given: Mapping[jex.Var, Any],
    equations: Sequence[jex.JaxprEqn],
    result: jex.Var,
    count: int,
) -> RowValue:
    """What equations make of blocks of values, each of which is computed once."""
    sources: dict[jex.Var, Any] = {}
    besides = dict(given)
    before: dict[int, jex.JaxprEqn] = {}
    for x in parts:
        rows = x.jaxpr.invars[: len(x.sources)]
        sources |= bound(rows, x.sources)
        besides |= bound(x.jaxpr.invars[len(x.sources) :], x.given)
        before |= {id(e): e for e in x.jaxpr.eqns}
    jaxpr = jex.Jaxpr(
        (),
        [*sources, *besides],
        [result],
        [*before.values(), *equations],
        debug_info=_unnamed(),
    )
    return RowValue(count, tuple(sources.values()), tuple(besides.values()), jaxpr)


@functools.cache
def _unnamed() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()

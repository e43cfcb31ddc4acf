"""A segment of a step, as a loop that runs once: it decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload._emit.moves import (
    Rest,
    host_buffer,
    load_whole,
    rest_of,
    rows_of,
    with_rows,
)
from optax_offload._places import memory
from optax_offload._program import (
    Places,
    Program,
    Sharded,
    bound,
    evaluate,
    key_data,
    needed,
    read,
    shape,
    variables,
)
from optax_offload._schedule import Outer, RemainingUpdate, Segment, StackRow, Tie

Values = Mapping[jex.Var, Any]


class There(NamedTuple):
    """What there is before a segment, and after it.

    Attributes:
      env: The values of variables.
      resting: Those that rest on the host.
      ahead: Those that the segment before has loaded for the next one.
      made: The variables that updates between the two have made. Nothing but being
        carried through the loop makes a compiler finish these first: of gradients, it
        would keep all.
      sharded: The shardings of arguments whose types do not say it.
      fills: A number for each buffer in host memory.
      zero: What buffers are filled with at first: a zero that is known when the segment
        before is done (F82).
      rows: The residuals that rest in stacks.
      stacks: These, by the first that they have.
    """

    env: dict[jex.Var, Any]
    resting: dict[jex.Var, Any]
    ahead: Values
    made: Sequence[jex.Var]
    sharded: Mapping[jex.Var, Sharded]
    fills: Iterator[int]
    zero: Any
    rows: Mapping[jex.Var, StackRow]
    stacks: dict[jex.Var, Any]


def run_segment(program: Program, segment: Segment, before: There) -> There:
    """Evaluates a segment.

    Args:
      program: The step.
      segment: The segment.
      before: What there is before it.
    """
    replaced = segment.replaced
    rewritten = {v: x for v, x in segment.rewritten.items() if v in segment.results}
    names = [v for v in _captured(program, segment) if v not in rewritten.values()]
    here = [before.env[v] for v in names]
    loaded = {v: before.ahead[v] for v in segment.loads if v in before.ahead}
    sources = [*dict.fromkeys((*segment.own, *segment.ahead))]
    # Those that are replaced here are read from where that is: a barrier over what is
    # written too would make a copy of it on the host.
    in_place = segment.loaded_itself.intersection(replaced.values())
    sources = [v for v in sources if v not in loaded and v not in in_place]
    hosts = [_resting(v, before) for v in sources]
    places, data = Places.of(here), key_data(here)
    results = [v for v in segment.results if v not in {**replaced, **rewritten}]
    whole = [v for v in segment.stores if v not in before.rows]
    rows = {v: before.rows[v] for v in segment.stores if v in before.rows}
    stacked = dict.fromkeys(row.stack for row in rows.values())
    # A compiler that knew would take the loop apart (F10).
    iterations = lax.optimization_barrier(jnp.int32(1))

    def once(carry: Any) -> Any:
        number, passed = carry[0], carry[-1]
        # What is computed from these alone would be computed before the loop (F11).
        (values, rest, given, old, passed), number = lax.optimization_barrier(
            ((data, hosts, [*loaded.values()], carry[-2], passed), number)
        )
        known = program.constants | bound(names, places.keys(values))
        known |= bound(rewritten.values(), old)
        carried = bound(replaced.values(), carry[2])
        here = {v: x for v, x in carried.items() if v in in_place}
        taken = bound(sources, rest)
        for v, at in ((v, before.rows[v]) for v in sources if v in before.rows):
            taken[v] = rows_of(taken[v], number + at.row, 1, 0)
        turn = _Turn(program, segment, taken, here, bound(loaded, given))
        turn.run(known, before.sharded)
        on_host = [turn.known[v] for v in replaced]
        on_device = key_data([turn.known[v] for v in results])
        stores = [_stored_here(turn.known[v]) for v in whole]
        stacks = bound(stacked, carry[4])
        for v, (stack, row, _) in rows.items():
            one = _stored_here(turn.known[v][None])
            stacks[stack] = with_rows(stacks[stack], one, number + row, 0)
        ahead = [turn.on_device[v] for v in segment.ahead]
        after = [turn.known[v] for v in rewritten]
        stores = stores, [*stacks.values()]
        return number + 1, on_device, on_host, *stores, ahead, after, passed

    made = [v for v, at in replaced.items() if at is None]
    buffers = (
        host_buffer(v.aval, next(before.fills), before.zero) for v in (*made, *whole)
    )
    start = (
        jnp.int32(0),
        [_empty(v, before.zero) for v in results],
        [next(buffers) if at is None else before.env[at] for at in replaced.values()],
        [*buffers],
        [_stack(row, before) for row in {x.stack: x for x in rows.values()}.values()],
        [memory.full(memory.device_type(v.aval), before.zero) for v in segment.ahead],
        [before.env[v] for v in rewritten.values()],
        [before.env[v] for v in before.made],
    )
    last, on_device, on_host, stores, stacks, ahead, after, passed = lax.while_loop(
        lambda carry: carry[0] < iterations, once, start
    )
    found = bound(results, Places.of_types(results).keys(on_device))
    found |= bound(replaced, on_host) | bound(rewritten, after)
    found |= bound(before.made, passed)
    return before._replace(
        env=before.env | found,
        resting=before.resting | bound(whole, stores),
        ahead=bound(segment.ahead, ahead),
        made=(),
        zero=last - 1,
        stacks=before.stacks | bound(stacked, stacks),
    )


class _Turn:
    """The one iteration of a segment."""

    def __init__(
        self,
        program: Program,
        segment: Segment,
        hosts: Values,
        in_place: Values,
        loaded: Values,
    ):
        self._program, self._segment = program, segment
        self._hosts, self._in_place = dict(hosts), in_place
        # What is there of that which rests on the host.
        self.on_device = dict(loaded)
        self.known: dict[jex.Var, Any] = {}

    def run(self, known: Values, sharded: Mapping[jex.Var, Sharded]) -> None:
        """Updates, evaluates the equations, and loads what the next turn takes."""
        segment = self._segment
        itself = segment.loaded_itself
        self._load(v for v in segment.own if v not in itself)
        self.known |= known
        self._name(self.on_device)
        updates = [_Update(x.left, sharded) for x in segment.updates if x.left]
        self._update_of = {v: x for x in updates for v in x.results}
        following = [x for x in segment.updates if not x.left]
        self._following = {v: x for x in following for v in x.defines}
        positions = segment.positions
        for tie in segment.ties:
            at = positions.index(tie.product.position)
            self._evaluate(positions[:at])
            positions = positions[at:]
            self._tie(tie)
        self._evaluate(positions)
        for node in segment.updates:
            for v in node.defines:
                self._value(v)
        self._load(v for v in segment.ahead if v not in self.on_device)

    def _tie(self, tie: Tie) -> None:
        """Has some there before a product is computed, and begins others."""
        gradients = [v for move in tie.updates for v in move.gradients]
        held = dict.fromkeys((tie.product.operand, *tie.product.before, *gradients))
        known = [v for v in (*held, *tie.landed) if v in self.known]
        loaded = [v for v in tie.landed if v not in self.known]
        # Of an update of which another result is stored already.
        made = [move.result for move in tie.updates if not move.gradients]
        begin = [move.result for move in tie.loads if move.result in self._hosts]
        values = lax.optimization_barrier(
            (
                [self.known[v] for v in known],
                [self.on_device[v] for v in loaded],
                [self._update_of[v].value(v, self._value) for v in made],
                [self._hosts[v] for v in begin],
            )
        )
        self.known |= bound(known, values[0])
        self.on_device |= bound(loaded, values[1])
        self._hosts |= bound(begin, values[3])
        self._load(move.result for move in tie.loads)
        self._store(made, values[2])
        self._make(move.result for move in tie.updates if move.gradients)

    def _load(self, some: Iterable[jex.Var]) -> None:
        hosts = {**self._hosts, **self._in_place}
        loaded = {v: load_whole(hosts[v]).reshape(shape(v)) for v in some}
        self.on_device |= loaded
        self._name(loaded)

    def _name(self, loaded: Values) -> None:
        names = self._segment.names.items()
        self.known |= {v: loaded[x] for v, x in names if x in loaded}

    def _make(self, results: Iterable[jex.Var]) -> None:
        for v in results:
            self._store([v], [self._update_of[v].value(v, self._value)])

    def _value(self, v: jex.Var) -> Any:
        """The value of a variable; what comes of updates is made when it is taken."""
        if v in self._update_of and v not in self.known:
            self._make([v])
        elif v not in self.known:
            node = self._following[v]
            for x in node.reads:
                self._value(x)
            self._evaluate([node.position])
        return self.known[v]

    def _store(self, results: Iterable[jex.Var], values: Iterable[Any]) -> None:
        for v, x in zip(results, values, strict=True):
            self.known[v] = self._update_of[v].stored(v, x)

    def _evaluate(self, positions: Sequence[int]) -> None:
        self.known |= evaluate(self._program, positions, self.known.__getitem__)


class _Update:
    """What is left of an update, each result computed when it is asked for."""

    def __init__(self, left: RemainingUpdate, sharded: Mapping[jex.Var, Sharded]):
        self.results = bound(left.results, range(len(left.results)))
        self._operands, self._update = left.operands, left.update
        self._sharded = {
            i: sharded[a]
            for i, a in enumerate(left.operands)
            if isinstance(a, jex.Var) and a in sharded
        }
        self._env: dict[jex.Var, Any] = dict(left.update.program.constants)

    def value(self, v: jex.Var, known: Callable[[jex.Var], Any]) -> Any:
        """A result, on the device.

        Args:
          v: The variable that the step has for it.
          known: Returns the values of the step's variables.
        """
        program = self._update.program
        names = bound(program.invars, self._operands)
        result, equations = program.outvars[self.results[v]], program.equations
        missing = needed(equations, variables([result]), self._env)
        taken = {x for i in missing for x in variables(equations[i].invars)}
        taken.update(variables([result]))
        self._env |= {
            x: read(names[x], known) for x in taken if x in names and x not in self._env
        }
        self._env |= evaluate(program, missing, self._env.__getitem__)
        return read(result, self._env.__getitem__)

    def stored(self, v: jex.Var, x: Any) -> Any:
        """A result, where it rests."""
        k, update = self.results[v], self._update
        return rest_of(update, k, self._sharded, update.in_place(k)).stored(x)


def reads(nodes: Iterable[Outer]) -> list[jex.Var]:
    """What nodes take in their order, but for what those before have made."""
    made: set[jex.Var] = set()
    found: dict[jex.Var, None] = {}
    for node in nodes:
        found |= dict.fromkeys(v for v in node.reads if v not in made)
        made.update(node.defines)
    return [*found]


def _captured(program: Program, segment: Segment) -> list[jex.Var]:
    """The variables on the device that a segment takes, and has not loaded."""
    equations = [program.equations[i] for i in segment.positions]
    following = [program.equations[x.position] for x in segment.updates if not x.left]
    defined = {v for e in (*equations, *following) for v in e.outvars}
    defined.update(v for x in segment.updates if x.left for v in x.left.results)
    taken = dict.fromkeys(v for x in segment.updates for v in x.reads)
    taken |= dict.fromkeys(v for e in equations for v in variables(e.invars))
    taken |= dict.fromkeys(segment.stores)
    apart = {*defined, *segment.names, *program.constants}
    return [v for v in taken if v not in apart]


def _resting(v: jex.Var, before: There) -> Any:
    """What a variable is loaded from."""
    row = before.rows.get(v)
    return before.stacks[row.stack] if row else before.resting[v]


def _stack(row: StackRow, before: There) -> Any:
    """The stack of a row; as rows are stored in it, nothing fills it (F87)."""
    if row.stack in before.stacks:
        return before.stacks[row.stack]
    of = memory.stack_type(row.stack.aval, row.rows)
    return memory.full(of, next(before.fills), "pinned_host")


def _stored_here(x: Any) -> Any:
    """What the loop has made, in host memory, where it replaces nothing."""
    return Rest("pinned_host", layout=x, made_here=True).stored(x)


def _empty(v: jex.Var, zero: Any) -> Any:
    """A value of a variable's type; of a random key's the data."""
    aval: Any = v.aval
    if memory.movable_nbytes(aval) is not None:
        return memory.full(aval, zero, memory.kind_of_type(aval))
    data = jax.eval_shape(jax.random.key_data, aval)
    return jnp.zeros(data.shape, data.dtype)

"""A step whose layers no scan runs, cut into segments: a chain of turns.

Each segment is a loop that runs once, in whose body the arguments at rest that the next
segment takes are loaded. So no transfer is between the operations of a step (F01), and
one segment's arguments are on the device, and those of the next. What is left of an
update is in the turn after the one that completes its gradients (`placing.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._ground.units import size_text
from optax_offload._places import memory
from optax_offload._places.step_options import Options
from optax_offload._program import (
    Loaded,
    Step,
    is_load,
    nbytes,
    shape,
    variables,
)
from optax_offload._schedule.beside import Beside
from optax_offload._schedule.late import Reduced, are_late
from optax_offload._schedule.rest import Outer
from optax_offload._schedule.turns import cutting, forward, liveness, placing
from optax_offload._schedule.turns.crossing import Crossing
from optax_offload._schedule.turns.penalties import beside_layers
from optax_offload._schedule.turns.segments import (
    Chain,
    Link,
    Segment,
    in_stacks,
)
from optax_offload._schedule.turns.ties import in_order, small_first
from optax_offload._schedule.turns.uncut import (
    UPDATED_TWICE,
    frees_little,
    is_updated_twice,
    too_few,
)


def chain(
    step: Step, beside: Beside, asked: Options, *, on_tpu: bool = False
) -> Chain | str:
    """Cuts a step; a reason where little would be left out at a time.

    Args:
      step: The step.
      beside: What it evaluates beside the rows of its scans.
      asked: The options that are asked for. Gradients whose update needs all of them
        first wait on the host by "auto" as far as they would raise the peak.
      on_tpu: Whether it is for a TPU's compiler. That spreads transfers over a turn by
        itself, and keeps more where updates are in turns (3.2 MB of a layer of 4 MiB
        instead of 2.0).
    """
    if is_updated_twice(beside.nodes):
        return UPDATED_TWICE
    found = _Cut(step, beside, asked.residuals == "host")
    # Where scans have theirs overlapped, those of updates would be at once, too (F01).
    scans = any(node.in_turns for node in beside.nodes)
    turns = [n for n in found.segments if not scans or found.has_leaves(n)]
    if len(turns) < limits.now.least_segments:
        return too_few()
    reduced = beside.reduced
    operands = (a for node in beside.nodes if node.left for a in node.left.operands)
    freed = max(found.excess, 0) if are_late(step, operands, reduced) else 0
    on_host = asked.late_gradients == "host" and bool(reduced and reduced.sums)
    whole = found.loads or found.residuals or on_host or scans
    part = int(limits.now.least_freed_part * found.peak)
    least = max(limits.now.least_freed_bytes, part)
    if not whole and freed < least:
        return frees_little(size_text(freed), least)
    waiting = found.waiting(on_host=on_host)
    return found.chain(on_tpu, waiting)


class _Cut:
    """The equations of a step, in segments and between them."""

    def __init__(self, step: Step, beside: Beside, residuals: bool):
        nodes, reduced, self._taken = beside.nodes, beside.reduced, beside.taken
        self._step, self._program = step, step.program
        # Also constants of a trace: operands of the step as it is carried out.
        read = {v for e in self._program.equations for v in variables(e.invars)}
        given = {*self._program.invars, *read.difference(self._program.producers)}
        self._arguments = {v for v in given if memory.on_host(v.aval)}
        self._given = given - self._arguments
        self._loaded = Loaded(self._given)
        self._rests = self._loaded.rests
        # Updates, and what follows from them, effects that come after theirs too.
        self._updating: list[Outer] = []
        following: set[jex.Var] = set()
        ordinary: list[Outer] = []
        for node in nodes:
            if node.left or not following.isdisjoint(node.reads):
                self._updating.append(node)
                following.update(node.defines)
            elif not self._is_loaded(node):
                ordinary.append(node)
        if reduced is not None:
            ordinary = self._with_sums_early(ordinary, reduced)
        ordinary = beside_layers(step, ordinary, self._resting)
        self._nodes = ordinary
        self._there = [*liveness.in_memory(step, ordinary)]
        # In the order in which they are complete.
        self._gradients = [] if reduced is None else list(self._taken_by_updates())
        made = {*self._gradients}
        passes = forward.passes(step, ordinary, made, self._live) if residuals else []
        self._passes = passes
        # What may rest between a forward and a backward pass.
        self.residuals = {*forward.residuals(self._there, passes)}
        self._filling, self._pieces, self._loads = self._cut()

    @functools.cached_property
    def segments(self) -> list[int]:
        """The links that are segments, as positions."""
        return [n for n, piece in enumerate(self._pieces) if piece.is_segment]

    def has_leaves(self, n: int) -> bool:
        """Whether a segment loads, or completes gradients, and not residuals alone."""
        nodes = self._links[n]
        made = {v for node in nodes for v in node.defines}
        taken = [v for node in nodes for v in node.reads]
        return not made.isdisjoint(self._gradients) or bool(self._made_of(taken)[1])

    @property
    def _links(self) -> list[Sequence[Outer]]:
        """The equations of each segment, and those between two."""
        return [self._nodes[piece.begin : piece.end] for piece in self._pieces]

    def _with_sums_early(self, nodes: Sequence[Outer], reduced: Reduced) -> list[Outer]:
        """Equations in order, but those that reduce gradients where these are made."""
        made: dict[jex.Var, int] = {}
        after: list[int] = []
        for k, node in enumerate(nodes):
            if node.position in reduced.early:
                k = max((made[v] for v in node.reads if v in made), default=-1)
            after.append(k)
            made |= dict.fromkeys(node.defines, k)
        taken: dict[jex.Var, int] = {}
        for k in reversed(range(len(nodes))):
            if after[k] < 0:  # Of constants: where it is taken first.
                made_here = nodes[k].defines
                after[k] = min((taken[v] for v in made_here if v in taken), default=k)
            for v in nodes[k].reads:
                taken[v] = min(after[k], taken.get(v, after[k]))
        return [nodes[k] for k in sorted(range(len(nodes)), key=after.__getitem__)]

    def _taken_by_updates(self) -> Iterable[jex.Var]:
        """Yields what is computed for updates of what rests."""
        lefts = [node.left for node in self._updating if node.left]
        taken = {
            v
            for left in lefts
            if any(memory.on_host(a.aval) for a in left.operands)
            for v in variables(left.operands)
            if shape(v)
        }
        for node in self._nodes:
            yield from (v for v in node.defines if v in taken)

    @property
    def loads(self) -> bool:
        """Whether segments take anything that rests, and not updates alone."""
        return bool(self._rests)

    @functools.cached_property
    def _live(self) -> list[int]:
        """The bytes that are alive before each equation, but for gradients."""
        return liveness.passing(self._spans, len(self._nodes))

    @functools.cached_property
    def _spans(self) -> list[liveness.Span]:
        counted = liveness.kept(self._step, self._nodes).difference(self._gradients)
        return [*liveness.spans(self._nodes, counted)]

    @property
    def _staying(self) -> list[int]:
        """The same, but for residuals that rest."""
        there = (span for span in self._spans if span.var not in self.residuals)
        return liveness.passing(there, len(self._nodes))

    def _fullest(self, most: int) -> int:
        """The link in which the most is alive: the one of that node."""
        return next(n for n, x in enumerate(self._pieces) if most <= x.end)

    @property
    def excess(self) -> int:
        """The bytes by which gradients, kept until the end, would raise the peak."""
        most, others = self._most
        return most - others

    @property
    def peak(self) -> int:
        """The bytes on the device where most is, with all gradients kept."""
        return nbytes(v for v in self._given if shape(v)) + self._most[0]

    @functools.cached_property
    def _most(self) -> tuple[int, int]:
        """The bytes that are alive where most are, and of these without gradients.

        Beside what is alive there is what turns load; residuals at rest are not.
        """
        live = self._staying
        made, waiting, most, others = {*self._gradients}, 0, 0, 0
        for piece, loads in zip(self._pieces, self._loads, strict=True):
            for k in range(piece.begin, piece.end):
                new = self._nodes[k].defines
                waiting += nbytes(v for v in new if v in made)
                most = max(most, waiting + live[k + 1] + loads)
                others = max(others, live[k] + loads)
        return most, others

    def waiting(self, *, on_host: bool) -> set[jex.Var]:
        """The gradients that are stored if their update needs all of them.

        Args:
          on_host: Whether all are that are worth a transfer, and not only the first.
        """
        found: set[jex.Var] = set()
        left = self.excess
        for v in self._gradients:
            size = memory.movable_nbytes(v.aval) or 0
            if size >= limits.now.least_residual_bytes and (on_host or left > 0):
                found.add(v)
                left -= nbytes([v])
        return found

    def _is_loaded(self, node: Outer) -> bool:
        """Returns whether an equation loads, or is evaluated wherever it is taken."""
        e = self._program.equations[node.position]
        elsewhere = is_load(e) and self._arguments.isdisjoint(variables(e.invars))
        if self._step.tokens(node.position) or elsewhere:
            return False
        loaded = self._loaded
        loaded.add(e)
        kept = self._program.results
        return any(
            v in loaded.rests
            or ((v in loaded or v in loaded.constants) and v not in kept)
            for v in e.outvars
        )

    def _made_of(self, taken: Iterable[jex.Var]) -> tuple[set[int], list[jex.Var]]:
        """The equations that make variables of what rests, and what they take of it."""
        positions, loaded = self._loaded.made_of(self._program, taken)
        codes = (v for v in loaded if not memory.on_host(self._rests[v].aval))
        return {*positions, *(self._program.producers[v] for v in codes)}, loaded

    def _resting(self, taken: Iterable[jex.Var]) -> set[jex.Var]:
        """What is loaded for variables, where it rests."""
        return {self._rests[v] for v in self._made_of(taken)[1]}

    def _cut(self) -> tuple[cutting.Filling, list[cutting.Piece], list[int]]:
        """What fills segments, these and what is between them, and what each loads."""
        nodes, gradients = self._nodes, {*self._gradients}
        filled = gradients | self.residuals
        taken = [
            self._resting(node.reads)
            | filled.intersection(node.defines)
            | self.residuals.intersection(node.reads)
            for node in nodes
        ]
        sizes, most = self._sizes(filled), max(self._staying)
        filling = cutting.Filling(taken, sizes, frozenset(self.residuals), most)
        # What is fused is not handed on, but made again (`crossing.py`).
        passing = liveness.passing(self._there, len(nodes))
        # What has turns of its own, or takes or leaves what rests.
        apart = [node.in_turns or node.at_rest for node in nodes]
        handed = gradients.union(variables(self._program.outvars))
        there, resting = self._there, self.residuals
        spans = forward.near_layers(there, nodes, self._passes, resting)
        alive = [cutting.Alive.of(span, span.var in handed) for span in spans]
        filling, found = cutting.cut(filling, apart, passing, alive)
        return filling, found, cutting.loaded(found, filling)

    def _sizes(self, made: Iterable[jex.Var]) -> dict[jex.Var, int]:
        """The bytes of what is made, and of what rests where it is used: decoded."""
        found = {v: nbytes([v]) for v in (*made, *self._rests.values())}
        for v in {v for node in self._nodes for v in node.reads if v in self._loaded}:
            sources = self._resting([v])
            share = nbytes([v]) / max(1, nbytes(sources))
            for x in sources:
                found[x] = max(found[x], round(share * nbytes([x])))
        return found

    def chain(self, on_tpu: bool, waiting: set[jex.Var]) -> Chain:
        """The chain; gradients that wait do so on the host if they are of these."""
        wanted = {*variables(self._program.outvars), *self._taken}
        kept = wanted.union(*(node.reads for node in self._updating))
        made: dict[jex.Var, int] = {}
        for n, nodes in enumerate(self._links):
            for node in nodes:
                made |= dict.fromkeys(node.defines, n)
        positions = self._positions(kept)
        used: dict[jex.Var, set[int]] = {}
        for n, own in enumerate(positions):
            for v in self._reads(n, own):
                used.setdefault(v, set()).add(n)
        stored = self._stored(made, used, kept)
        stores: dict[int, list[jex.Var]] = {}
        for v, far in stored.items():
            at = self._store_at(made[v])
            after = self._segment_after(at)
            if after in used[v] and self._segment_after(after) not in far:
                at = after  # Which has it anyway, and products beside it.
            stores.setdefault(at, []).append(v)
        links, equations = list[Link](), self._program.equations
        for n, (nodes, piece) in enumerate(zip(self._links, self._pieces, strict=True)):
            if not piece.is_segment:
                links.append(tuple(nodes))
                continue
            taken = [v for i in positions[n] for v in self._step.reads(i)]
            again, loaded = self._made_of(taken)
            sources = ((v, self._rests[v]) for v in loaded)
            names = {v: x for v, x in sources if memory.on_host(x.aval)}
            far = [v for v in dict.fromkeys(taken) if n in stored.get(v, {})]
            names |= {v: v for v in far}
            defined = (v for x in nodes for v in equations[x.position].outvars)
            results = [v for v in defined if v in kept or _is_taken(v, n, used, stored)]
            links.append(
                Segment(
                    small_first(self._program, sorted((*again, *positions[n]))),
                    names,
                    stores=tuple(stores.get(n, ())),
                    results=tuple(results),
                    alone=piece.alone,
                )
            )
        rooms = limits.now.turn_rooms * cutting.room(self._filling)
        turn_bytes = 0 if on_tpu else min(limits.now.turn_bytes, rooms)
        live, pieces = self._staying, zip(self._pieces, self._loads, strict=True)
        alive = [max(live[x.begin : x.end + 1]) + loads for x, loads in pieces]
        room = placing.Room(turn_bytes, alive)
        placed = placing.Placing(self._step, links, made, room=room, on_host=waiting)
        for node in self._updating:
            placed.place(node)
        codes = {x: None for x in self._rests.values() if x in self._given}
        ordered = tuple(in_order(self._step, placed.links(wanted), turn_bytes))
        found = Chain(ordered, tuple(codes))
        if not on_tpu:
            return found
        return dataclasses.replace(found, rows=in_stacks(found.segments))

    def _reads(self, n: int, positions: Sequence[int]) -> set[jex.Var]:
        """What a link takes, if it evaluates these equations."""
        computed = {v for i in positions for v in self._step.defines(i)}
        found = {v for i in positions for v in self._step.reads(i)} - computed
        if not self._pieces[n].is_segment:
            found.update(v for node in self._links[n] for v in node.reads)
        return found

    def _positions(self, kept: set[jex.Var]) -> list[list[int]]:
        """The equations of each link, with those that it evaluates again."""
        reads, parts, fixed = self._step.reads, list[list[int]](), {*kept}
        for nodes, piece in zip(self._links, self._pieces, strict=True):
            parts.append([node.position for node in nodes])
            if not piece.is_segment:
                made = {v for node in nodes for v in node.defines}
                fixed.update(v for x in nodes for v in x.reads if v not in made)
        crossing = Crossing(self._step, parts, fixed, self._is_given)
        taken = ((v for i in part for v in reads(i)) for part in parts)
        again = (crossing.again(some, n) for n, some in enumerate(taken))
        return [[*x, *y] for x, y in zip(parts, again, strict=True)]

    def _is_given(self, v: jex.Var) -> bool:
        """Returns whether each link has a variable, or loads it in no time."""
        if v in self._loaded or v in self._loaded.constants:
            taken = (self._rests[x] for x in self._made_of([v])[1])
            loaded = (x for x in taken if memory.on_host(x.aval))
            return nbytes(loaded) < limits.now.small_bytes
        return v in self._given

    def _segment_after(self, n: int) -> int | None:
        return next((m for m in self.segments if m > n), None)

    def _store_at(self, n: int) -> int:
        """The segment that stores what a link makes."""
        return next(m for m in self.segments if m >= n)

    def _stored(
        self,
        made: Mapping[jex.Var, int],
        used: Mapping[jex.Var, set[int]],
        kept: set[jex.Var],
    ) -> dict[jex.Var, set[int]]:
        """The values that rest until later segments take them, and these.

        Only what goes on where the most is alive: what a layer computes again in the
        backward pass is used up there.
        """
        segments = self.segments
        found: dict[jex.Var, set[int]] = {}
        for each in self._passes:
            fullest = self._fullest(each.most)
            nodes = self._nodes[each.begin : each.backward]
            for v in itertools.chain.from_iterable(node.defines for node in nodes):
                n = made[v]
                if v in kept or n > min(segments[-1], fullest) or not shape(v):
                    continue
                size = memory.movable_nbytes(v.aval) or 0
                if size < limits.now.least_residual_bytes:
                    continue
                near = self._segment_after(self._store_at(n))
                far = {m for m in used.get(v, ()) if near is not None and m > near}
                if far and max(far) > fullest and far.issubset(segments):
                    found[v] = far
        return found


def _is_taken(
    v: jex.Var,
    n: int,
    used: Mapping[jex.Var, set[int]],
    stored: Mapping[jex.Var, set[int]],
) -> bool:
    """Returns whether a later link takes a variable on the device."""
    return any(m > n for m in used.get(v, set()) - stored.get(v, set()))

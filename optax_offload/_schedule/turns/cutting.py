"""Where a step without scans is cut: by what fills a segment, and by what is alive."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._places import memory
from optax_offload._program import nbytes
from optax_offload._schedule.turns.liveness import Span


class Piece(NamedTuple):
    """Equations of a step that are evaluated together.

    Attributes:
      begin: The first of them.
      end: The first after them.
      is_segment: Whether they are a segment, and not between two.
      alone: Whether it loads nothing for the next segment.
    """

    begin: int
    end: int
    is_segment: bool
    alone: bool = False


class Alive(NamedTuple):
    """A value in memory.

    Attributes:
      made: The equation that makes it.
      last: The last one that takes it.
      nbytes: Its bytes, on each device.
      handed: Whether it is taken after all of them, and then used up.
      over: Whether the last one may write over it.
    """

    made: int
    last: int
    nbytes: int
    handed: bool
    over: bool = False

    @classmethod
    def of(cls, span: Span, handed: bool) -> Alive:
        """What a variable is."""
        size = memory.nbytes_on_each_device(span.var.aval)
        return cls(span.made, span.last, size, handed, span.over)


class Filling(NamedTuple):
    """What fills segments.

    Attributes:
      taken: What each equation loads, and the gradients and residuals that it makes.
      sizes: The bytes of each where it is used, on each device: codes are decoded.
      residuals: Those that are residuals.
      alive: The most bytes that are alive at an equation, but for gradients.
      times: How many times as much as usual fills a segment.
    """

    taken: Sequence[set[jex.Var]]
    sizes: Mapping[jex.Var, int]
    residuals: frozenset[jex.Var] = frozenset()
    alive: int = 0
    times: int = 1

    def within(self, begin: int, end: int) -> set[jex.Var]:
        """What some equations load and make."""
        return set[jex.Var]().union(*self.taken[begin:end])

    def size(self, some: Iterable[jex.Var]) -> int:
        """The bytes that are loaded, or those that are made if that is more."""
        loads = made = 0
        for v in some:
            if memory.on_host(v.aval):
                loads += self.sizes[v]
            else:
                made += self.sizes[v]
        return max(loads, made)


def cut(
    filling: Filling,
    apart: Sequence[bool],
    passing: Sequence[int],
    alive: Sequence[Alive],
) -> tuple[Filling, list[Piece]]:
    """The segments of a step, and what is between them, with the least in memory.

    Long segments are worth it where there are as many as are worth cutting at all.

    Args:
      filling: What fills them.
      apart: Whether each equation is in no segment.
      passing: The bytes that go on at each equation to this one or later ones.
      alive: What is in memory in the step.

    Returns:
      What fills these segments, as they are chosen, and them.
    """
    some = [*pieces(filling, apart, passing)]
    if not _are_enough(some):
        filling = filling._replace(alive=0)
        some = [*pieces(filling, apart, passing)]
    found = parted(some, filling, alive)
    for times in limits.now.rooms:
        wider = filling._replace(times=times)
        if room(wider) == room(filling):
            break
        others = parted(pieces(wider, apart, passing), wider, alive)
        if not _are_enough(others):
            break
        if peak(others, wider, alive) < peak(found, filling, alive):
            filling, found = wider, others
    return filling, found


def _are_enough(some: Iterable[Piece]) -> bool:
    return sum(x.is_segment for x in some) >= limits.now.least_segments


def pieces(
    filling: Filling, apart: Sequence[bool], passing: Sequence[int]
) -> Iterator[Piece]:
    """Yields segments, and what is between them.

    A segment that is full ends where the least goes on to the next.

    Args:
      filling: What fills them.
      apart: Whether each is in no segment.
      passing: The bytes that go on at each equation to this one or later ones.
    """
    most = room(filling)
    begin, last, inside = 0, 0, False
    there: set[jex.Var] = set()
    for k, more in enumerate(filling.taken):
        fits = more <= there or filling.size(there | more) <= most
        if inside and (apart[k] or not fits):
            end = k if apart[k] else _end(begin, k, filling, passing, most)
            yield Piece(begin, end, True)
            begin, there = end, filling.within(end, k)
        inside = inside and not apart[k]
        if apart[k] or not more:
            continue
        if not inside and begin < k:
            yield Piece(begin, k, False)
            begin = k
        inside, last = True, k
        there |= more
    if inside:
        yield Piece(begin, last + 1, True)
        begin = last + 1
    if begin < len(apart):
        yield Piece(begin, len(apart), False)


def parted(
    some: Iterable[Piece], filling: Filling, alive: Iterable[Alive]
) -> list[Piece]:
    """Cuts the segment in which the most is in memory once more, while less is then.

    What a segment loads and hands on has a buffer from its beginning, and what it
    takes until its end. So beside the logits there is the gradient of the head, unless
    the segment ends before it is computed, and there are the last layers' parameters,
    unless one begins with the logits, in which nothing is loaded; and beside the layers
    there is the gradient of the logits, unless one ends when it is used up.
    """
    found = [*some]
    large = [x for x in alive if x.nbytes >= limits.now.least_alive_bytes]

    @functools.cache
    def peak(piece: Piece, after: Piece | None) -> int:
        return _peak(piece, large) + _loaded(piece, after, filling)

    now, taken = limits.now, filling.within(0, len(filling.taken))
    margin = now.rooms_of_updates * room(filling)
    least = max(now.least_parted_bytes, now.least_parted_part * filling.size(taken))
    tried: set[Piece] = set()
    while True:
        segments = [n for n, piece in enumerate(found) if piece.is_segment]
        after = {n: found[m] for n, m in itertools.pairwise(segments)}
        peaks = {n: peak(found[n], after.get(n)) for n in segments}
        most = max(peaks.values(), default=0)
        near = [n for n in segments if peaks[n] > most - margin]
        left = [n for n in near if found[n] not in tried]
        if not left:
            return found
        n = max(left, key=peaks.__getitem__)
        tried.add(found[n])
        others = max((peaks[m] for m in segments if m != n), default=0)
        ways = [
            # Loads wait only where that lowers the peak of all.
            (
                max(
                    others * way[-1].alone,
                    *itertools.starmap(peak, itertools.pairwise((*way, after.get(n)))),
                ),
                way,
            )
            for way in _ways(found[n], large)
        ]
        best = min(ways, default=None, key=lambda way: way[0])
        gain = least if peaks[n] == most else margin
        if best is not None and best[0] <= peaks[n] - gain:
            found[n : n + 1] = best[1]


def peak(some: Iterable[Piece], filling: Filling, alive: Iterable[Alive]) -> int:
    """The most bytes that are in memory in a segment, also what is for its updates."""
    large = [x for x in alive if x.nbytes >= limits.now.least_alive_bytes]
    segments = [x for x in some if x.is_segment]
    pairs = zip(segments, (*segments[1:], None), strict=True)
    sizes = (_peak(x, large) + _loaded(x, after, filling) for x, after in pairs)
    return max(sizes, default=0) + limits.now.rooms_of_updates * room(filling)


def loaded(pieces: Sequence[Piece], filling: Filling) -> list[int]:
    """The bytes at rest that are on the device in each, with those of the next one."""
    found = [0] * len(pieces)
    after: Piece | None = None
    for n in reversed(range(len(pieces))):
        if pieces[n].is_segment:
            found[n] = _loaded(pieces[n], after, filling)
            after = pieces[n]
    return found


def _loaded(piece: Piece, after: Piece | None, filling: Filling) -> int:
    """The bytes at rest that are on the device in a segment before another one."""
    ahead = _loads(after, filling) if after and not piece.alone else set[jex.Var]()
    return nbytes(_loads(piece, filling) | ahead)


def _ways(piece: Piece, alive: Iterable[Alive]) -> Iterator[tuple[Piece, ...]]:
    """Yields what a segment may be cut into; only what is large is worth a segment.

    Args:
      piece: The segment.
      alive: What is in memory in a step.
    """
    begin, end, _, alone = piece
    large = [x for x in alive if x.nbytes >= limits.now.least_parted_bytes]
    made = [x for x in large if begin < x.made < end]
    ends = {x.made for x in made if _is_handed(x, piece)}
    ends.update(x.last + 1 for x in large if x.made < begin <= x.last < end - 1)
    for k in sorted(ends):
        yield Piece(begin, k, True), Piece(k, end, True, alone)
    if not alone and made:
        k = max(made, key=lambda x: (x.nbytes, -x.made)).made
        yield (Piece(begin, end, True, alone=True),)
        yield Piece(begin, k, True), Piece(k, end, True, alone=True)


def _loads(piece: Piece, filling: Filling) -> set[jex.Var]:
    """What a segment takes that rests."""
    taken = filling.within(piece.begin, piece.end)
    return {v for v in taken if memory.on_host(v.aval)}


def _peak(piece: Piece, alive: Iterable[Alive]) -> int:
    """The most bytes that are in memory in a piece."""
    begin, end = piece.begin, piece.end
    near = [x for x in alive if x.made < end and max(x.made, x.last) >= begin]
    handed = [x for x in near if _is_handed(x, piece)]
    # Nothing is in the place of what is handed on where that is computed.
    own = {x.made for x in handed}
    near = [x._replace(over=x.over and x.last not in own) for x in near]
    # The changes before each equation of what is there, and of what is waited for.
    there, waits = [0] * (end - begin + 1), [0] * (end - begin + 1)
    for x in near:
        there[max(x.made - begin, 0)] += x.nbytes
        # What a loop takes is there until its end.
        if x.made >= begin and not _is_handed(x, piece):
            there[_after(x) - begin] -= x.nbytes
    for x in handed:
        waits[0] += x.nbytes
        waits[x.made - begin] -= x.nbytes
    pairs = zip(itertools.accumulate(there), itertools.accumulate(waits), strict=True)
    sizes = [*pairs][:-1]
    most = 0
    # Few are looked at: the first are those that have the most if nothing is shared.
    for k in sorted(range(begin, end), key=lambda k: -sum(sizes[k - begin])):
        now, later = sizes[k - begin]
        if now + later <= most:
            break
        inside = [x for x in near if begin <= x.made <= k]
        inside = [x.nbytes for x in inside if _after(x) > k or _is_handed(x, piece)]
        most = max(most, now + _left([x for x in handed if x.made > k], inside))
    return most


def _after(x: Alive) -> int:
    """The first equation that may have something else in its place."""
    return max(x.last + 1 - x.over, x.made + 1)


def _is_handed(x: Alive, piece: Piece) -> bool:
    """Returns whether a piece makes a value for others."""
    return piece.begin <= x.made < piece.end and (x.handed or x.last >= piece.end)


def _left(waiting: Iterable[Alive], inside: Iterable[int]) -> int:
    """The bytes of buffers that nothing uses, before what is handed on is written.

    A compiler has something else there that is computed inside, if it fills at least
    half.
    """
    unused, sizes = 0, sorted(inside)
    for x in sorted(waiting, key=lambda x: x.nbytes):
        fits = [n for n, size in enumerate(sizes) if 2 * size >= x.nbytes >= size]
        unused += x.nbytes - (sizes.pop(fits[-1]) if fits else 0)
    return unused


def room(filling: Filling) -> int:
    """The bytes that fill a segment of a step."""
    taken = filling.within(0, len(filling.taken))
    now = limits.now
    size = filling.size(taken)
    part = size / now.many_bytes
    usual = now.segment_bytes * max(1 / now.least_part, min(part, part**0.5))
    more = max(0, filling.alive - now.much_alive_bytes)
    share = min(more / now.alive_share, now.most_room * now.segment_bytes)
    layer, residual = _layer(taken, filling), _residual(filling)
    if residual > now.segment_bytes:
        usual = residual + min(layer, usual)
    else:
        share = min(share, size / now.most_share)
    layers = max(now.most_layers * layer, layer + residual)
    most = min(filling.times * max(usual, share), layers)
    return round(max(min(usual, now.segment_bytes), most))


def _residual(filling: Filling) -> int:
    """The bytes of the largest residuals, if there are as many as turns: no logits."""
    least = limits.now.least_segments
    sizes = heapq.nlargest(least, (filling.sizes[v] for v in filling.residuals))
    return sizes[-1] if len(sizes) == least else 0


def _layer(taken: Iterable[jex.Var], filling: Filling) -> float:
    """The bytes that a layer takes of what rests; infinite where layers differ.

    There are as many layers as divide the number of the arrays of each shape, but for
    those of which there is one.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for v in taken:
        if memory.on_host(v.aval) and filling.sizes[v] >= limits.now.least_alive_bytes:
            shapes.setdefault(memory.shape_on_each_device(v.aval), []).append(
                filling.sizes[v]
            )
    like = [sizes for sizes in shapes.values() if len(sizes) > 1]
    layers = math.gcd(*map(len, like))
    return sum(map(sum, like)) / layers if layers > 1 else math.inf


def _end(
    begin: int,
    full: int,
    filling: Filling,
    passing: Sequence[int],
    room: int,
) -> int:
    """Where a segment ends, in the second half of what it may take.

    Args:
      begin: The first of its nodes.
      full: The node for which it has no room.
      filling: What fills them.
      passing: The bytes that go on at each node to this one or later ones.
      room: The bytes that fill a segment.
    """
    there: set[jex.Var] = set()
    # What fills it before each node, and before the full one, in bytes.
    before = [0]
    for some in filling.taken[begin:full]:
        there |= some
        before.append(filling.size(there) if some else before[-1])
    found, least = full, passing[full]
    after = {*filling.taken[full]}
    for k in range(full - 1, begin, -1):
        after |= filling.taken[k]
        full_too = filling.taken[k] and filling.size(after) > room
        if full_too or 2 * before[k - begin] < before[-1]:
            break
        if passing[k] < least:
            found, least = k, passing[k]
    return found

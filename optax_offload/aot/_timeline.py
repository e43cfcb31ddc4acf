"""A modeled device carries out the schedule of a compiled program.

The model is deliberately simple:

- A transfer takes a latency and its bytes over the bandwidth of the link. Loads wait
  for loads and stores for stores, in the order in which they are started; a load and a
  store do not disturb each other. A copy within host memory occupies both directions.
- A transfer that a kernel does, and no copy engine, occupies the device: nothing else
  is computed beside it.
- The device carries out the schedule in order. A `-start` begins a transfer and goes
  on, its `-done` waits. A transfer without them is waited for at once.
- Any other operation takes the longer of its matrix products over the chip's peak rate
  for what they multiply, and the bytes it touches in device memory over its bandwidth.
  Moves within the device that have a `-start`, and VMEM, are free; collectives count as
  the bytes they touch. So computation is a little faster than it is, and hides less.
- Loops are carried out iteration by iteration. Of the branches of a conditional the one
  that moves most is taken.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from optax_offload._host.link import LINK, Link
from optax_offload.aot._dataflow import accesses, touches_no_data, trip_count
from optax_offload.aot._hlo import DEVICE_SPACE, Computation, Module, parse
from optax_offload.aot._products import Flops, flops
from optax_offload.aot.chips import CHIPS
from optax_offload.aot.targets import Target
from optax_offload.aot.transfers import Transfer, instruction_transfers

_H100 = CHIPS["h100"]
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Model:
    """The rates from which times are modeled.

    Attributes:
      link: The link to the host.
      memory_bytes_per_second: Bandwidth of device memory.
      flops_per_second: Matrix products of float32 at JAX's default precision.
      narrow_flops_per_second: Matrix products of 16 bits, such as bfloat16.
    """

    link: Link = LINK
    memory_bytes_per_second: float = _H100.memory_bytes_per_second
    flops_per_second: float = _H100.float32_flops_per_second
    narrow_flops_per_second: float = _H100.flops_per_second

    @classmethod
    def of(cls, target: Target, bytes_per_second: float | None = None) -> Model:
        """The model of a target's chip.

        Args:
          target: The target that the program was compiled for.
          bytes_per_second: Bandwidth of the link, instead of the documented one.
        """
        chip, link = target.chip, target.chip.link
        if bytes_per_second is not None:
            link = dataclasses.replace(link, bytes_per_second=bytes_per_second)
        return cls(
            link=link,
            memory_bytes_per_second=chip.memory_bytes_per_second,
            flops_per_second=chip.float32_flops_per_second,
            narrow_flops_per_second=chip.flops_per_second,
        )

    def least_seconds(self, nbytes: int) -> float:
        """The time of a transfer without latency."""
        return nbytes / self.link.bytes_per_second

    def compute_seconds(self, nbytes: int, flops: Flops) -> float:
        """The time of an operation: its bytes or its products, what takes longer."""
        wide = flops.wide / self.flops_per_second
        narrow = flops.narrow / self.narrow_flops_per_second
        return max(nbytes / self.memory_bytes_per_second, wide + narrow)


@dataclasses.dataclass(eq=False)
class TimedMove:
    """A transfer of an instruction in one direction; in a loop it runs many times.

    Attributes:
      name: The instruction that starts it.
      direction: `"load"`, `"store"` or `"host copy"`.
      form: The operation, as of `aot.Transfer`.
      kernel: Whether a kernel does it, and no copy engine.
      nbytes: The bytes that are moved each time.
      asynchronous: Whether it has a start and a done.
      between: The operations that are computed between those.
      runs: The number of times that it runs in a step.
    """

    name: str
    direction: str
    form: str
    kernel: bool
    nbytes: int
    asynchronous: bool
    between: int = 0
    runs: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """The beginning of the transfers of an instruction."""

    moves: tuple[TimedMove, ...]


@dataclasses.dataclass(frozen=True)
class Done:
    """The wait for their end."""

    start: Start


@dataclasses.dataclass(eq=False)
class Place:
    """A computation that has transfers: the top level, a loop's body, a branch.

    Attributes:
      name: The instruction that runs it.
      kind: `"top level"`, `"loop"` or `"branch"`.
      trip_count: The number of times that a loop runs; None if the text does not tell
        (then 1 is modeled).
      steps: Its schedule: seconds of computation, transfers, other places.
      taken: False of a branch that is not carried out.
      runs: The number of its runs in a step; 0 for a branch that is not taken.
      most_in_flight: Loads, stores, and both together while there are some of both,
        between their starts and dones.
      seconds: The modeled time of all its runs together.
    """

    name: str
    kind: str
    trip_count: int | None
    steps: list[Step]
    taken: bool = True
    runs: int = 0
    most_in_flight: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 0.0

    @property
    def times(self) -> int:
        """The number of its runs each time that it is reached."""
        return (self.trip_count or 1) if self.taken else 0

    @property
    def moves(self) -> list[TimedMove]:
        """The transfers in it, without those in other places."""
        return [m for step in self.steps if isinstance(step, Start) for m in step.moves]

    @property
    def places(self) -> Iterator[Place]:
        """It, and all places in it."""
        yield self
        for step in self.steps:
            if isinstance(step, Place):
                yield from step.places

    @property
    def moved_bytes(self) -> int:
        """The bytes that one run moves."""
        inner = (s for s in self.steps if isinstance(s, Place))
        own = sum(m.nbytes for m in self.moves)
        return own + sum(place.times * place.moved_bytes for place in inner)

    @property
    def compute_seconds(self) -> float:
        """The time of one run if transfers take none."""
        total = 0.0
        for step in self.steps:
            if isinstance(step, Place):
                total += step.times * step.compute_seconds
            elif not isinstance(step, Start | Done):
                total += step
        return total


# What a schedule consists of; a number is seconds of computation.
Step = float | Start | Done | Place


def read(text: str, model: Model) -> Place:
    """The schedule of a program, of `compiled.as_text()`.

    Raises:
      ValueError: The text is not that of a scheduled program.
    """
    module = parse(text)
    return Place("entry", "top level", 1, _steps(module, module.entry, model))


def _steps(module: Module, computation: Computation, model: Model) -> list[Step]:
    steps: list[Step] = []
    starts: dict[str, Start] = {}
    for i in computation:
        if i.opcode == "while" and (body := module.called(i, "body")):
            trips = trip_count(module, computation, i)
            loop = Place(i.name, "loop", trips, _steps(module, body, model))
            steps += _one_of([loop])
        elif i.opcode == "conditional":
            inner = [(name, module.computations[name]) for name in i.branches]
            steps += _one_of(
                Place(f"{i.name}/{name}", "branch", 1, _steps(module, branch, model))
                for name, branch in inner
            )
        elif i.opcode == "call" and (to := module.called(i, "to_apply")):
            steps += _steps(module, to, model)
        elif i.ends:
            if i.opcode.endswith("-done") and i.operands[0] in starts:
                steps.append(Done(starts.pop(i.operands[0])))
        elif not touches_no_data(i):
            start = Start(_moves(instruction_transfers(module, computation, i)))
            if start.moves:
                starts[i.name] = start
                steps += [start] if i.starts else [start, Done(start)]
            # Computation that is asynchronous (on a GPU, on a stream of its own) is
            # taken to be done where it starts.
            if not i.starts or (module.called(i) is not None and not start.moves):
                reads, writes = accesses(module, computation, i)
                touched = [n for a, n in (*reads, *writes) if a.space == DEVICE_SPACE]
                work = flops(module, computation, i)
                steps.append(model.compute_seconds(sum(touched), work))
    return steps


def _moves(transfers: Iterable[Transfer]) -> tuple[TimedMove, ...]:
    """One move for each direction, since an instruction moves all arrays at once."""
    found = {}
    for t in transfers:
        move = TimedMove(
            t.name, t.direction, t.form, t.by == "kernel", 0, t.asynchronous
        )
        found.setdefault(t.direction, move).nbytes += t.nbytes
    return tuple(found.values())


def _one_of(places: Iterable[Place]) -> Iterator[Step]:
    """The places of which the one that moves most is carried out.

    One in which nothing is moved is a single operation.
    """
    places = list(places)
    taken = max(places, key=lambda p: (p.moved_bytes, p.compute_seconds), default=None)
    for place in places:
        place.taken = place is taken
        if any(isinstance(step, Start | Place) for step in place.steps):
            yield place
        elif place.taken:
            yield place.times * place.compute_seconds


class Timeline:
    """A step as the modeled device carries it out.

    Attributes:
      model: The rates from which times are modeled.
      places: The computations that have transfers.
      seconds: The time of the step.
      compute_seconds: The time of the step with transfers that take none.
      spans: The time of each transfer, by its direction.
      most_in_flight: Loads, stores, and both together while there are some of both,
        between their starts and dones.
    """

    def __init__(self, top: Place, model: Model):
        """Carries out a schedule, once."""
        self.model = model
        self.seconds = self.compute_seconds = 0.0
        self.most_in_flight = (0, 0, 0)
        self.spans: dict[str, list[Span]] = {"load": [], "store": [], "host copy": []}
        self._operations = 0
        self._free = {"load": 0.0, "store": 0.0}  # when each direction is free
        # When those in flight end, and the operations before they started.
        self._in_flight: dict[Start, tuple[float, int]] = {}
        self._run(top)
        # Also what the program's text does not wait for.
        self.seconds = max(self.seconds, *self._free.values())
        self.places = [place for place in top.places if place.moves]

    @classmethod
    def of(cls, text: str, model: Model | None = None) -> Timeline:
        """That of a scheduled program, of `compiled.as_text()`.

        Raises:
          ValueError: The text is not that of a scheduled program.
        """
        model = model or Model()
        return cls(read(text, model), model)

    def _run(self, place: Place) -> None:
        place.runs += 1
        before = self.seconds
        own: dict[Start, None] = {}
        for step in place.steps:
            if isinstance(step, Start):
                self._start(step)
                own[step] = None
                place.most_in_flight = _most(place.most_in_flight, own)
            elif isinstance(step, Done):
                self._wait(step.start)
                del own[step.start]
            elif isinstance(step, Place):
                for _ in range(step.times):
                    self._run(step)
            else:
                self.seconds += step
                self.compute_seconds += step
                self._operations += 1
        place.seconds += self.seconds - before

    def _start(self, start: Start) -> None:
        ends = []
        for move in start.moves:
            copy = move.direction == "host copy"
            ways = ("load", "store") if copy else (move.direction,)
            begin = max([self.seconds, *(self._free[w] for w in ways)])
            end = begin + self.model.link.seconds(move.nbytes)
            self._free |= dict.fromkeys(ways, end)
            self.spans[move.direction].append((begin, end))
            ends.append(end)
            move.runs += 1
            if move.kernel:
                self.seconds = end
        self._in_flight[start] = (max(ends), self._operations)
        self.most_in_flight = _most(self.most_in_flight, self._in_flight)

    def _wait(self, start: Start) -> None:
        end, operations = self._in_flight.pop(start)
        self.seconds = max(self.seconds, end)
        for move in start.moves:
            move.between = self._operations - operations

    def moves(self, direction: str) -> list[TimedMove]:
        """The transfers in one direction that run, once each."""
        found = (m for p in self.places for m in p.moves)
        return [m for m in found if m.direction == direction and m.runs]

    def count(self, direction: str) -> int:
        """The number of these that are carried out in a step."""
        return sum(t.runs for t in self.moves(direction))

    def sizes(self, direction: str) -> list[int]:
        """The bytes of each that is carried out."""
        return [t.nbytes for t in self.moves(direction) for _ in range(t.runs)]

    @property
    def link_seconds(self) -> float:
        """The time during which a transfer is under way."""
        return length(span for spans in self.spans.values() for span in spans)

    @property
    def load_seconds(self) -> float:
        """The time during which a load is under way."""
        return length(self.spans["load"])

    @property
    def store_seconds(self) -> float:
        """The time during which a store is under way."""
        return length(self.spans["store"])

    @property
    def least_seconds(self) -> float:
        """The time of the direction that moves more, without any latency."""
        sizes = (sum(self.sizes(d)) for d in ("load", "store"))
        return self.model.least_seconds(max(sizes))


def length(spans: Iterable[Span]) -> float:
    """The time that is in any of the spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _most(most: tuple[int, int, int], starts: Iterable[Start]) -> tuple[int, int, int]:
    """The most in flight so far, or now: loads, stores, both if there are some."""
    flying = Counter(m.direction for start in starts for m in start.moves)
    loads, stores = flying["load"], flying["store"]
    both = loads + stores if loads and stores else 0
    return max(most[0], loads), max(most[1], stores), max(most[2], both)

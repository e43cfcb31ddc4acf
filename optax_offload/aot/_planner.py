"""Turns the text of a program into the plan that a modelled device carries out."""

from __future__ import annotations

import dataclasses
from typing import Any

from optax_offload.aot._dataflow import accesses, touches_no_data, trip_count
from optax_offload.aot._hlo import DEVICE_SPACE, Computation, Instruction, Module
from optax_offload.aot._model import Model
from optax_offload.aot._products import flops
from optax_offload.aot.transfers import Transfer, instruction_transfers


@dataclasses.dataclass(eq=False)
class Move:
    """A transfer of an instruction in one direction; in a loop it runs many times.

    Attributes:
      name: The instruction that starts it.
      direction: `"load"`, `"store"` or `"host copy"`.
      form: The operation, as of `aot.Transfer`.
      kernel: Whether a kernel does it, and no copy engine.
      nbytes: The bytes that are moved each time.
      asynchronous: Whether it has a start and a done.
      between: The operations that are computed between those.
      between_seconds: The time that they take by the model.
      runs: The number of times that it runs in a step.
    """

    name: str
    direction: str
    form: str
    kernel: bool
    nbytes: int
    asynchronous: bool
    between: int = 0
    between_seconds: float = 0.0
    runs: int = 0

    @property
    def how(self) -> str:
        """A description for a person, such as `load: sync dynamic-slice kernel`."""
        waited = "" if self.asynchronous else "sync "
        kernel = " kernel" if self.kernel and self.form != "fusion" else ""
        return f"{self.direction}: {waited}{self.form}{kernel}"


@dataclasses.dataclass(eq=False)
class Place:
    """A computation that has transfers: the top level, a loop's body, a branch.

    Attributes:
      name: The instruction that runs it.
      kind: `"top level"`, `"loop"` or `"branch"`.
      trip_count: The number of times that a loop runs; None if the text does not tell
        (then 1 is modelled).
      moves: The transfers in it, without those in computations that it calls.
      runs: The number of its runs in a step; 0 for a branch that is not taken.
      most_loads: Loads in flight at once, between their starts and dones.
      most_stores: Stores in flight at once, between their starts and dones.
      most_together: Loads and stores in flight at once while there are some of both.
      seconds: The modelled time of all its runs together.
    """

    name: str
    kind: str
    trip_count: int | None
    moves: list[Move] = dataclasses.field(default_factory=list)
    runs: int = 0
    most_loads: int = 0
    most_stores: int = 0
    most_together: int = 0
    seconds: float = 0.0

    def nbytes(self, direction: str) -> int:
        """The bytes that all its runs move."""
        return sum(m.nbytes * m.runs for m in self.moves if m.direction == direction)

    def efficiency(self, model: Model) -> float:
        """The least link time of what it moves, over all its time."""
        size = max(self.nbytes("load"), self.nbytes("store"))
        return model.least_seconds(size) / self.seconds if self.seconds else 0.0


# A plan is what the schedule of a computation comes to: a list of these.


@dataclasses.dataclass(frozen=True)
class Compute:
    seconds: float


@dataclasses.dataclass(frozen=True)
class Start:
    key: tuple[str, str]
    moves: tuple[Move, ...]


@dataclasses.dataclass(frozen=True)
class Done:
    key: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Enter:
    """A loop, or the branch of a conditional, that has transfers."""

    plan: list[Any]
    place: Place
    times: int


Step = Compute | Start | Done | Enter


class Planner:
    """Makes plans from a program's text, and finds the places that have transfers."""

    def __init__(self, module: Module, model: Model):
        self.module = module
        self.model = model
        self.places: list[Place] = []

    def plan(self, computation: Computation, place: Place) -> list[Step]:
        steps: list[Step] = []
        for i in computation:
            if i.opcode == "while":
                steps += self._loop(computation, i)
            elif i.opcode == "conditional":
                steps += self._conditional(i)
            elif i.opcode == "call" and (to := self.module.called(i, "to_apply")):
                steps += self.plan(to, place)
            else:
                steps += self._operation(computation, i, place)
        return steps

    def _loop(self, caller: Computation, i: Instruction) -> list[Step]:
        body = self.module.called(i, "body")
        assert body is not None, i
        trips = trip_count(self.module, caller, i)
        return self._enter(body, Place(i.name, "loop", trips), trips or 1)

    def _enter(self, computation: Computation, place: Place, times: int) -> list[Step]:
        at = len(self.places)
        self.places.append(place)
        plan = self.plan(computation, place)
        if any(p.moves for p in self.places[at:]):
            return [Enter(plan, place, times)]
        del self.places[at:]
        # Nothing is moved in it: a single operation.
        return [Compute(times * compute_seconds(plan))]

    def _conditional(self, i: Instruction) -> list[Step]:
        plans = [
            self._enter(
                self.module.computations[n], Place(f"{i.name}/{n}", "branch", 1), 1
            )
            for n in i.branches
        ]
        return max(plans, key=_weight, default=[])

    def _operation(
        self, computation: Computation, i: Instruction, place: Place
    ) -> list[Step]:
        if touches_no_data(i):
            return []
        if i.ends:
            done = i.opcode.endswith("-done")
            return [Done((computation.name, i.operands[0]))] if done else []
        moves = _moves(instruction_transfers(self.module, computation, i))
        place.moves += moves
        key = (computation.name, i.name)
        steps: list[Step] = [Start(key, moves)] if moves else []
        if moves and not i.starts:
            steps.append(Done(key))
        if not i.starts or (self.module.called(i) is not None and not moves):
            # Computation that is asynchronous (on a GPU, on a stream of its own) is
            # taken to be done where it starts.
            reads, writes = accesses(self.module, computation, i)
            touched = [n for a, n in (*reads, *writes) if a.space == DEVICE_SPACE]
            work = flops(self.module, computation, i)
            steps.append(Compute(self.model.compute_seconds(sum(touched), work)))
        return steps


def _moves(transfers: tuple[Transfer, ...]) -> tuple[Move, ...]:
    """One move for each direction, since an instruction moves all arrays at once."""
    found = {}
    for t in transfers:
        move = Move(t.name, t.direction, t.form, t.by == "kernel", 0, t.asynchronous)
        found.setdefault(t.direction, move).nbytes += t.nbytes
    return tuple(found.values())


def compute_seconds(plan: list[Step]) -> float:
    """The time of a plan if transfers take none."""
    total = 0.0
    for step in plan:
        if isinstance(step, Compute):
            total += step.seconds
        elif isinstance(step, Enter):
            total += step.times * compute_seconds(step.plan)
    return total


def _weight(plan: list[Step]) -> tuple[int, float]:
    """The bytes that a plan moves, and then the seconds that it computes."""
    moved = 0
    for step in plan:
        if isinstance(step, Start):
            moved += sum(m.nbytes for m in step.moves)
        elif isinstance(step, Enter):
            moved += step.times * _weight(step.plan)[0]
    return moved, compute_seconds(plan)

"""Transfers between host and device memory, as the compiler scheduled them.

Read from the text of a compiled program, for chips that need not be here: how many
loads and stores there are, how large, how many in flight at once, and what is computed
meanwhile. A model of the link then says how well the schedule could use it.

Run:
    python benchmarks/census.py
    python benchmarks/census.py --workloads=leaves --targets=h100 --modes=ours
    python benchmarks/census.py --hlo=program.txt --targets=h100

The model, deliberately simple:

- A transfer takes a latency and its bytes over the bandwidth. Loads wait for loads and
  stores for stores, in the order in which they are started; a load and a store do not
  disturb each other. A copy within host memory occupies both directions.
- The device carries out the schedule in order. A `-start` begins a transfer and goes
  on, its `-done` waits. A transfer without them ("sync") is waited for at once.
- Any other operation takes the longer of its matrix products over the peak rate of the
  chip, and the bytes it touches in device memory over the bandwidth of that. Moves
  within the device that have a `-start`, and VMEM, are free; collectives count as the
  bytes they touch. So computation is a little faster than it is, and hides less.
- Loops are carried out iteration by iteration. Of the branches of a conditional the one
  that moves most is taken.

What it reports of the link:

- `efficiency`: the bytes of the direction that has more to do over the bandwidth (the
  least time there could be), over the time during which a transfer is under way in
  either direction. 1 is a link that is full both ways whenever it is used; loads and
  stores one after the other are 0.5 or less, and latency and copies within host
  memory lower it. All time that the device waits for a transfer is such time, so this
  is least time / (exposed time + link time that is hidden behind computation). A link
  that is idle while the device computes is not counted: see `step / floor`.
- `both ways`: the share of the busy time of the direction that has less to do, in which
  the other one is busy too.
- `exposed`: how much longer the step takes than with transfers that take no time.
- `step / floor`: the step, over the longer of its computation and the least link time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hlo
import jax
from absl import app, flags
from spans import Span, length
from steps import MODES, compile_step
from workloads import WORKLOADS

from optax_offload import aot

FLAGS = flags.FLAGS

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Model:
    """What the modelled times are made of.

    Attributes:
      gb_per_second: of the link, in each direction.
      latency_us: of each transfer.
      memory_gb_per_second: of device memory.
      peak_tflops: of matrix products at JAX's default precision.
    """

    gb_per_second: float = 50.0
    latency_us: float = 10.0
    memory_gb_per_second: float = 3352.0
    peak_tflops: float = 495.0

    def transfer_seconds(self, size: int) -> float:
        return self.latency_us / 1e6 + self.least_seconds(size)

    def least_seconds(self, size: int) -> float:
        return size / self.gb_per_second / 1e9

    def compute_seconds(self, size: int, flops: int) -> float:
        memory = size / self.memory_gb_per_second / 1e9
        return max(memory, flops / self.peak_tflops / 1e12)


# Memory bandwidth and dense matrix products, from the makers' data sheets: in TF32 on
# an H100 SXM, and in bfloat16 on TPUs, whose default precision for float32 that is.
CHIPS = {
    "h100": (3352.0, 495.0),
    "h200": (4800.0, 495.0),
    "a100-80": (2039.0, 156.0),
    "v5e": (819.0, 197.0),
    "v5p": (2765.0, 459.0),
    "v6e": (1640.0, 918.0),
}


def model_of(target: str, gb_per_second: float, latency_us: float) -> Model:
    """The model of a target, by its chip."""
    return Model(gb_per_second, latency_us, *CHIPS[target.partition(":")[0]])


@dataclasses.dataclass(eq=False)
class Transfer:
    """A transfer in the program's text; in a loop it is carried out many times.

    Attributes:
      name: of the instruction that starts it.
      direction: "load", "store" or "host copy".
      form: the operation: "copy", "dynamic-slice", ...; "fusion" computes on
        host memory, a "... kernel" is a move that a GPU's copy engines do not do.
      bytes: what is moved each time.
      asynchronous: it has a start and a done.
      between: operations that are computed between those.
      between_seconds: what they take by the model.
      runs: how often it is carried out in a step.
    """

    name: str
    direction: str
    form: str
    bytes: int
    asynchronous: bool
    between: int = 0
    between_seconds: float = 0.0
    runs: int = 0


@dataclasses.dataclass(eq=False)
class Place:
    """A computation that has transfers: the top level, a loop's body, a branch.

    Attributes:
      name: of the instruction that runs it.
      kind: "top level", "loop" or "branch".
      trip_count: of a loop, None if the text does not tell (then 1 is modelled).
      transfers: those in it, not in what it calls.
      runs: how often it is carried out in a step; 0 is a branch not taken.
      most_loads: in flight at once, between their starts and dones.
      most_stores: as above.
      most_together: loads and stores, in flight at once while there are some of both.
      seconds: by the model, all runs together.
    """

    name: str
    kind: str
    trip_count: int | None
    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    runs: int = 0
    most_loads: int = 0
    most_stores: int = 0
    most_together: int = 0
    seconds: float = 0.0

    def bytes(self, direction: str) -> int:
        """What all runs of it move."""
        return sum(t.bytes * t.runs for t in self.transfers if t.direction == direction)

    def efficiency(self, model: Model) -> float:
        """As of a census, but of all its time."""
        size = max(self.bytes("load"), self.bytes("store"))
        return model.least_seconds(size) / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class Census:
    """The transfers of a step, and what the model makes of them. See the module.

    Attributes:
      model: what the times are made of.
      places: where there are transfers.
      seconds: the step.
      compute_seconds: the step with transfers that take no time.
      link_seconds: a transfer is under way.
      both_seconds: a load and a store are under way.
      span_seconds: from the first start to the last done.
      most_in_flight: loads, stores, and both together while there are some of both,
        between their starts and dones.
    """

    model: Model
    places: list[Place]
    seconds: float
    compute_seconds: float
    link_seconds: float
    both_seconds: float
    span_seconds: float
    most_in_flight: tuple[int, int, int]

    def transfers(self, direction: str) -> list[Transfer]:
        """Those that are carried out, once each."""
        found = (t for p in self.places for t in p.transfers)
        return [t for t in found if t.direction == direction and t.runs]

    def count(self, direction: str) -> int:
        """How many are carried out in a step."""
        return sum(t.runs for t in self.transfers(direction))

    def sizes(self, direction: str) -> list[int]:
        """The bytes of each that is carried out."""
        return [t.bytes for t in self.transfers(direction) for _ in range(t.runs)]

    @property
    def synchronous(self) -> int:
        """Transfers (also host copies) that are waited for at once, in a step."""
        found = (t for p in self.places for t in p.transfers)
        return sum(t.runs for t in found if not t.asynchronous)

    @property
    def least_seconds(self) -> float:
        """What the direction that has more to do would take without any latency."""
        sizes = (sum(self.sizes(d)) for d in ("load", "store"))
        return self.model.least_seconds(max(sizes))

    @property
    def efficiency(self) -> float | None:
        """Of the link while it is used; None without transfers."""
        return self.least_seconds / self.link_seconds if self.link_seconds else None

    @property
    def both_ways(self) -> float | None:
        """The share of the lesser direction's time in which both are busy."""
        seconds = [
            sum(map(self.model.transfer_seconds, self.sizes(d)))
            for d in ("load", "store")
        ]
        return self.both_seconds / min(seconds) if min(seconds) else None

    @property
    def exposed_seconds(self) -> float:
        """How much longer the step takes for its transfers."""
        return self.seconds - self.compute_seconds

    @property
    def over_floor(self) -> float:
        """The step over the longer of its computation and the least link time."""
        floor = max(self.compute_seconds, self.least_seconds)
        return self.seconds / floor if floor else 1.0

    def summary(self) -> dict[str, Any]:
        """What a row of the table has, for JSON."""
        row: dict[str, Any] = {"model": dataclasses.asdict(self.model)}
        for direction in ("load", "store", "host copy"):
            sizes = self.sizes(direction)
            between = [t.between for t in self.transfers(direction)]
            row[direction] = {
                "count": len(sizes),
                "bytes": sum(sizes),
                "least_bytes": min(sizes, default=None),
                "median_bytes": statistics.median(sizes) if sizes else None,
                "most_bytes": max(sizes, default=None),
                "median_between": statistics.median(between) if between else None,
                "forms": dict(Counter(map(_form, self.transfers(direction)))),
            }
        row["median_bytes"] = self.median_bytes
        row["most_in_flight"] = self.most_in_flight
        for name in ("synchronous", "efficiency", "both_ways", "over_floor"):
            row[name] = getattr(self, name)
        for name in ("", "compute_", "exposed_", "least_", "link_", "span_"):
            row[f"{name}seconds"] = getattr(self, f"{name}seconds")
        row["places"] = [
            {
                **{k: v for k, v in vars(p).items() if k != "transfers"},
                "efficiency": p.efficiency(self.model),
                "transfers": dict(Counter(map(_form, p.transfers))),
            }
            for p in self.places
        ]
        return row

    @property
    def median_bytes(self) -> float | None:
        """Of all loads and stores of a step."""
        sizes = self.sizes("load") + self.sizes("store")
        return statistics.median(sizes) if sizes else None


def _form(transfer: Transfer) -> str:
    how = "" if transfer.asynchronous else "sync "
    return f"{transfer.direction}: {how}{transfer.form}"


def census(text: str, model: Model | None = None) -> Census:
    """The transfers in a scheduled program, of `compiled.as_text()`.

    Raises:
      ValueError: the text is not that of a scheduled program.
    """
    planner = _Planner(hlo.parse(text), model or Model())
    top = Place("entry", "top level", 1)
    planner.places.append(top)
    plan = planner.plan(planner.module.entry, top)
    run = _Run(planner.model)
    run.carry_out(plan, top)
    run.finish()
    return Census(
        model=planner.model,
        places=[p for p in planner.places if p.transfers],
        seconds=run.clock,
        compute_seconds=run.computed_seconds,
        link_seconds=run.link_seconds,
        both_seconds=run.both_seconds,
        span_seconds=run.span_seconds,
        most_in_flight=run.most_in_flight,
    )


# A plan is what the schedule of a computation comes to: a list of these.


@dataclasses.dataclass(frozen=True)
class _Compute:
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Start:
    key: tuple[str, str]
    transfers: tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True)
class _Done:
    key: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class _Enter:
    """A loop, or the branch of a conditional, that has transfers."""

    plan: list[Any]
    place: Place
    times: int


_Step = _Compute | _Start | _Done | _Enter

# Names for values, and what is done at compile time: no data is touched.
_FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape"}


class _Planner:
    """From a program's text to plans, and the places that have transfers."""

    def __init__(self, module: hlo.Module, model: Model):
        self.module = module
        self.model = model
        self.places: list[Place] = []

    def plan(self, computation: hlo.Computation, place: Place) -> list[_Step]:
        steps: list[_Step] = []
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

    def _loop(self, caller: hlo.Computation, i: hlo.Instruction) -> list[_Step]:
        body = self.module.called(i, "body")
        assert body is not None, i
        trips = hlo.trip_count(self.module, caller, i)
        return self._enter(body, Place(i.name, "loop", trips), trips or 1)

    def _enter(
        self, computation: hlo.Computation, place: Place, times: int
    ) -> list[_Step]:
        at = len(self.places)
        self.places.append(place)
        plan = self.plan(computation, place)
        if any(p.transfers for p in self.places[at:]):
            return [_Enter(plan, place, times)]
        del self.places[at:]
        # Nothing is moved in it: a single operation.
        return [_Compute(times * _compute_seconds(plan))]

    def _conditional(self, i: hlo.Instruction) -> list[_Step]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
        names = listed[1].replace("%", "").split(",") if listed else []
        names += [i.named(f"{which}_computation") or "" for which in ("true", "false")]
        names = [name.strip() for name in names]
        plans = [
            self._enter(
                self.module.computations[n], Place(f"{i.name}/{n}", "branch", 1), 1
            )
            for n in names
            if n in self.module.computations
        ]
        return max(plans, key=_weight, default=[])

    def _operation(
        self, computation: hlo.Computation, i: hlo.Instruction, place: Place
    ) -> list[_Step]:
        if i.opcode in _FREE or i.named("custom_call_target") in _FREE_CALLS:
            return []
        if i.opcode.endswith(("-done", "-update")):
            start = i.operands[0]
            done = i.opcode.endswith("-done")
            return [_Done((computation.name, start))] if done else []
        asynchronous = i.opcode.endswith("-start") or i.opcode in ("send", "recv")
        reads, writes = hlo.accesses(self.module, computation, i)
        transfers = self._transfers(i, reads, writes, asynchronous)
        place.transfers += transfers
        key = (computation.name, i.name)
        steps: list[_Step] = [_Start(key, transfers)] if transfers else []
        if transfers and not asynchronous:
            steps.append(_Done(key))
        inner = self.module.called(i)
        if not asynchronous or (inner is not None and not transfers):
            # Computation that is asynchronous (on a GPU, on a stream of its own) is
            # taken to be done where it starts.
            size = sum(n for a, n in (*reads, *writes) if a.space == hlo.DEVICE_SPACE)
            work = hlo.flops(self.module, computation, i)
            steps.append(_Compute(self.model.compute_seconds(size, work)))
        return steps

    def _transfers(
        self,
        i: hlo.Instruction,
        reads: list[tuple[hlo.Array, int]],
        writes: list[tuple[hlo.Array, int]],
        asynchronous: bool,
    ) -> tuple[Transfer, ...]:
        loaded = sum(n for a, n in reads if a.on_host)
        stored = sum(n for a, n in writes if a.on_host)
        if i.opcode in ("send", "recv") and "is_host_transfer=true" in i.attributes:
            size = max((a.bytes for a in i.arrays), default=0)
            loaded, stored = (size, 0) if i.opcode == "recv" else (0, size)
        form = self._form(i)
        if loaded and stored and loaded == stored and form != "fusion":
            moved = {"host copy": loaded}
        else:
            moved = {"load": loaded, "store": stored}
        return tuple(
            Transfer(i.name, direction, form, size, asynchronous)
            for direction, size in moved.items()
            if size
        )

    def _form(self, i: hlo.Instruction) -> str:
        inner = self.module.called(i)
        if inner is None:
            return i.named("custom_call_target") or i.opcode.removesuffix("-start")
        # A move, wrapped to be asynchronous (to a slice, JAX 0.10 adds a copy).
        work = [j for j in inner if j.opcode not in _FREE and j.opcode != "copy"]
        if not work:
            return "copy"
        slices = ("dynamic-slice", "dynamic-update-slice")
        if len(work) > 1 or work[0].opcode not in ("slice", *slices):
            return "fusion"
        # XLA's GPU compiler gives a slice to the copy engines if its position is a
        # linear function of the loop's counter, and notes how; any other becomes a
        # kernel that reaches into host memory.
        noted = "dynamic_slice_config" in work[0].attributes
        kernel = (
            work[0].opcode in slices and i.opcode.startswith("fusion") and not noted
        )
        return work[0].opcode + " kernel" * kernel


def _compute_seconds(plan: list[_Step]) -> float:
    """What a plan takes when transfers take no time."""
    total = 0.0
    for step in plan:
        if isinstance(step, _Compute):
            total += step.seconds
        elif isinstance(step, _Enter):
            total += step.times * _compute_seconds(step.plan)
    return total


def _weight(plan: list[_Step]) -> tuple[int, float]:
    """How much a plan moves, then how long it computes."""
    moved = 0
    for step in plan:
        if isinstance(step, _Start):
            moved += sum(t.bytes for t in step.transfers)
        elif isinstance(step, _Enter):
            moved += step.times * _weight(step.plan)[0]
    return moved, _compute_seconds(plan)


@dataclasses.dataclass
class _Flight:
    """A transfer between its start and its done."""

    transfer: Transfer
    end: float
    operations: int
    computed: float


class _Run:
    """Carries out a plan against the model's clock."""

    def __init__(self, model: Model):
        self.model = model
        self.clock = 0.0
        self.computed_seconds = 0.0
        self._operations = 0
        self._free = {"load": 0.0, "store": 0.0}  # when each direction is free
        self._busy: dict[str, list[Span]] = {
            "load": [],
            "store": [],
            "host copy": [],
        }
        self._flights: dict[tuple[str, str], list[_Flight]] = {}
        self._scopes: list[tuple[Place, set[tuple[str, str]]]] = []
        self.most_in_flight = (0, 0, 0)

    def carry_out(self, plan: list[_Step], place: Place) -> None:
        with self._scope(place):
            for step in plan:
                if isinstance(step, _Compute):
                    self.clock += step.seconds
                    self.computed_seconds += step.seconds
                    self._operations += 1
                elif isinstance(step, _Start):
                    self._start(step)
                elif isinstance(step, _Done):
                    self._done(step.key)
                else:
                    for _ in range(step.times):
                        self.carry_out(step.plan, step.place)

    @contextlib.contextmanager
    def _scope(self, place: Place) -> Iterator[None]:
        place.runs += 1
        before = self.clock
        self._scopes.append((place, set()))
        yield
        self._scopes.pop()
        place.seconds += self.clock - before

    def _start(self, step: _Start) -> None:
        flights = []
        for t in step.transfers:
            ways = ("load", "store") if t.direction == "host copy" else (t.direction,)
            begin = max(self.clock, *(self._free[w] for w in ways))
            end = begin + self.model.transfer_seconds(t.bytes)
            for way in ways:
                self._free[way] = end
            self._busy[t.direction].append((begin, end))
            t.runs += 1
            operations, computed = self._operations, self.computed_seconds
            flights.append(_Flight(t, end, operations, computed))
        self._flights[step.key] = flights
        place, started = self._scopes[-1]
        started.add(step.key)
        self.most_in_flight = _most(self.most_in_flight, self._flying(self._flights))
        most = place.most_loads, place.most_stores, place.most_together
        most = _most(most, self._flying(started))
        place.most_loads, place.most_stores, place.most_together = most

    def _flying(self, keys: Iterable[tuple[str, str]]) -> tuple[int, int, int]:
        """Loads, stores, and both together if there are some of both."""
        flying = Counter(f.transfer.direction for k in keys for f in self._flights[k])
        loads, stores = flying["load"], flying["store"]
        return loads, stores, loads + stores if loads and stores else 0

    def _done(self, key: tuple[str, str]) -> None:
        for flight in self._flights.pop(key, ()):
            self.clock = max(self.clock, flight.end)
            flight.transfer.between = self._operations - flight.operations
            between = self.computed_seconds - flight.computed
            flight.transfer.between_seconds = between
        self._scopes[-1][1].discard(key)

    def finish(self) -> None:
        """Waits for what the program's text does not wait for."""
        self.clock = max(self.clock, *self._free.values())

    @property
    def _spans(self) -> list[Span]:
        return [span for spans in self._busy.values() for span in spans]

    @property
    def link_seconds(self) -> float:
        return length(self._spans)

    @property
    def both_seconds(self) -> float:
        loads, stores = self._busy["load"], self._busy["store"]
        both = length(loads) + length(stores) - length(loads + stores)
        return max(both, 0.0)  # Rounding.

    @property
    def span_seconds(self) -> float:
        if not self._spans:
            return 0.0
        return max(e for _, e in self._spans) - min(b for b, _ in self._spans)


def _most(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])


HEADER = """\
                                              moved           MiB each  in flight \
compute   effi-   both exposed    step   step/
workload         target    mode      load store sync   least median   most ld/st/both \
between  ciency   ways      ms      ms   floor"""


def print_census(names: Sequence[str], found: Census) -> None:
    """Prints a row, and under it one for each place that has transfers."""
    sizes = found.sizes("load") + found.sizes("store")
    transfers = found.transfers("load") + found.transfers("store")
    between = sorted(t.between for t in transfers) or [0]
    workload, target, mode = names
    counts = (found.count("load"), found.count("store"), found.synchronous)
    least_median_most = (
        f"{size / MIB:7.2f}"
        for size in (
            min(sizes, default=0),
            found.median_bytes or 0,
            max(sizes, default=0),
        )
    )
    numbers = (
        found.efficiency,
        found.both_ways,
        found.exposed_seconds * 1e3,
        found.seconds * 1e3,
        found.over_floor,
    )
    print(
        f"{workload:16s} {target:9s} {mode:8s}"
        + "{:6d}{:6d}{:5d} ".format(*counts)
        + "".join(least_median_most)
        + f"{'/'.join(map(str, found.most_in_flight)):>11s} "
        + f"{statistics.median(between):7.0f} "
        + " ".join(map(_number, numbers)),
        flush=True,
    )
    for place in found.places:
        forms = Counter(map(_form, place.transfers))
        listed = ", ".join(f"{n} {form}" for form, n in forms.items())
        times = "?" if place.trip_count is None else place.trip_count
        what = f"{place.kind} {place.name}, {times} times" * (place.kind != "top level")
        flight = f"{place.most_loads}/{place.most_stores}/{place.most_together}"
        print(
            f"    {what or place.kind}: {listed}; in flight {flight}; "
            f"{place.seconds * 1e3:.2f} ms, of which the least link time is "
            f"{place.efficiency(found.model):.2f}"
            + (" (not taken)" if not place.runs else ""),
            flush=True,
        )


def _number(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.2f}"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    print(HEADER)
    link = FLAGS.bandwidth_gbps, FLAGS.latency_us
    if FLAGS.hlo:
        path, target = Path(FLAGS.hlo), FLAGS.targets[0]
        found = census(path.read_text(), model_of(target, *link))
        print_census((path.stem[:17], target, ""), found)
        return
    rows = []
    for name in FLAGS.workloads:
        for target in FLAGS.targets:
            for mode in FLAGS.modes:
                names = {"workload": name, "target": target, "mode": mode}
                try:
                    compiled = compile_step(
                        WORKLOADS[name](), aot.Target(target), MODES[mode]
                    )
                except aot.DoesNotFitError as error:
                    print(f"{name:17s} {target:9s} {mode:9s} {error.args[0][:80]}")
                    rows.append(names | {"does_not_fit": error.used_bytes})
                    continue
                text = compiled.as_text() or ""
                if FLAGS.dump:
                    file = Path(FLAGS.dump) / f"{name}.{target}.{mode}.txt"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(text)
                found = census(text, model_of(target, *link))
                print_census((name, target, mode), found)
                rows.append(names | found.summary())
    out = Path(FLAGS.out).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n")
    print(f"also in {out}")


def define_flags() -> None:
    """Not on import: others import the census, and have flags of the same names."""
    flags.DEFINE_list("targets", ["h100", "v5e:2x2"], "Chips to compile for.")
    flags.DEFINE_list("workloads", list(WORKLOADS), "Workloads to compile.")
    flags.DEFINE_list("modes", ["recipe", "ours"], f"Of {', '.join(MODES)}.")
    flags.DEFINE_float("bandwidth_gbps", 50.0, "GB/s of the link, in each direction.")
    flags.DEFINE_float("latency_us", 10.0, "Of each transfer.")
    flags.DEFINE_string("out", "out/census", "Where the .json goes.")
    flags.DEFINE_string(
        "hlo", None, "Read this program's text instead (of the 1st target)."
    )
    flags.DEFINE_string(
        "dump", None, "A folder for the texts of the compiled programs."
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)

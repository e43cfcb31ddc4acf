"""A step's plan, as a value: the updates that are fused into its backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from jax.extend import core as jex

from optax_offload._ground import compat, limits
from optax_offload._ground.units import MIB, Printed, counted, size_text
from optax_offload._places import memory
from optax_offload._places.step_options import Options
from optax_offload._program import Step, has_update, nbytes, variables
from optax_offload._rows import whole_stacks
from optax_offload._schedule import late, order, taken, waiting
from optax_offload._schedule.beside import Beside, apart, beside, in_rows
from optax_offload._schedule.chosen_state import ChosenState
from optax_offload._schedule.follow import Scan, Unfused, candidates, over_rows
from optax_offload._schedule.fused import Fused, FusedScan, Way
from optax_offload._schedule.late import Reduced
from optax_offload._schedule.pipeline import Pipeline, for_gpu, for_tpu
from optax_offload._schedule.replacements import replacements
from optax_offload._schedule.rest import Outer, rest
from optax_offload._schedule.turns.chain import chain
from optax_offload._schedule.turns.segments import Chain
from optax_offload._schedule.turns.uncut import NOT_CUT, known_uncut
from optax_offload._schedule.unfused import gradients, updates_inside
from optax_offload._schedule.updates.update import AnySchedule, schedule

# Whose body is evaluated with values as they are, once in each turn.
NAMES = {
    "scan": "scan of {length} iterations",
    "while": "while loop",
    "cond": "cond, branch {n} of {count}",
}
# What moves outside of scans and is less than this takes no memory worth having.
OUTSIDE_BYTES = MIB


class Turns(NamedTuple):
    """A scan, as it is carried out.

    Attributes:
      scan: The scan.
      turn: A turn of it.
    """

    scan: Scan
    turn: Pipeline


@dataclasses.dataclass(frozen=True, repr=False)
class FusedStep(Printed):
    """The updates of a step that are fused into its backward pass. Print it to read it.

    Attributes:
      step: The step.
      scans: The scans that updates are moved into, in their order.
      unfused: The gradients of scans that are computed whole.
      asked: The options that were asked for.
      streaming: The other scans whose iterations load rows for the next, or store those
        of the one before.
      chosen: What it makes of new state.
      on_tpu: Whether it is for a TPU's compiler alone.
      inside: The equations whose bodies are steps of their own, by position.
    """

    step: Step
    scans: tuple[FusedScan, ...]
    unfused: tuple[Unfused, ...]
    asked: Options = dataclasses.field(default_factory=Options)
    streaming: tuple[FusedScan, ...] = ()
    chosen: ChosenState = dataclasses.field(default_factory=ChosenState)
    on_tpu: bool = False
    inside: Mapping[int, Inside] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def rest(self) -> tuple[Outer, ...]:
        """The equations and updates outside of the scans, and the scans, in order."""
        if self.chain:
            return (*self._beside.nodes, *self._beside.after)
        return tuple(rest(self.step, self.scans))

    @property
    def before_and_after(self) -> tuple[Sequence[Outer], Sequence[Outer]]:
        """The rest, but for what waits for passes over rows; and that."""
        return apart(self.step, self.rest, self.scans, self.passes)

    @functools.cached_property
    def passes(self) -> waiting.Passes:
        """The passes over the rows of gradients that wait."""
        return waiting.passes(self.step, self.scans)

    def turns(self, each: FusedScan, number: int, *, on_tpu: bool) -> Turns | None:
        """The scan of a pass over the rows of a scan, and a turn of it; None for none.

        Args:
          each: The scan.
          number: The number of the pass: 0 is the scan itself.
          on_tpu: Whether it is for a TPU's compiler.
        """
        sums = self.passes.sums(each.late if number else each.fused, number)
        last = number == self.passes.last
        if not number:
            some = each.first_pass(sums)
        elif each.way == "recompute" and last:
            some = list(each.late)
        else:
            summed = (f for f in each.late if not {*sums}.isdisjoint(f.component.sums))
            some = [f.summing(sums) for f in summed]
        if number and not some:
            return None
        if number and each.way == "host":
            return Turns(over_rows(each.scan), Pipeline.of(some, sums))
        kept, waiting = ([], []) if number else self._stacked(each)
        turn = Pipeline.of(order.by_gradients(each.scan, some), sums, kept, waiting)
        for_its_compiler = for_tpu if on_tpu else for_gpu
        return Turns(each.scan, for_its_compiler(self.step, each.scan, turn))

    def _stacked(self, each: FusedScan) -> tuple[list[jex.Var], list[jex.Var]]:
        """The stacked results of a scan that are made whole, and those that wait."""
        gradients = {g for f in each.fused for g in f.component.gradients}
        late = [g for f in each.late for g in f.component.gradients]
        stacked = (v for v in each.scan.body.stacked if v not in gradients)
        kept = [v for v in stacked if v in self._taken]
        return kept, late if each.way == "host" else []

    @property
    def chain(self) -> Chain | None:
        """The step in segments, if layers are run by no scan."""
        return self._cut if isinstance(self._cut, Chain) else None

    @functools.cached_property
    def _cut(self) -> Chain | str:
        """The step in segments, or why it is not."""
        if not compat.SEGMENTS_ARE_FREED:
            return f"{NOT_CUT}that takes JAX 0.12 or newer"
        known = known_uncut(self.step, self.asked, in_rows(self.scans, self.streaming))
        if known:
            return known
        if self.passes.last > 1:
            return (
                f"{NOT_CUT}a norm of what a norm has scaled takes passes over the rows "
                "of its scans"
            )
        return chain(self.step, self._beside, self.asked, on_tpu=self.on_tpu)

    @property
    def uncut(self) -> str:
        """Why the step is not in segments; "" if it is."""
        return "" if isinstance(self._cut, Chain) else self._cut

    @functools.cached_property
    def reduced(self) -> Reduced | None:
        """What is reduced over gradients, if those may wait on the host."""
        if not self.asked.fuse or self.asked.late_gradients == "device":
            return None
        return late.reduced(self.step)

    @functools.cached_property
    def _beside(self) -> Beside:
        """All equations and updates, in order, as a chain takes them."""
        return beside(self.step, self.scans, self.streaming, self.passes, self.reduced)

    @functools.cached_property
    def _taken(self) -> frozenset[jex.Var]:
        """The variables that something takes outside of the scans, or updates do."""
        taken = {v for node in self.rest for v in node.reads}
        taken.update(variables(self.step.program.outvars))
        fused = (f for each in self.scans for f in each.fused)
        return frozenset(taken.union(v for f in fused for v in f.rows.inputs))

    @functools.cached_property
    def whole_on_tpu(self) -> tuple[jex.Var, ...]:
        """What rests on the host and is moved whole on a TPU, as its rows are small."""
        fused = [f for each in self.scans for f in each.fused]
        found = [v for f in fused for v in f.whole_on_tpu]
        return tuple(dict.fromkeys((*whole_stacks(self.step.jaxpr), *found)))

    @property
    def is_streamed(self) -> bool:
        """Whether anything in it is carried out otherwise than it is written."""
        inside = any(x.is_streamed for x in self.inside.values())
        return bool(self.scans or self.streaming or self.chain or inside)

    @property
    def is_told(self) -> bool:
        """Whether more is to be said of a body than that an update is in it."""
        return self.is_streamed or bool(gradients(self.step, self.unfused))

    @property
    def stores(self) -> bool:
        """Whether it keeps anything on the host that is neither given nor returned."""
        late = any(x.way == "host" and x.late for s in self.steps for x in s.scans)
        chains = (step.chain for step in self.steps)
        return late or any(x and (x.residuals or x.waiting) for x in chains)

    @property
    def is_fused_backward(self) -> bool:
        """Whether gradients of a backward pass in it never exist."""
        inside = (x for each in self.inside.values() for x in each.plans)
        own = any(each.scan.is_backward for each in self.scans)
        return own or any(x.is_fused_backward for x in inside)

    @property
    def steps(self) -> Sequence[FusedStep]:
        """Itself, and the steps that bodies in it are."""
        inside = (x for each in self.inside.values() for x in each.plans)
        return [self, *(step for x in inside for step in x.steps)]

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that never exist, on each device."""
        own = sum(f.gradient_bytes for each in self.scans for f in each.fused)
        own += nbytes(self.chain.gradients) if self.chain else 0
        # Of microbatches the sums exist.
        inside = (x for x in self.inside.values() if x.holds_update)
        return own + sum(x.gradient_bytes for each in inside for x in each.plans)

    @property
    def replaced_bytes(self) -> int:
        """The bytes of arguments at rest whose new values updates make themselves."""
        made = replacements(self.step)
        return nbytes(x.argument for x in made if memory.on_host(x.argument.aval))

    @property
    def residual_bytes(self) -> int:
        """The bytes of the residuals that rest on the host, on each device."""
        rest = self.step.at_rest
        chains = (step.chain for step in self.steps)
        of_turns = sum(nbytes(x.residuals) for x in chains if x is not None)
        return of_turns + (rest.residual_bytes if rest else 0)

    @property
    def in_turns(self) -> frozenset[int]:
        """The arguments at rest of which a turn takes some: rows, or a layer's own."""
        rest = self.step.at_rest
        rows = {x.position for x in rest.arguments if x.scans} if rest else set()
        most = limits.now.segment_bytes
        small = self.chain.smaller_than(most) if self.chain else set()
        invars = self.step.program.invars
        return frozenset(rows.union(i for i, v in enumerate(invars) if v in small))

    @property
    def flops_again(self) -> float:
        """The operations of backward passes that run again, on each device."""
        again = [x for x in self.scans if x.late and x.way == "recompute"]
        own = sum(order.flops(x.scan) * self.passes.twice(x.late) for x in again)
        inside = ((each.turns, x) for each in self.inside.values() for x in each.plans)
        return own + sum(turns * x.flops_again for turns, x in inside)

    @property
    def hides_nothing(self) -> bool:
        """Whether arguments at rest are loaded whole, and no transfer is overlapped.

        A scheduler that has transfers between the operations of a step, and nothing to
        hide them behind, keeps several times more alive for them (F01).
        """
        rest = self.step.at_rest
        if self.is_streamed or rest is None:
            return False
        overlapped = rest.positions != "none" or rest.step_loads
        return any(x.whole for x in rest.arguments) and not overlapped

    @property
    def hides_in_turns(self) -> bool:
        """Whether turns move much beside what they compute, and little is updated else.

        Before Hopper a GPU's compiler hides nothing unless it is told to. Told to, it
        takes more memory for updates between scans, as a head's (F83). Between the
        turns of a chain it has nothing to hide them behind.
        """
        if self.chain:
            return True
        if not (self.scans or self.streaming):
            return False
        outside = (x for each in self.schedules() for x in each.straights())
        return sum(y.nbytes for x in outside for y in x.groups) < OUTSIDE_BYTES

    def reasons(self) -> tuple[str, ...]:
        """Reasons why gradients are left outside, a line each."""
        return tuple(_reasons(self))

    def refused(self) -> tuple[Unfused, ...]:
        """The gradients that were to wait in a way that was asked for, and do not."""
        if self.asked.late_gradients not in get_args(Way):
            return ()
        return tuple(o for o in self.unfused if o.waits)

    def schedules(self) -> tuple[AnySchedule, ...]:
        """Schedules of the offloaded updates outside of scans and turns."""
        nodes = self.rest if self.chain is None else self.chain.between
        left = (node.left for node in nodes if node.left is not None)
        return tuple(
            schedule(x.update, x.inlined.what.caller.window_bytes) for x in left
        )

    @property
    def state_at_once_bytes(self) -> int:
        """The most state that something joins, so that all of it is loaded at once."""
        straights = (s for each in self.schedules() for s in each.straights())
        return max(
            (o.nbytes for s in straights for o in s.over_window(None)), default=0
        )

    def __str__(self) -> str:
        segments = self.chain.segments if self.chain else ()
        turns = {v for s in segments for v in s.loads}
        lines = [
            *taken.misplaced(self.step),
            *taken.at_rest(self.step, self.rest, turns),
        ]
        lines += self.chain.lines() if self.chain else ()
        for each in self.streaming:
            found = list(_of_turns(self, each, 0))
            lines += [f"scan of {each.scan.length} iterations:"] * bool(found) + found
        for each in self.scans:
            lines += _lines(each, self.passes)
            again = range(1, self.passes.last + 1) if each.way == "recompute" else ()
            for number in (0, *again):
                lines += _of_turns(self, each, number)
        lines += [line for each in self.inside.values() for line in each.lines()]
        is_fused = bool(self.scans or self.chain or self.inside)
        if not is_fused:
            lines += ["nothing is fused into a backward pass"]
        if self.whole_on_tpu:
            lines += [f"on a TPU {_whole_text(self)}"]
        lines += self.reasons()
        lines += self.chosen.lines()
        if self.hides_nothing:
            lines += [_HIDES_NOTHING]
        for each in self.schedules():
            if not any(straight.groups for straight in each.straights()):
                continue
            lines += ["what is left of " * is_fused + "an offloaded update:"]
            lines += [f"  {line}" for line in str(each).splitlines()]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Inside:
    """The bodies of an equation, planned as steps of their own.

    Attributes:
      equation: The equation.
      plans: The plan of each body.
    """

    equation: jex.JaxprEqn
    plans: tuple[FusedStep, ...]

    @property
    def turns(self) -> int:
        """How often each of them is evaluated, as far as that is known."""
        return self.equation.params.get("length", 1)

    @property
    def holds_update(self) -> bool:
        """Whether an offloaded update is in them."""
        return has_update(self.equation)

    @property
    def is_streamed(self) -> bool:
        """Whether any of them is carried out otherwise than it is written."""
        return any(x.is_streamed for x in self.plans)

    def lines(self) -> Iterator[str]:
        """Lines on its bodies."""
        name, params = self.equation.primitive.name, self.equation.params
        adds = "each adds its gradients to their sums"
        how = "each a step of its own" if self.holds_update else adds
        for n, plan in enumerate(self.plans):
            if not plan.is_told:
                continue
            yield f"{NAMES[name].format(n=n, count=len(self.plans), **params)}, {how}:"
            yield from (f"  {line}" for line in str(plan).splitlines())


_HIDES_NOTHING = (
    "no transfer overlaps the backward pass: oo.jit compiles for one GPU with "
    "xla_gpu_enable_latency_hiding_scheduler=False; jax.jit takes that in "
    "compiler_options"
)


def _lines(each: FusedScan, passes: waiting.Passes) -> Iterator[str]:
    yield (
        f"{'backward ' * each.scan.is_backward}scan of {each.scan.length} iterations: "
        f"{each.gradients(each.fused)} never on the device whole"
    )
    if each.now:
        yield f"  updated with their rows: {each.gradients(each.now)}{_moved(each.now)}"
    for f in each.fused:
        count = each.in_parts(f)
        if count is not None:
            yield f"  over the window: {each.gradients([f])}, a row in {count} parts"
    yield from (f"  over the window: {line}" for line in each.over_window(each.fused))
    if each.late and each.way == "host":
        size = sum(f.gradient_bytes for f in each.late)
        loads = passes.stored(each.late)
        often = f" {_times(loads)}, for a norm of a norm" if loads > 1 else ""
        yield (
            f"  need all gradients first: {each.gradients(each.late)}: stored to host "
            f"memory, and loaded with their state{often}: {size_text(size)} more "
            f"each way{_moved(each.late)}"
        )
    if each.late and each.way == "recompute":
        again = passes.twice(each.late)
        often = _times(again + 1) + ", for a norm of a norm" * (again > 1)
        yield (
            f"  need all gradients first: {each.gradients(each.late)}: the scan runs "
            f"{often} ({again * order.flops(each.scan):.3g} FLOPs more)"
            f"{_moved(each.late)}"
        )
    if any(f.loaded_bytes for f in each.fused) and memory.moved_by_kernels():
        yield f"  {memory.moved_by_kernels()}"
    sums = sum(len(f.component.sums) for f in each.fused)
    if sums:
        yield f"  summed up row by row, in another order: {sums}"


def _of_turns(plan: FusedStep, each: FusedScan, number: int) -> Iterator[str]:
    """Lines on what an iteration does for others, as it is written down."""
    # What is moved whole on a TPU has that planned again.
    for on_tpu in (False, True) if not plan.whole_on_tpu else (False,):
        turns = plan.turns(each, number, on_tpu=on_tpu)
        if on_tpu and each in plan.streaming:
            continue  # Its compiler does it by itself.
        said = [] if turns is None else list(turns.turn.lines(each.scan.length))
        if said:
            again = f" in pass {number + 1}" * bool(number)
            yield f"  on a {'TPU' if on_tpu else 'GPU'}{again}: {'; '.join(said)}"


def _whole_text(plan: FusedStep) -> str:
    some = counted(len(plan.whole_on_tpu), "stack", nbytes(plan.whole_on_tpu))
    return f"{some} moved whole, and not fused: no row of theirs is whole tiles"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _moved(fused: Sequence[Fused]) -> str:
    size = sum(f.loaded_bytes for f in fused)
    return f"; {size_text(size)} of state loaded" if size else ""


def _reasons(plan: FusedStep) -> Iterator[str]:
    """Yields a line for each reason why gradients are left outside."""
    unfused = plan.unfused
    if plan.chain:  # What scans inside of layers stack or sum up is none, or used up.
        step, equations = plan.step, plan.step.program.equations
        operands = (x.operands for x in step.inlined_updates)
        taken = {v for some in operands for v in variables(some)}
        scans = (Scan(i, equations[i]) for i in candidates(step))
        taken.intersection_update([v for x in scans for v in x.body.stacked])
        unfused = tuple(o for o in unfused if o.gradient in taken)
    found: dict[str, list[int]] = {}
    for o in gradients(plan.step, unfused):
        found.setdefault(o.reason, []).append(nbytes([o.gradient]))
    for reason, sizes in found.items():
        left = counted(len(sizes), "gradient", sum(sizes))
        yield f"{left} left outside: {reason}"
    inside = updates_inside(plan.step, plan.inside)
    for reason in inside:
        if reason not in found:
            yield (
                "an offloaded update is not fused, and streams its state where it is: "
                f"{reason}"
            )
    if plan.scans or plan.chain or plan.inside or found or inside:
        return
    if not plan.asked.fuse:
        yield "it was asked not to: fuse=False"
    elif not candidates(plan.step):
        yield plan.uncut
    else:
        yield "no scan stacks what an update takes row by row, as gradients of layers"

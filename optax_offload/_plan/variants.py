"""The ways in which a step can be trained, and what is expected of each beforehand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from optax_offload._ground.units import size_text
from optax_offload._places.rules import OffloadConfig
from optax_offload._places.step_options import LateGradients, Options, Residuals
from optax_offload._plan.allowed import REMAINDER, Codecs, of_parameters
from optax_offload._plan.state import MOST_LAST, MovableState, Parameters, Selection
from optax_offload._schedule import MOST_WINDOW_BYTES

# Windows that are tried where nothing else fits: rows of more bytes are then updated in
# parts, and less is loaded ahead.
SMALL_WINDOWS = (2**28, 2**23)
WITHOUT_OPTIONS = Options(fuse=False)
# A GPU's program in the order that takes least memory: collectives are waited for.
WITHOUT_HIDING = Options(fuse=False, latency_hiding="off")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train a step: what rests on the host, and how it is streamed.

    Attributes:
      state: The patterns of state that rest on the host, as positions.
      codecs: The codecs that state and frozen parameters are kept in, of those that
        are allowed.
      parameters: The trained parameters that rest on the host: none, those that scans
        take row by row, or all.
      options: The options that the step is jitted with.
      window_bytes: The window of the update; None where the library chooses.
      frozen: The frozen parameters that rest on the host.
    """

    state: Selection = frozenset()
    codecs: Codecs = ()
    parameters: Parameters = "device"
    options: Options = WITHOUT_OPTIONS
    window_bytes: int | None = None
    frozen: Parameters = "device"

    @property
    def is_plain(self) -> bool:
        """True if it does nothing that the given step does not do."""
        return self == Variant()

    def text(self, sizes: Sizes | None = None) -> str:
        """Describes it in a few words.

        Args:
          sizes: The sizes of the step's values, to tell how much of the state moves.
        """
        words, some = ["state"] * bool(self.state), ""
        if words and sizes and len(self.state) < len(sizes.patterns[self.codecs]):
            moved, whole = sizes.moved_state(self), sizes.state[self.codecs]
            words, some = [], f"{size_text(moved)} of {size_text(whole)} of state"
        for which, name in (self.parameters, ""), (self.frozen, "frozen "):
            if which != "device":
                words.append("all " * (which == "all") + f"{name}parameters")
        words += ["residuals"] * (self.options.residuals == "host")
        # So that nothing else is taken for a part of the state.
        where = " and ".join(x for x in (", ".join(words), some) if x)
        parts = [f"{where} on the host" if where else "nothing moved"]
        if self.options.fuse:
            waits = {
                "auto": "",
                "device": ", late gradients on the device",
                "host": ", late gradients on the host",
                "recompute": ", backward twice",
            }
            parts.append("fused" + waits[self.options.late_gradients])
        if self.options.latency_hiding == "off":
            parts.append("without latency hiding")
        base = of_parameters(self.codecs)
        for codec in self.codecs:
            remainder = codec == REMAINDER
            of = "parameters" if codec in base else "moments"
            parts.append("masters as remainders" if remainder else f"{codec} {of}")
        if self.window_bytes:
            parts.append(f"window {size_text(self.window_bytes)}")
        return "; ".join(parts) if not self.is_plain else "as given"

    def config(self, state: MovableState) -> OffloadConfig:
        """The settings of a train script, of the state as it is kept here."""
        config = dataclasses.replace(
            state.config(self.state),
            parameters=state.parameter_rules(self.parameters, self.frozen),
            step=self.options,
        )
        if self.window_bytes is None:
            return config
        return dataclasses.replace(config, window_bytes=self.window_bytes)

    def late_bytes_left(self, facts: StepFacts) -> int:
        """The bytes of gradients that it leaves on the device, of those it fuses."""
        planned = facts.planned_as(self)
        if planned is not None:
            return max(facts.gradient_bytes - planned.gradient_bytes, 0)
        if not self.options.fuse:
            return facts.gradient_bytes
        waits = self.options.late_gradients in ("host", "recompute")
        return 0 if waits else facts.late_bytes

    def residual_bytes(self, facts: StepFacts) -> int:
        """The bytes of residuals that rest on the host, on each device."""
        planned = facts.planned_as(self)
        if planned is not None:
            return planned.residual_bytes
        return facts.residual_bytes * (self.options.residuals == "host")

    def fuses(self, facts: StepFacts) -> bool:
        """Whether updates are carried out in the backward pass."""
        planned = facts.planned_as(self)
        return self.options.fuse if planned is None else planned.gradient_bytes > 0

    def host_bytes(self, facts: StepFacts) -> int:
        """The host memory that it needs for each device."""
        options = self.options
        waits = options.fuse and options.late_gradients == "host"
        late = facts.late_bytes if waits else 0
        moved = facts.sizes.moved_state(self) + facts.sizes.parameters[self.parameters]
        frozen = facts.sizes.moved_frozen(self)
        return moved + frozen + late + self.residual_bytes(facts)

    def link_bytes(self, facts: StepFacts) -> tuple[int, int]:
        """The bytes that it loads and stores in a step, on each device, at least."""
        parameters = facts.sizes.parameters[self.parameters]
        frozen = facts.sizes.moved_frozen(self)
        twice = self.backward_twice and facts.late_bytes
        rest = self.host_bytes(facts) - parameters - frozen
        loaded = (3 if twice else 2) * (parameters + frozen)
        return rest + loaded, rest + parameters

    def moves_rows(self, facts: StepFacts) -> bool:
        """Returns whether it loads parameters row by row."""
        trained = self.parameters != "device" and facts.sizes.parameters["rows"]
        frozen = facts.sizes.frozen.get(self.codecs, {}).get("rows", 0)
        return bool(trained or (self.frozen != "device" and frozen))

    @property
    def backward_twice(self) -> bool:
        """True if the backward pass of a fused step runs a second time."""
        return self.options.fuse and self.options.late_gradients == "recompute"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The bytes on each device of what a step holds between its runs.

    Attributes:
      state: All state, by the codecs that it is kept in.
      given_state: State that the given rules move already.
      patterns: The bytes of each pattern of state, by the codecs.
      parameters: The bytes of trained parameters that can move, and of those by rows.
      all_parameters: The bytes of all trained parameters.
      frozen: The bytes of frozen parameters that can move, and of those by rows, by the
        codecs that they are kept in.
      all_frozen: The bytes of all frozen parameters, in their own dtypes.
    """

    state: Mapping[Codecs, int]
    given_state: Mapping[Codecs, int]
    patterns: Mapping[Codecs, tuple[int, ...]]
    parameters: Mapping[Parameters, int]
    all_parameters: int
    frozen: Mapping[Codecs, Mapping[Parameters, int]] = dataclasses.field(
        default_factory=dict
    )
    all_frozen: int = 0

    @classmethod
    def of(cls, states: Mapping[Codecs, MovableState]) -> Sizes:
        """Those of a step's state, by the codecs that it is kept in."""
        plain = states[()]

        def moved(state: MovableState, frozen: bool) -> Mapping[Parameters, int]:
            return {
                w: sum(
                    x.leaf.nbytes_per_device
                    for x in state.resting(w, w)
                    if x.frozen == frozen
                )
                for w in MOST_LAST
            }

        return cls(
            state={c: s.state_bytes for c, s in states.items()},
            given_state={c: s.moved_bytes(frozenset()) for c, s in states.items()},
            patterns={
                c: tuple(p.nbytes_per_device for p in s.patterns)
                for c, s in states.items()
            },
            parameters=moved(plain, False),
            all_parameters=plain.parameter_bytes,
            frozen={c: moved(s, True) for c, s in states.items()},
            all_frozen=plain.frozen_bytes,
        )

    def moved_state(self, variant: Variant) -> int:
        """The state of a variant that rests on the host."""
        patterns = self.patterns[variant.codecs]
        chosen = sum(patterns[i] for i in variant.state)
        return self.given_state[variant.codecs] + chosen

    def device_state(self, variant: Variant) -> int:
        """The state of a variant that rests on the device."""
        return self.state[variant.codecs] - self.moved_state(variant)

    def moved_frozen(self, variant: Variant) -> int:
        """The frozen parameters of a variant that rest on the host."""
        return self.frozen.get(variant.codecs, {}).get(variant.frozen, 0)

    def device_frozen(self, variant: Variant) -> int:
        """The frozen parameters of a variant that rest on the device."""
        plain, kept = (self.frozen.get(c, {}) for c in ((), variant.codecs))
        if variant.frozen == "device" and of_parameters(variant.codecs):
            return self.all_frozen - plain["rows"] + kept["rows"]
        return self.all_frozen - plain.get(variant.frozen, 0)


class Planned(NamedTuple):
    """What becomes of a step in a way, by the plan of that step.

    Attributes:
      gradient_bytes: The gradients that never exist, on each device.
      residual_bytes: The residuals that rest on the host, on each device.
      is_streamed: Whether anything is carried out otherwise than it is written.
    """

    gradient_bytes: int
    residual_bytes: int
    is_streamed: bool


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What is known of a step before it is compiled; bytes on each device.

    All but the sizes comes from tracing it.

    Attributes:
      sizes: The sizes of the values that it holds between its runs.
      gradient_bytes: Gradients that never exist where all that can be fused is.
      late_bytes: Of these, the gradients whose update needs all of them first.
      flops: Matrix products of a step, in operations.
      flops_again: Matrix products of a backward pass that runs a second time.
      residual_bytes: Residuals that the forward pass keeps for the backward pass.
      row_arguments: The arguments that turns take in part, by path: rows, or layers.
      outside: The reasons why gradients are left outside of the backward pass.
      state_at_once_bytes: State that an equation joins, so that all of it is loaded.
      joined_by: The equation that joins it; "" where none does.
      can_stream: Whether the step can be jitted anew, with other options.
      on_gpus: Whether it is for several GPUs, whose collectives a scheduler hides.
      cut: Whether layers that no scan runs are taken in turns. What is fused then, and
        which residuals rest on the host, depends on all that rests.
      overlaps: Whether transfers of such turns overlap what is computed: before Hopper
        a GPU's compiler hides nothing unless it is told to (F83).
      planned: The ways of such a step that were planned, with all state moved or none.
    """

    sizes: Sizes
    gradient_bytes: int = 0
    late_bytes: int = 0
    flops: float = 0.0
    flops_again: float = 0.0
    residual_bytes: int = 0
    row_arguments: frozenset[str] = frozenset()
    outside: tuple[str, ...] = ()
    state_at_once_bytes: int = 0
    joined_by: str = ""
    can_stream: bool = True
    on_gpus: bool = False
    cut: bool = False
    overlaps: bool = True
    planned: Mapping[Variant, Planned] = dataclasses.field(default_factory=dict)

    def planned_as(self, variant: Variant) -> Planned | None:
        """The plan of a way, or of that with all state of its own dtype; if any was."""
        if not self.planned or of_parameters(variant.codecs):
            return None
        every = frozenset(range(len(self.sizes.patterns[()])))
        state = every if variant.state else variant.state
        like = dataclasses.replace(variant, state=state, codecs=(), window_bytes=None)
        return self.planned.get(like)

    def is_other_without_options(self, variant: Variant) -> bool:
        """Whether a way is the one without its options, as these change nothing."""
        planned = self.planned_as(variant)
        # A scheduler is no part of the plan of a step.
        without = variant.options in (WITHOUT_OPTIONS, WITHOUT_HIDING)
        return planned is not None and not planned.is_streamed and not without


@dataclasses.dataclass(frozen=True)
class Expectation:
    """The predictions for a variant before it is compiled.

    Attributes:
      seconds: The least time of a step; not fused, its updates' transfers come after.
      serial_seconds: The time if nothing were computed beside a transfer.
      device_bytes: Its peak on each device, if what it moves is all gone from it.
      host_bytes: The host memory that it needs for each device.
      link_bytes: The bytes that cross the link in a step, both ways together.
      is_other: Whether it is another way, without options that change nothing.
    """

    seconds: float
    serial_seconds: float
    device_bytes: int
    host_bytes: int
    link_bytes: int
    is_other: bool = False


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Predicts the time and memory of variants.

    Attributes:
      facts: What is known of the step.
      plain_bytes: The peak of the step as given.
      compute_seconds: The time of its computation.
      link_bytes_per_second: Bandwidth of the link, each way.
    """

    facts: StepFacts
    plain_bytes: int
    compute_seconds: float
    link_bytes_per_second: float

    def __call__(self, variant: Variant) -> Expectation:
        """Returns the predictions for a variant."""
        facts, sizes = self.facts, self.facts.sizes
        loaded, stored = variant.link_bytes(facts)
        gone = sizes.state[()] - sizes.device_state(variant)
        gone -= sizes.given_state[()]
        gone += sizes.parameters[variant.parameters]
        gone += sizes.device_frozen(Variant()) - sizes.device_frozen(variant)
        gone += facts.gradient_bytes - variant.late_bytes_left(facts)
        gone += variant.residual_bytes(facts)
        return Expectation(
            seconds=self._seconds(variant, loaded, stored),
            serial_seconds=self.least_seconds(variant)
            + (loaded + stored) / self.link_bytes_per_second,
            device_bytes=max(self.plain_bytes - gone, 0),
            host_bytes=variant.host_bytes(facts),
            link_bytes=loaded + stored,
            is_other=facts.is_other_without_options(variant),
        )

    def least_seconds(self, variant: Variant) -> float:
        """The time of a variant if its transfers took none."""
        facts, again = self.facts, variant.backward_twice
        share = facts.flops_again / facts.flops if facts.flops and again else 0.0
        return self.compute_seconds * (1 + share)

    def _seconds(self, variant: Variant, loaded: int, stored: int) -> float:
        compute = self.least_seconds(variant)
        link = max(loaded, stored) / self.link_bytes_per_second
        planned = self.facts.planned_as(variant)
        if planned is not None and planned.is_streamed and not self.facts.overlaps:
            return compute + (loaded + stored) / self.link_bytes_per_second
        if variant.fuses(self.facts):
            return max(compute, link)
        # Loads of parameters for the forward and the backward pass lie beside these.
        late = stored / self.link_bytes_per_second
        return max(compute, link - late) + late


def variants(facts: StepFacts) -> list[Variant]:
    """All ways, with all of the state moved or none of it; the plain one is first."""
    found: list[Variant] = [Variant()]
    for codecs, patterns in facts.sizes.patterns.items():
        every = frozenset(range(len(patterns)))
        states = [frozenset[int](), every] if every else [every]
        for state, (parameters, frozen), options in itertools.product(
            states, _parameters(facts, codecs), _options(facts)
        ):
            # Of each parameter more state leaves the device for fewer bytes moved.
            if parameters != "device" and every and not state:
                continue
            # On the device what no scan takes rows of would be decoded at once.
            kept = facts.sizes.frozen.get(codecs, {})
            by_rows = facts.can_stream and kept.get("rows", 0)
            if of_parameters(codecs) and frozen == "device" and not by_rows:
                continue
            # What scans load row by row has to be hidden.
            way = Variant(state, codecs, parameters, options, frozen=frozen)
            if options == WITHOUT_HIDING and way.moves_rows(facts):
                continue
            found.append(way)
    return list(dict.fromkeys(found))


def small_windows(variant: Variant) -> list[Variant]:
    """A variant whose updates take less at once.

    Outside of a backward pass they take no more than the library's largest window.
    """
    fused = variant.options.fuse
    some = (n for n in SMALL_WINDOWS if fused or n < MOST_WINDOW_BYTES)
    return [dataclasses.replace(variant, window_bytes=n) for n in some]


def _parameters(
    facts: StepFacts, codecs: Codecs
) -> Iterator[tuple[Parameters, Parameters]]:
    """Which parameters move, of the trained and of the frozen.

    Frozen ones are never stored, so no trained one moves before them.
    """
    rank = MOST_LAST.index
    of_trained = _moved(facts, facts.sizes.parameters)
    of_frozen = _moved(facts, facts.sizes.frozen.get(codecs, {}))
    for trained, frozen in itertools.product(of_trained, of_frozen):
        if rank(frozen) >= min(rank(trained), rank(of_frozen[-1])):
            yield trained, frozen


def _moved(facts: StepFacts, nbytes: Mapping[Parameters, int]) -> list[Parameters]:
    found: list[Parameters] = ["device"]
    if facts.can_stream and nbytes.get("rows", 0):
        found.append("rows")
    if facts.can_stream and nbytes.get("all", 0) > nbytes.get("rows", 0):
        found.append("all")
    return found


def _options(facts: StepFacts) -> Iterator[Options]:
    places: tuple[Residuals, ...] = ("device",)
    if facts.can_stream and facts.residual_bytes:
        places += ("host",)
    ways: list[LateGradients] = []
    if facts.can_stream and facts.gradient_bytes:
        late: tuple[LateGradients, ...] = ("recompute", "host")
        ways += late if facts.late_bytes else ("auto",)
        if 0 < facts.late_bytes < facts.gradient_bytes:
            ways.append("device")
    if facts.can_stream and facts.on_gpus:
        yield WITHOUT_HIDING
    for residuals in places:
        yield Options(fuse=False, residuals=residuals)
        for way in ways:
            yield Options(late_gradients=way, residuals=residuals)

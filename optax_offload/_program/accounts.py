"""How a step takes what rests on the host, noted while it is walked."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from optax_offload._places import memory
from optax_offload._program.graph import bound

# The positions at which scans move rows: none, those that count up with their
# iterations, or others too.
Positions: TypeAlias = Literal["none", "rising", "others"]
# What scans store row by row: for other scans, or as results.
Stored: TypeAlias = Literal["residual", "made"]


@dataclasses.dataclass(frozen=True)
class Resting:
    """An argument that rests on the host.

    Attributes:
      position: Its position among the arguments.
      nbytes: Its bytes on each device.
      scans: The number of iterations of each scan that loads a row in each.
      again: The number of iterations of the scans around these, such as those over
        microbatches, each of which loads all rows again; 1 for none.
      whole: The names of other equations, which load all of it.
      is_state: Whether an offloaded update takes it.
      result: The position of the result that replaces it, which returns to the host;
        None if none does.
    """

    position: int
    nbytes: int
    scans: tuple[int, ...]
    again: int
    whole: tuple[str, ...]
    is_state: bool
    result: int | None

    @property
    def returns(self) -> bool:
        """Returns whether a result replaces it."""
        return self.result is not None


@dataclasses.dataclass(frozen=True)
class AtRest:
    """The values of a step that rest on the host.

    Attributes:
      arguments: The arguments that rest there.
      residual_bytes: The bytes on each device of the residuals that forward scans keep
        on the host for backward scans.
      made_bytes: The bytes on each device of results that scans store row by row.
      positions: The positions at which scans move rows: none, those that count up with
        their iterations, or others too.
      step_loads: Whether the step itself loads values, as what a policy of
        `jax.checkpoint` has stored.
      codes: The bytes on each device of codes that are there, for each argument whose
        rows scans decode.
    """

    arguments: tuple[Resting, ...]
    residual_bytes: int
    made_bytes: int
    positions: Positions
    step_loads: bool
    codes: Mapping[int, int]


class Account:
    """What is noted of a step's arguments, and of what its scans store.

    Attributes:
      stored: The bytes on each device of what scans store row by row: residuals, and
        what is made.
      positions: See `AtRest`.
      times: How often what is evaluated now runs.
    """

    def __init__(self) -> None:
        self.stored = collections.Counter[Stored]()
        self.positions: Positions = "none"
        self.times = 1
        # Which argument of the step a value is. No value is kept: it would leak.
        self._argument: dict[int, int | None] = {}
        # By what each was taken at rest.
        self._scans: dict[int | None, list[int]] = {}
        self._again: dict[int | None, int] = {}
        self._whole: dict[int | None, list[str]] = {}
        self._updated: set[int | None] = set()
        self._codes: dict[int, int] = {}

    def name(self, values: Iterable[Any], arguments: Sequence[int | None]) -> None:
        """Says which argument of the step each value is, as long as it lives."""
        self._argument |= bound(map(id, values), arguments)

    def of(self, x: Any) -> int | None:
        """The argument of the step that a value is, if it is one."""
        return self._argument.get(id(x))

    def note_whole(self, x: Any, primitives: Iterable[str]) -> None:
        """Notes that equations load all of a value."""
        self._whole.setdefault(self.of(x), []).extend(primitives)

    def note_updated(self, values: Iterable[Any]) -> None:
        """Notes that an update takes values."""
        self._updated.update(map(self.of, values))

    def note_rows(self, values: Iterable[Any], length: int) -> None:
        """Notes that a scan loads rows of values."""
        for one in map(self.of, values):
            self._scans.setdefault(one, []).append(length)
            self._again[one] = max(self._again.get(one, 1), self.times)

    def note_codes(self, values: Iterable[Any]) -> None:
        """Notes that a scan decodes rows of values on the device."""
        for x in values:
            one = self.of(x)
            if one is not None:
                self._codes[one] = memory.nbytes_on_each_device(jax.typeof(x))

    def note_stored(self, what: Stored, x: Any) -> None:
        """Notes that a scan stores rows of a value."""
        self.stored[what] += memory.nbytes_on_each_device(x)

    def note_positions(self, params: Mapping[str, Any]) -> None:
        """Notes that a scan with such parameters moves rows."""
        rising = not params["reverse"] and params["unroll"] == 1
        if self.positions != "others":
            self.positions = "rising" if rising else "others"

    def at_rest(
        self, types: Sequence[Any], returns: Mapping[int, int], *, step_loads: bool
    ) -> AtRest:
        """Describes how arguments of these types were taken.

        Args:
          types: The types.
          returns: The argument that each result replaces, as positions.
          step_loads: See `AtRest`.
        """
        results = {i: k for k, i in returns.items()}
        resting = [(i, x) for i, x in enumerate(types) if memory.on_host(x)]
        return AtRest(
            tuple(self._resting(i, x, results.get(i)) for i, x in resting),
            self.stored["residual"],
            self.stored["made"],
            self.positions,
            step_loads,
            self._codes,
        )

    def _resting(self, i: int, x: Any, result: int | None) -> Resting:
        return Resting(
            i,
            memory.nbytes_on_each_device(x),
            tuple(self._scans.get(i, ())),
            self._again.get(i, 1),
            tuple(dict.fromkeys(self._whole.get(i, ()))),
            i in self._updated,
            result,
        )

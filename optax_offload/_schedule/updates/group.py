"""Groups of leaves that must be on the device together, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from jax.extend import core as jex

from optax_offload._program import Program, signature, variables
from optax_offload._rows import RowLocal, Sum


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a group that is loaded, computed and stored at a time.

    Attributes:
      loads: The inputs that are loaded, as positions.
      outputs: The outputs that these, and the parts before, suffice for.
      row_local: The equations as they are for a slice, if the group can be updated in
        slices. Outputs that are not outputs of the group are for the next part.
    """

    loads: tuple[int, ...]
    outputs: tuple[int, ...]
    row_local: RowLocal | None = None


@dataclasses.dataclass(frozen=True)
class Written:
    """A leaf that a group writes.

    Attributes:
      output: The output that it is, as a position.
      alias: The input whose buffer it is written into, as a position; None where a
        buffer has to be made on the device.
      sum: The equation that reduces it over the rows, in a pass that only reads.
    """

    output: int
    alias: int | None = None
    sum: Sum | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that must be on the device together: usually the state of one parameter.

    Attributes:
      loads: The inputs that are loaded, as positions.
      targets: The leaves that are computed from them.
      equations: The equations that only this group needs, as positions; of those that
        depend on no load, only if it is in a loop and not updated in slices.
      nbytes: The bytes that its loads take on each device, or its stores if more; of
        codes of 8 bits what they are decoded to.
      moved_bytes: The bytes of its loads as they cross the link, or of its stores if
        more.
      tied_by: The equations that join leaves of different parameters, where any do: the
        first of each primitive, of sums of all if there are some, as for a norm.
      joined: The loads that these depend on, as positions.
      row_local: The equations as they are for a slice, if it can be updated in slices.
      in_place: Whether all that is stored has a buffer on the host to be written into,
        so that it can be updated in a loop.
      row_multiple: The number of rows of a slice is a multiple of this.
      parts: The order within an update: two parts where half of the loads suffice for a
        store, which then takes place beside the other loads.
      makes: Whether something that it stores replaces nothing, as new state does. Its
        buffer is then made, and rows are written into it: it is not stored whole in a
        loop.
      whole_reason: The reason why it cannot be updated in slices; "" if it can.
    """

    loads: tuple[int, ...]
    targets: tuple[Written, ...]
    equations: tuple[int, ...]
    nbytes: int
    moved_bytes: int
    tied_by: tuple[jex.JaxprEqn, ...] = ()
    joined: tuple[int, ...] = ()
    row_local: RowLocal | None = None
    in_place: bool = False
    row_multiple: int = 1
    parts: tuple[Part, ...] = ()
    makes: bool = False
    whole_reason: str = ""

    @property
    def outputs(self) -> tuple[int, ...]:
        """The outputs that are computed, as positions."""
        return tuple(t.output for t in self.targets)

    @property
    def aliases(self) -> tuple[int, ...]:
        """The inputs whose buffers are written into, as positions."""
        return tuple(t.alias for t in self.targets if t.alias is not None)

    @property
    def sums(self) -> tuple[Sum, ...]:
        """The reductions of a pass that only reads; () in others."""
        return tuple(t.sum for t in self.targets if t.sum is not None)

    @property
    def rows(self) -> int:
        """The number of rows of a group that can be updated in slices."""
        return self.in_rows.rows

    @property
    def in_rows(self) -> RowLocal:
        """The equations for a slice, of a group that can be updated in slices."""
        if self.row_local is None:
            raise TypeError(f"a group that is updated whole: {self.whole_reason}")
        return self.row_local

    @property
    def measures(self) -> Hashable:
        """All that the slices of a loop and their order depend on: see `Loop.over`."""
        rows = None if self.row_local is None else self.rows
        counts = len(self.loads), len(self.parts)
        return self.nbytes, *counts, rows, self.row_multiple, self.makes

    def reads(self, program: Program) -> list[jex.Var]:
        """The variables that it takes to update the group."""
        aliases = [program.invars[alias] for alias in self.aliases]
        if self.row_local is not None:
            return [*self.row_local.inputs, *aliases]
        return [*self.jaxpr(program).invars, *aliases]

    def jaxpr(self, program: Program) -> jex.Jaxpr:
        """The equations for all of it, which take its loads first."""
        equations = [program.equations[i] for i in self.equations]
        outvars = [program.outvars[k] for k in self.outputs]
        defined = {v for e in equations for v in e.outvars}
        used = [program.invars[i] for i in self.loads]
        used += [v for e in equations for v in variables(e.invars)]
        used += variables(outvars)
        free = dict.fromkeys(v for v in used if v not in defined)
        return jex.Jaxpr((), [*free], outvars, equations, debug_info=program.debug_info)

    def signature(self, program: Program, inputs: Mapping[jex.Var, int]) -> Hashable:
        """Equal for groups that are updated alike, given how inputs are numbered."""
        if self.row_local is not None:
            reads: Sequence[jex.Var] = self.row_local.inputs
            summed = tuple(
                signature(
                    [program.equations[s.position]],
                    s.operands,
                    program.equations[s.position].outvars,
                )
                for s in self.sums
            )
            update = self.row_local.signature(), summed
        else:
            reads = list(dict.fromkeys(self.reads(program)))
            update = signature(
                [program.equations[i] for i in self.equations],
                reads,
                [program.outvars[k] for k in self.outputs],
            )
        return (
            update,
            tuple(inputs[v] for v in reads),
            tuple(inputs[program.invars[i]] for i in self.loads),
            tuple(
                None if t.alias is None else inputs[program.invars[t.alias]]
                for t in self.targets
            ),
        )

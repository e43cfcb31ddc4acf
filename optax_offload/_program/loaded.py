"""What is loaded, or computed of that alone: made again wherever it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Set

from jax.extend import core as jex

from optax_offload._program.graph import Program, variables
from optax_offload._program.primitives import are_codes, facts, is_load


class Loaded:
    """The variables that are loaded, or computed of these alone.

    Whoever takes one loads it, or computes it, for itself: it need not be kept. So are
    codes on the device, and what is decoded of them.

    Attributes:
      given: The variables that are there all the time, as arguments on the device.
      rests: For each variable that is loaded what it is loaded of; for one that is said
        to hold codes, what these are.
      constants: What is computed of nothing.
    """

    def __init__(self, given: Set[jex.Var]):
        self.given = given
        self.rests: dict[jex.Var, jex.Var] = {}
        self.constants: set[jex.Var] = set()
        self._computed: set[jex.Var] = set()

    def __contains__(self, v: object) -> bool:
        return v in self.rests or v in self._computed

    def add(self, e: jex.JaxprEqn) -> None:
        """Notes what an equation makes, after all that it takes."""
        if len(e.outvars) != 1:
            return
        (v,) = e.outvars
        operands = {*variables(e.invars)}
        taken = operands - self.constants
        if is_load(e) or (are_codes(e) and operands <= self.given):
            (self.rests[v],) = operands
        elif facts(e).again and not taken:
            self.constants.add(v)
        elif facts(e).again:
            loaded = {x for x in taken if x in self}
            if loaded and taken - loaded <= self.given:
                self._computed.add(v)

    def made_of(
        self, program: Program, taken: Iterable[jex.Var]
    ) -> tuple[list[int], list[jex.Var]]:
        """What makes variables of what is loaded.

        Args:
          program: Where the equations are.
          taken: The variables; those that are nothing of the kind are left out.

        Returns:
          The equations that compute them, as positions in order, and what they load.
        """
        computed, takes = program.made_of(
            [*taken][::-1], lambda _, v: v in self._computed or v in self.constants
        )
        return computed, [v for v in takes if v in self.rests]

"""What a step's parts hand on to later ones, and what these compute again instead.

XLA computes arithmetic where its result is taken, and has only what products make in
memory: of a gelu the one product, and none of the five arrays that its derivative takes
of it. Handed on from loop to loop, each would be a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import Step, facts, nbytes, shape, variables
from optax_offload._rows import is_arithmetic


class Crossing:
    """The variables that go on from one part of a step to later ones."""

    def __init__(
        self,
        step: Step,
        parts: Sequence[Sequence[int]],
        fixed: Collection[jex.Var],
        is_given: Callable[[jex.Var], bool],
    ):
        """Chooses what is computed again.

        Args:
          step: The step.
          parts: The equations of each part, as positions.
          fixed: Variables that are handed on whatever it costs.
          is_given: Whether a variable is there in each part, at hardly any cost.
        """
        self._step, self._is_given = step, is_given
        self._made: dict[jex.Var, int] = {}
        # The last part that takes each variable.
        self._last: dict[jex.Var, int] = {}
        for n, positions in enumerate(parts):
            for i in positions:
                e = step.program.equations[i]
                self._made |= dict.fromkeys(e.outvars, n)
                self._last |= dict.fromkeys(variables(e.invars), n)
        self.handed = {v for v, n in self._made.items() if self._last.get(v, n) > n}
        candidates = [v for v in self.handed if v not in fixed and self._is_cheap(v)]
        position = step.program.producers
        candidates.sort(key=position.__getitem__, reverse=True)
        # What is dropped may leave others that are made of what goes on anyway.
        left = candidates
        while self._drop_singly(left):
            left = [v for v in left if v in self.handed]
        self._drop_together(left)

    def again(self, taken: Iterable[jex.Var], part: int) -> set[int]:
        """The equations that a part evaluates again for what it takes."""
        positions, _ = self._step.program.made_of(
            taken,
            lambda _, v: self._made.get(v, part) < part and v not in self.handed,
        )
        return {*positions}

    def _is_cheap(self, v: jex.Var) -> bool:
        """Returns whether a variable is arithmetic or looked up in a small table."""
        i = self._step.program.producers[v]
        e = self._step.program.equations[i]
        cheap = is_arithmetic(e) or facts(e).again
        movable = memory.movable_nbytes(v.aval) is not None
        return cheap and len(e.outvars) == 1 and movable and not self._step.tokens(i)

    def _leaves(
        self, v: jex.Var, stop: Callable[[jex.Var], bool]
    ) -> set[jex.Var] | None:
        """What a variable is computed of in its part; None if something is in none."""
        part, found = self._made[v], set[jex.Var]()
        waiting, seen = [v], {v}
        while waiting:
            x = waiting.pop()
            i = self._step.program.producers[x]
            for y in variables(self._step.program.equations[i].invars):
                if y in seen or self._is_given(y):
                    continue
                seen.add(y)
                if y not in self._made:
                    return None
                before = self._made[y] < part and y in self.handed
                if before or stop(y) or not self._is_cheap(y):
                    found.add(y)
                else:
                    waiting.append(y)
        return found

    def _cost(self, leaves: Iterable[jex.Var], until: int) -> int:
        """The bytes that leaves would be there for longer, times the parts."""
        return sum(
            _nbytes(y) * max(0, until - (self._last[y] if y in self.handed else n))
            for y in leaves
            for n in (self._made[y],)
        )

    def _saved(self, v: jex.Var) -> int:
        return _nbytes(v) * (self._last[v] - self._made[v])

    def _drop(self, some: Mapping[jex.Var, set[jex.Var]]) -> None:
        self.handed.difference_update(some)
        for v, leaves in some.items():
            for y in leaves:
                self._last[y] = max(self._last.get(y, 0), self._last[v])
            self.handed.update(y for y in leaves if self._last[y] > self._made[y])

    def _drop_singly(self, candidates: Iterable[jex.Var]) -> bool:
        """Drops what costs less to have of what is handed on anyway, the last first.

        Returns:
          Whether it dropped anything.
        """
        before = len(self.handed)
        for v in candidates:
            leaves = self._leaves(v, self.handed.__contains__)
            if leaves is not None and self._cost(leaves, self._last[v]) < self._saved(
                v
            ):
                self._drop({v: leaves})
        return len(self.handed) < before

    def _drop_together(self, candidates: Sequence[jex.Var]) -> None:
        """Drops what one value would be handed on for, that is not yet."""
        others = self.handed.difference(candidates)
        groups: dict[jex.Var, dict[jex.Var, set[jex.Var]]] = {}
        for v in candidates:
            leaves = self._leaves(v, others.__contains__)
            new = [y for y in leaves or () if y not in self.handed]
            if leaves is not None and len(new) == 1:
                groups.setdefault(new[0], {})[v] = leaves
        for y, some in groups.items():
            until = max(self._last[v] for v in some)
            if self._cost([y], until) < sum(map(self._saved, some)):
                self._drop(some)


def _nbytes(v: jex.Var) -> int:
    return nbytes([v]) if shape(v) else 0

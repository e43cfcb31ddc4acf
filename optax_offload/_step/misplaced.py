"""State that an update takes: where it should come from, and whether it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from optax_offload._ground import compat, trees
from optax_offload._ground.errors import (
    UNPINNED,
    Evidence,
    MemoryKindError,
    causes,
    warn,
)
from optax_offload._places import memory, templates
from optax_offload._places.rules import OffloadConfig, decide
from optax_offload._program import Argument, Update


@dataclasses.dataclass
class Seen:
    """What an optimizer has seen of its state, to say what may have moved it.

    Attributes:
      made: Where its ``init`` ran, if it did.
      was_on_host: Whether an update took state from where the rules put it.
    """

    made: Literal["", "eagerly", "traced"] = ""
    was_on_host: bool = False


class Asked(NamedTuple):
    """The request to `offload`.

    Attributes:
      config: The rules.
      on_misplaced: The treatment of state that is on the device and should not be.
      seen: What the optimizer has seen of its state.
    """

    config: OffloadConfig
    on_misplaced: str
    seen: Seen


@dataclasses.dataclass(frozen=True)
class Placed:
    """The places that state must have when an update is called.

    Attributes:
      paths: The path of each leaf of the state, by its position among the arguments.
      names: The path of each argument, below what the argument is called.
      planned: The leaves that have to come from host memory, as positions.
      followed: The parameter that each leaf of host memory is sharded like.
      asked: The request to `offload`.
      of_nnx: Whether the state is of Flax NNX.
    """

    paths: Mapping[int, str]
    names: Sequence[str]
    planned: Sequence[int]
    followed: Mapping[int, int]
    asked: Asked
    of_nnx: bool

    @classmethod
    def of(
        cls,
        update: Update,
        asked: Asked,
        args: tuple[Any, ...],
        state: Any,
    ) -> Placed:
        """As rules and the types of a call's arguments say."""
        is_nnx = trees.is_of_nnx
        first = len(jax.tree.leaves(args[0]))
        leaves = dict(enumerate(trees.leaves_with_paths(state), start=first))
        sizes = [(path, memory.movable_nbytes(x)) for path, x in leaves.values()]
        placements = decide(asked.config.made_lenient(), sizes)
        on_host = {i for i, (_, x) in leaves.items() if memory.on_host(x)}
        # State whose first update widens its dtype may have been too small before.
        after = {o.path for o in update.outputs if o.stored and not o.is_update}
        planned = [
            i
            for i, placement in zip(leaves, placements, strict=True)
            if placement.memory_kind == "pinned_host"
            and (i in on_host or leaves[i][0] in after)
        ]
        return cls(
            {i: path for i, (path, _) in leaves.items()},
            _names(args),
            planned,
            _followed(
                {i: leaves[i] for i in sorted(on_host.union(planned))},
                args,
                first + len(leaves),
            ),
            asked,
            any(map(is_nnx, jax.tree.leaves(state, is_leaf=is_nnx))),
        )

    def check(self, found: Mapping[int, Argument], typed: Collection[int]) -> None:
        """Raises or warns of state that is not where it should be.

        Args:
          found: The program's facts about those arguments of the call that are its own.
          typed: The arguments whose types are of host memory. Types may be wrong (F28).
        """
        unpinned = {i for i, x in found.items() if x.memory_kind == "unpinned_host"}
        wrong = unpinned.difference(self.planned if self._moves else ())
        if wrong:
            names = [self.names[i] for i in sorted(wrong)]
            raise MemoryKindError(
                f"in unpinned_host, and given to update or init: "
                f"{trees.listed(names)}. {UNPINNED}"
            )
        on_device = [
            i
            for i in self.planned
            if (not found[i].on_host if i in found else i not in typed)
        ]
        self._tell("on the device", on_device, found)
        unpinned = sorted(unpinned.intersection(self.planned))
        self._tell("in unpinned_host", unpinned, found)
        self.asked.seen.was_on_host |= bool(self.planned) and not on_device

        def parts(i: int) -> int:
            sharding = found[i].sharding if i in found else None
            return 0 if sharding is None else sharding.parts

        replicated = [
            self.paths[i]
            for i, j in self.followed.items()
            if parts(i) == 1 and parts(j) > 1
        ]
        if replicated:
            warn(
                "state in host memory is replicated, with a copy for each device, "
                "while the parameters that it follows are sharded: "
                f"{trees.listed(replicated)}. A jit that makes parameters and state "
                "shards only what its out_shardings name. Shard the state once, before "
                "the first step: state = optax_offload.place(state, "
                "optax_offload.eval_shape(tx.init, params)). If you want copies, "
                "ignore this warning"
            )

    @property
    def _moves(self) -> bool:
        return self.asked.on_misplaced == "move"

    def _tell(
        self, where: str, misplaced: Sequence[int], found: Mapping[int, Argument]
    ) -> None:
        """Raises or warns of state that should have come from the host and did not."""
        if not misplaced:
            return
        came = (
            f"state planned for pinned_host came to update {where}: "
            f"{trees.listed([self.paths[i] for i in misplaced])}"
        )
        if not self._moves:
            raise MemoryKindError(f"{came}. {causes(self._evidence(found))}")
        warn(
            f"{came}. All of it is on the device during this step. The step returns it "
            "in host memory (unless the out_shardings of a jit around it move it "
            "again) and compiles once more when it comes from there"
        )

    def _evidence(self, found: Mapping[int, Argument]) -> Evidence:
        """What is known about the arguments of a call."""
        shardings = [x.sharding for x in found.values() if x.sharding is not None]
        return Evidence(
            was_on_host=self.asked.seen.was_on_host,
            made=self.asked.seen.made,
            on_mesh=any(x.mesh.size > 1 for x in shardings),
            in_body=not found,
            mapped=compat.maps_over_axes(),
            of_nnx=self.of_nnx,
        )


def _names(args: tuple[Any, ...]) -> list[str]:
    """The path of each argument of an update, or of an init."""
    called = ("updates", "state", "params", "extra arguments")
    given = zip(called if len(args) > 1 else ("params",), args, strict=False)
    return [
        f"{name}/{path}" if path else name
        for name, arg in given
        for path, _ in trees.leaves_with_paths(arg)
    ]


def _followed(
    state: Mapping[int, tuple[str, Any]], args: tuple[Any, ...], first: int
) -> dict[int, int]:
    """The parameter that each leaf of a state is like, as positions.

    Args:
      state: Path and value of each, by position.
      args: All arguments, of which the third are the parameters.
      first: The position of the first leaf of these.
    """
    if not state:
        return {}
    typed = [(path, jax.typeof(x)) for path, x in state.values()]
    like = templates.arguments_like(typed, args[2:3])
    return {i: first + j for i, j in zip(state, like, strict=True) if j is not None}

"""An update as one value: its equations, its inputs and its outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._ground import compat, trees
from optax_offload._places import memory, templates
from optax_offload._places.rules import OffloadConfig, decide
from optax_offload._program.build import flatten
from optax_offload._program.graph import Program


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of an update.

    Attributes:
      on_host: Whether it comes from host memory, and has to be loaded.
      slice_axis: The axis along which it may be sliced; None where it must not be;
        "auto" where its own type does not say.
    """

    on_host: bool = False
    slice_axis: int | Literal["auto"] | None = "auto"


@dataclasses.dataclass(frozen=True)
class Output:
    """A result of an update.

    Attributes:
      path: The path of the leaf in the tree of updates or of state.
      memory_kind: The memory kind that it has to have.
      alias: Position of the input that it replaces: of an update its gradient, of new
        state the old. None where there is none.
      is_update: Whether it is an update, and not new state.
      like: Position of the input that it is sharded like, where it replaces none.
      holds_codes: Whether it has codes of 8 bits, two in a word, that stand for floats.
      made_along: The axis along which it may be made in slices, where it replaces none;
        None where it must not be.
    """

    path: str
    memory_kind: str
    alias: int | None
    is_update: bool
    holds_codes: bool = False
    like: int | None = None
    made_along: int | None = None

    @property
    def stored(self) -> bool:
        """Returns whether it is moved to host memory."""
        return self.memory_kind != "device"

    @property
    def made(self) -> bool:
        """Returns whether it is new in host memory, where it replaces nothing."""
        return self.stored and self.alias is None


@dataclasses.dataclass(frozen=True)
class Update:
    """An update: updates and new state as a function of gradients, state and more.

    Attributes:
      program: The equations.
      inputs: The facts about each argument.
      outputs: The facts about each result.
    """

    program: Program
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]

    @property
    def loads(self) -> list[int]:
        """The positions of the inputs that come from host memory."""
        return [i for i, x in enumerate(self.inputs) if x.on_host]

    @property
    def stores(self) -> list[int]:
        """The positions of the outputs that go to host memory."""
        return [k for k, output in enumerate(self.outputs) if output.stored]

    @functools.cached_property
    def encoded(self) -> frozenset[int]:
        """The positions of the inputs that hold codes of 8 bits."""
        encoded = (o.alias for o in self.outputs if o.holds_codes)
        return frozenset(i for i in encoded if i is not None)

    @property
    def only_stores(self) -> bool:
        """Returns whether it stores what it is given, as where gradients wait."""
        given = all(isinstance(a, jex.Var) for a in self.program.outvars)
        return given and not (self.program.equations or self.loads)

    @property
    def paths(self) -> list[str]:
        """The path of each output."""
        return [output.path for output in self.outputs]

    def with_inputs_on_host(self, positions: Collection[int]) -> Update:
        """The update whose inputs at these positions come from host memory."""
        inputs = tuple(
            dataclasses.replace(x, on_host=i in positions)
            for i, x in enumerate(self.inputs)
        )
        return dataclasses.replace(self, inputs=inputs)

    def in_place(self, k: int) -> int | None:
        """The input that an output replaces, if it can be written into its buffer.

        Scalars of host memory cannot, as all are loaded before the first stage.
        """
        alias = self.outputs[k].alias
        if alias is None:
            return None
        before: Any = self.program.invars[alias].aval
        after: Any = self.program.outvars[k].aval
        # In Explicit mode state may have come sharded otherwise than it leaves.
        same_type = all(
            getattr(before, x) == getattr(after, x) for x in ("shape", "dtype")
        ) and memory.explicit_sharding(before) == memory.explicit_sharding(after)
        on_host = self.inputs[alias].on_host
        same_memory = on_host == self.outputs[k].stored
        there = bool(before.shape) or not on_host
        return alias if same_type and same_memory and there else None

    def restricted(
        self, wanted: Sequence[int], known: Sequence[jex.Var] = ()
    ) -> tuple[Update, list[int]]:
        """The update for some of its outputs only, without what has effects.

        Args:
          wanted: The outputs, as positions.
          known: Variables that are arguments, after the others.

        Returns:
          The update, and the positions of the inputs that it takes.
        """
        outvars = [self.program.outvars[k] for k in wanted]
        given = {*known}
        positions, _ = self.program.made_of(
            outvars,
            lambda e, _: not compat.has_effects(e) and given.isdisjoint(e.outvars),
        )
        equations = [self.program.equations[i] for i in positions]
        program = dataclasses.replace(
            self.program, outvars=outvars, equations=equations
        )
        used = set(program.used)
        outputs = [self.outputs[k] for k in wanted]
        # State is written into the buffer of the old, whether that is read or not. An
        # update that does not read its gradient does without: there may be none.
        old = (o.alias for o in outputs if not o.is_update and o.alias is not None)
        used.update(program.invars[i] for i in old)
        kept = [i for i, v in enumerate(program.invars) if v in used]
        position: dict[int | None, int] = {i: at for at, i in enumerate(kept)}
        invars = [*(program.invars[i] for i in kept), *known]
        program = dataclasses.replace(program, equations=equations, invars=invars)
        inputs = (*(self.inputs[i] for i in kept), *(Input() for _ in known))
        placed = [
            dataclasses.replace(
                o, alias=position.get(o.alias), like=position.get(o.like)
            )
            for o in outputs
        ]
        return Update(program, inputs, tuple(placed)), kept


def trace(
    fn: Callable[..., tuple[Any, Any]],
    config: OffloadConfig,
    args: tuple[Any, ...],
    state: Any,
) -> tuple[Update, Any]:
    """Traces a function that returns (updates, state), as if all were on the device.

    Args:
      fn: The function.
      config: The rules, by which leaves of the new state get their memory kind.
      args: Its arguments, of which the first are gradients and the second ``state``.
      state: The state before; () where there is none.

    Returns:
      The update, and the tree structure of its outputs.

    Raises:
      ValueError: A rule matches no leaf.
      TypeError: The function puts state into host memory itself.
    """
    leaves, structure = jax.tree.flatten(args)
    types = jax.tree.unflatten(structure, [memory.device_type(x) for x in leaves])
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*types)
    program = flatten(closed, once=True)
    with_paths, out_structure = trees.flatten_with_path(out)
    made = [
        (trees.path_string(keys[1:]), a.aval)
        for (keys, _), a in zip(with_paths, program.outvars, strict=True)
    ]
    updates = len(jax.tree.leaves(out[0]))
    kinds = ["device"] * updates + _state_kinds(config, made[updates:])
    aliases = _aliases(args, updates, [path for path, _ in made[updates:]], state)
    likes = templates.arguments_like(made, args)
    given = [a.aval for a in program.invars]
    outputs = [
        Output(
            path,
            kinds[k],
            aliases[k],
            k < updates,
            _holds_codes(path, aval),
            like,
            _made_along(config, path, [aval, *([] if like is None else [given[like]])]),
        )
        for k, ((path, aval), like) in enumerate(zip(made, likes, strict=True))
    ]
    inputs = _inputs(config, args, state)
    return Update(program, inputs, tuple(outputs)), out_structure


def _state_kinds(config: OffloadConfig, state: Sequence[tuple[str, Any]]) -> list[str]:
    elsewhere = [path for path, aval in state if memory.on_host(aval)]
    if elsewhere:
        raise TypeError(
            "a part of the wrapped optimizer is offloaded already: it puts "
            f"{', '.join(map(repr, elsewhere))} into host memory. Use one "
            "offload(...), around the whole or around parts that do not overlap"
        )
    sizes = [(path, memory.movable_nbytes(aval)) for path, aval in state]
    placements = decide(config, sizes)
    return [placement.memory_kind for placement in placements]


def _holds_codes(path: str, aval: Any) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith(trees.CODES) and aval.dtype == jnp.uint16


def _aliases(
    args: tuple[Any, ...], updates: int, paths_of_state: list[str], state: Any
) -> list[int | None]:
    """The argument that each output replaces: its gradient, or the state before.

    Arguments are (updates, state, ...), outputs (updates, state).
    """
    gradients = len(jax.tree.leaves(args[0]))
    before = [path for path, _ in trees.leaves_with_paths(state)]
    of_updates: list[int | None] = [None] * updates
    if updates == gradients:
        of_updates = [*range(updates)]
    of_state: list[int | None] = [None] * len(paths_of_state)
    if before == paths_of_state:  # Not where a codec comes or goes.
        of_state = [gradients + i for i in range(len(before))]
    return [*of_updates, *of_state]


def _made_along(config: OffloadConfig, path: str, types: Sequence[Any]) -> int | None:
    """The axis along which new state may be sliced, by its type and that it is like."""
    asked = _asked_axis(config, path)
    if asked != "auto":
        return asked
    axes = {memory.slice_axis(x) for x in types}
    return axes.pop() if len(axes) == 1 else None


def _asked_axis(config: OffloadConfig, path: str) -> int | Literal["auto"] | None:
    rule = next((r for r in config.rules if r.matches(path)), None)
    return "auto" if rule is None else rule.slice_axis


def _inputs(
    config: OffloadConfig, args: tuple[Any, ...], state: Any
) -> tuple[Input, ...]:
    """Arguments as their types and the rules have them."""
    leaves = jax.tree.leaves(args)
    inputs = [Input(memory.on_host(x)) for x in leaves]
    gradients = len(jax.tree.leaves(args[0]))
    for i, (path, _) in enumerate(trees.leaves_with_paths(state), start=gradients):
        axis = _asked_axis(config, path)
        if axis == "auto":
            # None is that of a type that does not say.
            axis = memory.slice_axis(leaves[i])
            axis = "auto" if axis is None else axis
        inputs[i] = dataclasses.replace(inputs[i], slice_axis=axis)
    return tuple(inputs)

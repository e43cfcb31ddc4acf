"""Shardings and memories of arguments, which only the lowered program has.

New state is sharded as the old. On a mesh in Auto mode a type does not say how an
argument is sharded. XLA then gives new state the sharding of its gradient, and where
that is another one (a replicated leaf in a step sharded over a mesh) it has to be made
whole again in host memory: host temporaries, or a program that a TPU's compiler
refuses. When a step is lowered, the sharding is an attribute of its main function's
argument, and what is stored is constrained to it while it is on the device.

A type does not always say where an argument is (F28). A value of host type may be on
the device, and a value of device type in host memory, as is state that a checkpoint
library restored onto one device. The memory is an attribute too.

An attribute of a donated argument says which result takes its buffer. `jax.jit` gives
host buffers to device results and device buffers to host results (`_step/donation.py`
says why, and fixes it): on the CPU such a call ends the process, and on a GPU the
result is silently in the other memory. So such a program is refused before it runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.extend import core as jex
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jax.sharding import AxisType, NamedSharding
from jaxlib.mlir.dialects import sdy

from optax_offload._ground.errors import MemoryKindError
from optax_offload._places import memory

_SHARDING = "sdy.sharding"
_MEMORY_KIND = "mhlo.memory_kind"
_ALIAS = "tf.aliasing_output"  # This argument's buffer is that result's.
_NAME = "jax.result_info"
_SHOWN = 5  # Of pairs, in a message.


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The spread of a value over the devices of a mesh.

    Attributes:
      attribute: The attribute of the program that says it.
      mesh: The mesh of its type, whose axes have sizes.
    """

    attribute: Any
    mesh: Any

    @property
    def parts(self) -> int:
        """Into how many parts the value is divided."""
        names = (name for d in range(self.ndim) for name in self.axes_of(d))
        return math.prod(self.mesh.shape.get(name, 1) for name in names)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the value."""
        return len(self._dimensions)

    def axes_of(self, dimension: int) -> list[str]:
        """The mesh axes that a dimension is spread over."""
        spread = sdy.DimensionShardingAttr(self._dimensions[dimension])
        return [sdy.AxisRefAttr(axis).name for axis in spread.axes]

    @property
    def _dimensions(self) -> Any:
        sharding: Any = sdy.TensorShardingAttr(self.attribute)
        return sharding.dimension_shardings


@dataclasses.dataclass(frozen=True)
class Spread:
    """The spread of a value over a mesh that an equation wants.

    Attributes:
      sharding: The sharding.
      axes: The axes of its mesh of which it says how the value is spread over them.
    """

    sharding: NamedSharding
    axes: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Argument:
    """Facts of a program about one of its arguments.

    Attributes:
      memory_kind: The memory that it is in.
      sharding: Its sharding; None where nothing says it.
    """

    memory_kind: str
    sharding: Sharded | None

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory."""
        return self.memory_kind != "device"


def arguments(
    ctx: mlir.LoweringRuleContext, values: Sequence[Any]
) -> dict[int, Argument]:
    """Finds the arguments of the program among values, and facts about them.

    Args:
      ctx: The context of the rule that lowers an equation.
      values: The operands of the equation.
    """
    main: Any = ctx.module_context.symbol_table["main"]
    found: dict[int, Argument] = {}
    for i, x in enumerate(values):
        position = _position(main, x)
        if position is None:
            continue
        attributes = ir.DictAttr(main.arg_attrs[position])
        sharding, aval = None, cast("Any", ctx.avals_in[i])
        if _SHARDING in attributes:
            sharding = Sharded(attributes[_SHARDING], aval.sharding.mesh)
        found[i] = Argument(_kind(attributes), sharding)
    return found


def lower(
    ctx: mlir.LoweringRuleContext,
    fn: Callable[..., list[Any]],
    found: Mapping[int, Argument],
    operands: Sequence[Any],
) -> Any:
    """Lowers a function in place of an equation.

    Each of its arguments has a type of the memory that the program has it in: types may
    be wrong (F28).

    Args:
      ctx: The context of the rule that lowers the equation.
      fn: The function.
      found: The facts of the program about the operands.
      operands: The operands of the equation.
    """
    types = [
        x
        if i not in found or memory.movable_nbytes(x) is None
        else (memory.host_type if found[i].on_host else memory.device_type)(x)
        for i, x in enumerate(ctx.avals_in)
    ]
    inside = ctx.replace(avals_in=types)
    results = mlir.lower_fun(fn, multiple_results=True)(inside, *operands)
    if inside.tokens_out is not None:  # Of effects in their order.
        ctx.set_tokens_out(inside.tokens_out)
    return results


def shardings(
    found: Mapping[int, Argument], types: Sequence[Any]
) -> dict[int, Sharded]:
    """Returns shardings of arguments whose types do not have one, by position."""
    return {
        i: a.sharding
        for i, a in found.items()
        # Random keys are on the device only.
        if a.sharding is not None
        and is_unknown(types[i])
        and memory.movable_nbytes(types[i]) is not None
    }


def sharding_of(known: Mapping[int, Sharded], i: int | None) -> Sharded | None:
    """Returns the sharding of an input, if it is one and that is known."""
    return None if i is None else known.get(i)


def constrain(y: jax.Array, like: Sharded | None, axis: int | None) -> jax.Array:
    """A value that is sharded as an argument.

    Args:
      y: The value, on the device, whole or some of its rows.
      like: The sharding of the argument; None leaves the value as it is.
      axis: The axis of the rows; None for a whole one.
    """
    return y if like is None else _constrain.bind(y, like=like, axis=axis)


def spread_as(x: jax.Array, wanted: Spread) -> jax.Array:
    """A value in host memory, spread over a mesh as an equation takes it.

    In Auto mode XLA shards a value as an equation takes it. In host memory that is a
    collective, which a GPU's compiler refuses and a TPU's leaves to the host. So what
    the program has in another way is loaded, sharded, and stored again.
    """
    return spread_over.bind(x, wanted=wanted)


def check_pairs(ctx: mlir.LoweringRuleContext) -> None:
    """Refuses a program in which a result takes a donated argument of another memory.

    Args:
      ctx: The context of the rule that lowers an equation of the program.

    Raises:
      MemoryKindError: There is such a pair.
    """
    main: Any = ctx.module_context.symbol_table["main"]
    pairs = (_crossing_pair(main, i) for i in range(len(main.arg_attrs)))
    crossing = [pair for pair in pairs if pair]
    if crossing:
        fix = (
            "take and return parameters and state in the same order, without others of "
            "their shapes among the results before them, and donate both "
            "(donate_argnums) or neither"
        )
        if any(pair.is_own for pair in crossing):
            fix = (
                "its out_shardings name no memory kinds, and so move new state to the "
                "device. Give it out_shardings=(..., optax_offload.state_shardings("
                "tx.init, params)), with the trainer's own as shardings="
            )
        raise MemoryKindError(
            "jax.jit writes results into donated arguments of another memory, which "
            "ends the process on a CPU and leaves the result in the wrong memory on a "
            "GPU. It pairs them by shape and dtype alone, in their order:\n- "
            + "\n- ".join(pair.text for pair in crossing[:_SHOWN])
            + f"\nand {len(crossing) - _SHOWN} more" * (len(crossing) > _SHOWN)
            + "\nJit the step with optax_offload.jit, which pairs within a memory. If "
            f"jax.jit has to stay: {fix}"
        )


def is_unknown(aval: Any) -> bool:
    """Returns whether a value is on several devices and its type does not say how."""
    mesh = aval.sharding.mesh
    return any(
        kind == AxisType.Auto and mesh.shape[name] > 1
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


def _lower_constrain(
    ctx: mlir.LoweringRuleContext, y: Any, *, like: Sharded, axis: int | None
) -> list[Any]:
    if axis is not None and like.axes_of(axis):
        return [y]  # Of rows that are spread over devices a slice is none of these.
    sharding: Any = sdy.TensorShardingAttr(like.attribute)
    aval: Any = ctx.avals_in[0]
    last = len(aval.shape) - 1
    if last >= 0:
        parts = math.prod(like.mesh.shape[name] for name in like.axes_of(last))
        if aval.shape[last] % parts:
            sharding = _with_whole_rows(sharding)  # Scales of an encoded leaf.
    return [sdy.ShardingConstraintOp(y, sharding).result]


def _position(main: Any, x: Any) -> int | None:
    """Returns the position of a value among the program's arguments."""
    if isinstance(x.owner, ir.Block) and x.owner == main.entry_block:
        return ir.BlockArgument(x).arg_number
    return None


def _kind(attributes: Any) -> str:
    """The memory kind that an argument or a result of the program has."""
    if _MEMORY_KIND not in attributes:
        return "device"  # No argument of the program has one, so it is the default.
    kind: Any = ir.StringAttr(attributes[_MEMORY_KIND])
    return kind.value


class _Pair(NamedTuple):
    """An argument, and a result of another memory that takes its buffer.

    Attributes:
      text: Both, for a person.
      is_own: Whether the result is what replaces the argument, moved to the device.
    """

    text: str
    is_own: bool


def _crossing_pair(main: Any, i: int) -> _Pair | None:
    """An argument and the result that takes its buffer, if in two kinds of memory."""
    argument = ir.DictAttr(main.arg_attrs[i])
    if _ALIAS not in argument:
        return None
    j = ir.IntegerAttr(argument[_ALIAS]).value
    result = ir.DictAttr(main.result_attrs[j])
    if _kind(argument) == _kind(result):
        return None
    # What JAX calls them: their paths in the call and in what it returns.
    location = main.entry_block.arguments[i].location
    name = getattr(location, "name_str", "") or f"argument {i}"
    other = ir.StringAttr(result[_NAME]).value if _NAME in result else f"result {j}"
    below = re.sub(r"^\w+", "", name)  # As in "state[0].mu['w']".
    return _Pair(
        f"{name} ({_kind(argument)}) and {other} ({_kind(result)}), "
        f"each {main.type.inputs[i]}",
        _kind(result) == "device" and bool(below) and other.endswith(below),
    )


def _with_whole_rows(sharding: Any) -> Any:
    """The sharding with the last dimension spread over no devices."""
    dimensions = [*sharding.dimension_shardings]
    dimensions[-1] = sdy.DimensionShardingAttr.get([], is_closed=True)
    return sdy.TensorShardingAttr.get(sharding.mesh_or_ref, dimensions)


# Lowered where transfers are written (`_emit/spread.py`).
spread_over = jex.Primitive("spread_as")
spread_over.def_abstract_eval(lambda x, **_: x)
_constrain = jex.Primitive("constrain_to_sharding_of_argument")
_constrain.def_abstract_eval(lambda y, **_: y)
# Lowered where it is, not in a function of its own that JAX would use again.
mlir.register_lowering(_constrain, _lower_constrain, cacheable=False)

"""What only the compiled program says of arguments: their shardings and memories.

New state is sharded as the old. On a mesh in Auto mode a type does not say how an
argument is sharded. XLA then gives new state the sharding of its gradient, and where
that is another one (a replicated leaf in a step sharded over a mesh) it has to be made
whole again in host memory: host temporaries, or a program that a TPU's compiler
refuses. When a step is lowered, the sharding is an attribute of its main function's
argument. It is noted there, and what is stored is constrained to it while it is on the
device.

Nor does a type always say where an argument is (F28): what the type has in host memory,
and the program on the device, is told when the step is lowered.

Whose buffer a result takes is an attribute of a donated argument. `jax.jit` gives host
buffers to device results and device buffers to host results (`_jit/donation.py` says
why, and mends it): on the CPU such a call ends the process, and on a GPU the result is
silently in the other memory. So such a program is refused before it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.interpreters.mlir import ir
from jax.sharding import AxisType
from jaxlib.mlir.dialects import sdy

from optax_offload import _memory
from optax_offload._errors import MemoryKindError

T = TypeVar("T")

_SHARDING = "sdy.sharding"
_MEMORY_KIND = "mhlo.memory_kind"
_ALIAS = "tf.aliasing_output"  # This argument's buffer is that result's.
_NAME = "jax.result_info"


class Cell:
    """The sharding of one argument, known once it is lowered.

    Attributes:
      sharding: An attribute of the program; None where it does not say.
    """

    def __init__(self):
        self.sharding: Any = None


def note_arguments(
    args: T, tell: Callable[[int], None], *, on_device: bool = False
) -> tuple[T, Mapping[int, Cell]]:
    """Notes how what comes from the host is sharded, and that it does.

    Args:
      args: A pytree of the arguments of an update, as they came.
      tell: Called when the program is lowered, with the position of a leaf that its
        type has in host memory and the program on the device.
      on_device: Whether it is noted how what is on the device is sharded too.

    Returns:
      The arguments to go on with, and a cell for each leaf that needs one, by position.
    """
    leaves, structure = jax.tree.flatten(args)
    cells = {
        i: Cell()
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array)
        and (on_device or _memory.on_host(x))
        and is_unknown(jax.typeof(x))
    }
    for i, x in enumerate(leaves):
        from_host = isinstance(x, jax.Array) and _memory.on_host(x)
        if isinstance(x, jax.Array) and (on_device or from_host):
            told = functools.partial(tell, i) if from_host else None
            leaves[i] = _note.bind(x, cell=cells.get(i), tell=told)
    return jax.tree.unflatten(structure, leaves), cells


def constrain(y: jax.Array, cell: Cell | None, axis: int | None) -> jax.Array:
    """A value that replaces the argument of a cell, sharded as that is.

    Args:
      y: The value, on the device, whole or some of its rows.
      cell: The argument's; None leaves the value as it is.
      axis: The axis of the rows; None for a whole one.
    """
    return y if cell is None else _constrain.bind(y, cell=cell, axis=axis)


def is_noted(e: jex.JaxprEqn) -> bool:
    """Whether an equation only notes what the program says of its operand."""
    return e.primitive is _note


def check_pairs(ctx: mlir.LoweringRuleContext) -> None:
    """Refuses a program in which a result takes a donated argument of another memory.

    Args:
      ctx: Of the rule that lowers an equation of the program.

    Raises:
      MemoryKindError: There is such a pair.
    """
    main: Any = ctx.module_context.symbol_table["main"]
    pairs = (_crossing_pair(main, i) for i in range(len(main.arg_attrs)))
    crossing = [pair for pair in pairs if pair]
    if crossing:
        raise MemoryKindError(
            "jax.jit writes results into donated arguments of another memory, which "
            "ends the process on a CPU and leaves the result in the wrong memory on a "
            "GPU. It pairs them by shape and dtype alone, in their order:\n- "
            + "\n- ".join(crossing)
            + "\nJit the step with optax_offload.jit, which pairs within a memory. If "
            "jax.jit has to stay: take and return parameters and state in the same "
            "order, without others of their shapes among the results before them, and "
            "donate both (donate_argnums) or neither"
        )


def is_unknown(aval: Any) -> bool:
    """Whether a value is on several devices and its type does not say how."""
    mesh = aval.sharding.mesh
    return any(
        kind == AxisType.Auto and mesh.shape[name] > 1
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


def _lower_note(
    ctx: mlir.LoweringRuleContext,
    x: Any,
    *,
    cell: Cell | None,
    tell: Callable[[], None] | None,
) -> list[Any]:
    if cell is not None:
        cell.sharding = None
    main: Any = ctx.module_context.symbol_table["main"]
    if isinstance(x.owner, ir.Block) and x.owner == main.entry_block:
        position = ir.BlockArgument(x).arg_number
        attributes = ir.DictAttr(main.arg_attrs[position])
        if _crossing_pair(main, position):
            check_pairs(ctx)
        if cell is not None and _SHARDING in attributes:
            cell.sharding = attributes[_SHARDING]
        if tell is not None and not _is_on_host(attributes):
            tell()
    return [x]


def _is_on_host(attributes: Any) -> bool:
    return _kind(attributes) != "device"


def _kind(attributes: Any) -> str:
    """The memory kind that an argument or a result of the program has."""
    if _MEMORY_KIND not in attributes:
        return "device"  # No argument of the program has one, so it is the default.
    kind: Any = ir.StringAttr(attributes[_MEMORY_KIND])
    return kind.value


def _crossing_pair(main: Any, i: int) -> str:
    """An argument and the result that takes its buffer, if in two kinds of memory."""
    argument = ir.DictAttr(main.arg_attrs[i])
    if _ALIAS not in argument:
        return ""
    j = ir.IntegerAttr(argument[_ALIAS]).value
    result = ir.DictAttr(main.result_attrs[j])
    if _kind(argument) == _kind(result):
        return ""
    # What JAX calls them: their paths in the call and in what it returns.
    location = main.entry_block.arguments[i].location
    name = getattr(location, "name_str", "") or f"argument {i}"
    other: Any = result[_NAME] if _NAME in result else None
    other = ir.StringAttr(other).value if other else f"result {j}"
    return (
        f"{name} ({_kind(argument)}) and {other} ({_kind(result)}), "
        f"each {main.type.inputs[i]}"
    )


def _lower_constrain(
    ctx: mlir.LoweringRuleContext, y: Any, *, cell: Cell, axis: int | None
) -> list[Any]:
    if cell.sharding is None:
        return [y]
    sharding: Any = sdy.TensorShardingAttr(cell.sharding)
    if axis is not None and _axes_of(sharding, axis):
        return [y]  # Of rows that are spread over devices a slice is none of these.
    return [sdy.ShardingConstraintOp(y, sharding).result]


def _axes_of(sharding: Any, dimension: int) -> int:
    """How many mesh axes a dimension is spread over."""
    return len(sdy.DimensionShardingAttr(sharding.dimension_shardings[dimension]).axes)


def _primitive(name: str, lower: Any) -> jex.Primitive:
    """A primitive that computes nothing."""
    made = jex.Primitive(name)
    made.def_impl(lambda x, **_: x)
    made.def_abstract_eval(lambda x, **_: x)
    # Lowered where it is, not in a function of its own that JAX would use again.
    mlir.register_lowering(made, lower, cacheable=False)
    return made


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    return _note.bind(*args, **params), dims[0]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return _note.bind(*primals, **params), tangents[0]


_note = _primitive("note_argument", _lower_note)
batching.primitive_batchers[_note] = _batched
ad.primitive_jvps[_note] = _jvp
_constrain = _primitive("constrain_to_noted_sharding", _lower_constrain)

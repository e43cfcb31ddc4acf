"""What only the compiled program says of arguments: their shardings and memories.

New state is sharded as the old. On a mesh in Auto mode a type does not say how an
argument is sharded. XLA then gives new state the sharding of its gradient, and where
that is another one (a replicated leaf in a step sharded over a mesh) it has to be made
whole again in host memory: host temporaries, or a program that a TPU's compiler
refuses. When a step is lowered, the sharding is an attribute of its main function's
argument. It is noted there, and what is stored is constrained to it while it is on the
device.

Nor does a type always say where an argument is (F28): what the type has in host memory,
and the program on the device, is told when the step is lowered. What the type has on
the device may be in host memory, as state is that a checkpoint library restored onto
one device: `expect_on_host` goes on with it as with a host value, and tells of those
that were none.

Whose buffer a result takes is an attribute of a donated argument. `jax.jit` gives host
buffers to device results and device buffers to host results (`_jit/donation.py` says
why, and mends it): on the CPU such a call ends the process, and on a GPU the result is
silently in the other memory. So such a program is refused before it runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
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
      mesh: The mesh of its type, whose axes have sizes.
    """

    def __init__(self, mesh: Any):
        self.sharding: Any = None
        self.mesh = mesh


def note_arguments(
    args: T, tell: Callable[[int], None] | None = None, *, on_device: bool = False
) -> tuple[T, Mapping[int, Cell]]:
    """Notes how what comes from the host is sharded, and that it does.

    Args:
      args: A pytree of the arguments of an update, as they came.
      tell: Called when the program is lowered, with the position of a leaf that its
        type has in host memory and the program on the device. None: nobody is told.
      on_device: Whether it is noted how what is on the device is sharded too.

    Returns:
      The arguments to go on with, and a cell for each leaf that needs one, by position.
    """
    leaves, structure = jax.tree.flatten(args)
    # Random keys are on the device only, and a note would count as a use of them.
    noted = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array)
        and _memory.movable_nbytes(x) is not None
        and (on_device or _memory.on_host(x))
    ]
    types = {i: jax.typeof(leaves[i]) for i in noted}
    cells = {i: Cell(t.sharding.mesh) for i, t in types.items() if is_unknown(t)}
    for i in noted:
        from_host = _memory.on_host(leaves[i])
        told = functools.partial(tell, i) if tell and from_host else None
        leaves[i] = _note.bind(leaves[i], cell=cells.get(i), tell=told)
    return jax.tree.unflatten(structure, leaves), cells


def expect_on_host(
    leaves: Sequence[Any], tell: Callable[[list[int]], None]
) -> list[Any]:
    """What is to be in host memory, and whose type has it on the device.

    Args:
      leaves: The values.
      tell: Called when the program is lowered, with the positions of those that are on
        the device there too. If it returns, they are moved to the host.

    Returns:
      The same values, in host memory by their type too.
    """
    return _expect.bind(*leaves, tell=tell)


def compare(
    leaves: Sequence[Any],
    parameters: Sequence[Any],
    tell: Callable[[list[int]], None],
) -> list[Any]:
    """State, and the parameters that it is to be sharded like.

    Args:
      leaves: The values of the state.
      parameters: One for each of these.
      tell: Called when the program is lowered, with the positions of those that all
        devices have whole, while the parameter is sharded, if there are any.

    Returns:
      The values to go on with: of the state, then of the parameters.
    """
    return _compare.bind(*leaves, *parameters, tell=tell)


def constrain(y: jax.Array, cell: Cell | None, axis: int | None) -> jax.Array:
    """A value that replaces the argument of a cell, sharded as that is.

    Args:
      y: The value, on the device, whole or some of its rows.
      cell: The argument's; None leaves the value as it is.
      axis: The axis of the rows; None for a whole one.
    """
    return y if cell is None else _constrain.bind(y, cell=cell, axis=axis)


def cell_of(cells: Mapping[int, Cell], i: int | None) -> Cell | None:
    """The cell of an input, if it is one and has one."""
    return None if i is None else cells.get(i)


def is_noted(e: jex.JaxprEqn) -> bool:
    """Whether an equation only notes what the program says of its operands."""
    return e.primitive in (_note, _compare)


def compares(e: jex.JaxprEqn) -> Callable[[list[int]], None] | None:
    """Whom an equation tells how state is sharded, if it is one of `compare`."""
    return e.params["tell"] if e.primitive is _compare else None


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
    position = _position(main, x)
    if position is not None:
        attributes = ir.DictAttr(main.arg_attrs[position])
        if _crossing_pair(main, position):
            check_pairs(ctx)
        if cell is not None and _SHARDING in attributes:
            cell.sharding = attributes[_SHARDING]
        if tell is not None and not _is_on_host(attributes):
            tell()
    return [x]


def _lower_expect(
    ctx: mlir.LoweringRuleContext, *leaves: Any, tell: Callable[[list[int]], None]
) -> Any:
    main: Any = ctx.module_context.symbol_table["main"]
    positions = [_position(main, x) for x in leaves]
    found = [
        i
        for i, at in enumerate(positions)
        if at is None or not _is_on_host(ir.DictAttr(main.arg_attrs[at]))
    ]
    if not found:
        return leaves
    tell(found)

    def moved(*xs: jax.Array) -> list[jax.Array]:
        return [_memory.transfer(x, "pinned_host") for x in xs]

    there = mlir.lower_fun(moved, multiple_results=True)(ctx, *leaves)
    return [there[i] if i in found else x for i, x in enumerate(leaves)]


def _lower_compare(
    ctx: mlir.LoweringRuleContext, *args: Any, tell: Callable[[list[int]], None]
) -> Any:
    main: Any = ctx.module_context.symbol_table["main"]

    def parts(i: int) -> int | None:
        """Into how many parts an argument is divided; None if nothing says it."""
        position = _position(main, args[i])
        attributes = None if position is None else ir.DictAttr(main.arg_attrs[position])
        if attributes is None or _SHARDING not in attributes:
            return None
        sharding: Any = sdy.TensorShardingAttr(attributes[_SHARDING])
        aval: Any = ctx.avals_in[i]
        dimensions = range(len(aval.shape))
        names = (name for d in dimensions for name in _axes_of(sharding, d))
        return math.prod(aval.sharding.mesh.shape.get(name, 1) for name in names)

    count = len(args) // 2
    found = [i for i in range(count) if parts(i) == 1 and (parts(count + i) or 1) > 1]
    if found:
        tell(found)
    return args


def _position(main: Any, x: Any) -> int | None:
    """Which of the program's arguments a value is."""
    if isinstance(x.owner, ir.Block) and x.owner == main.entry_block:
        return ir.BlockArgument(x).arg_number
    return None


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
    other = ir.StringAttr(result[_NAME]).value if _NAME in result else f"result {j}"
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
    aval: Any = ctx.avals_in[0]
    last = len(aval.shape) - 1
    if last >= 0:
        parts = math.prod(cell.mesh.shape[name] for name in _axes_of(sharding, last))
        if aval.shape[last] % parts:
            sharding = _with_whole_rows(sharding)  # Scales of an encoded leaf.
    return [sdy.ShardingConstraintOp(y, sharding).result]


def _axes_of(sharding: Any, dimension: int) -> list[str]:
    """The mesh axes that a dimension is spread over."""
    spread = sdy.DimensionShardingAttr(sharding.dimension_shardings[dimension])
    return [sdy.AxisRefAttr(axis).name for axis in spread.axes]


def _with_whole_rows(sharding: Any) -> Any:
    """The sharding with the last dimension spread over no devices."""
    dimensions = [*sharding.dimension_shardings]
    dimensions[-1] = sdy.DimensionShardingAttr.get([], is_closed=True)
    return sdy.TensorShardingAttr.get(sharding.mesh_or_ref, dimensions)


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


def _expect_now(*leaves: Any, tell: Callable[[list[int]], None]) -> list[Any]:
    found = [
        i for i, x in enumerate(leaves) if _memory.memory_kind_of(x) != "pinned_host"
    ]
    if found:
        tell(found)
    arrays = [jnp.asarray(x) for x in leaves]
    return [
        jax.device_put(x, _memory.on_mesh(x.sharding, "pinned_host")) for x in arrays
    ]


def _expect_batched(leaves: Any, dims: Any, **params: Any) -> Any:
    return _expect.bind(*leaves, **params), dims


def _expect_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    there = [
        ad.Zero(_memory.host_type(t.aval))
        if isinstance(t, ad.Zero)
        else _memory.transfer(t, "pinned_host")
        for t in tangents
    ]
    return _expect.bind(*primals, **params), there


def _compare_batched(args: Any, dims: Any, **params: Any) -> Any:
    return _compare.bind(*args, **params), dims


def _compare_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return _compare.bind(*primals, **params), tangents


_note = _primitive("note_argument", _lower_note)
batching.primitive_batchers[_note] = _batched
ad.primitive_jvps[_note] = _jvp
_constrain = _primitive("constrain_to_noted_sharding", _lower_constrain)
_expect = jex.Primitive("expect_on_host")
_expect.multiple_results = True
_expect.def_impl(_expect_now)
_expect.def_abstract_eval(lambda *avals, tell: [_memory.host_type(x) for x in avals])
mlir.register_lowering(_expect, _lower_expect, cacheable=False)
batching.primitive_batchers[_expect] = _expect_batched
ad.primitive_jvps[_expect] = _expect_jvp
_compare = jex.Primitive("compare_shardings")
_compare.multiple_results = True
_compare.def_impl(lambda *args, tell: list(args))
_compare.def_abstract_eval(lambda *avals, tell: list(avals))
mlir.register_lowering(_compare, _lower_compare, cacheable=False)
batching.primitive_batchers[_compare] = _compare_batched
ad.primitive_jvps[_compare] = _compare_jvp

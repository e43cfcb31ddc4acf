"""The dataflow of a program: how often loops run, and what instructions read and write.

`_hlo.py` reads the text; here it is followed from operand to operand.
"""

from __future__ import annotations

from collections.abc import Callable

from optax_offload.aot._hlo import Array, Computation, Instruction, Module

_SLICES = ("dynamic-slice", "slice", "gather")
# Names for values, and what is done at compile time.
_NO_DATA = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_NO_DATA_CALLS = {
    "AllocateBuffer",
    "ConcatBitcast",
    "Sharding",
    "SPMDFullToShardShape",
}


def touches_no_data(i: Instruction) -> bool:
    """Returns whether an instruction only names a value, or reserves a buffer."""
    return i.opcode in _NO_DATA or i.named("custom_call_target") in _NO_DATA_CALLS


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """The number of times that a while loop runs; None where the text does not tell.

    It is read from the compiler's note, else from a condition `counter < bound`, for a
    counter that starts at a constant and goes up by one, as in JAX's own loops.
    """
    if loop.known_trip_count is not None:
        return loop.known_trip_count
    condition = module.called(loop, "condition")
    start = caller.instructions[loop.operands[0]]
    if condition is None or start.opcode != "tuple":
        return None

    def carried(index: int) -> int | None:
        return _constant(module, caller, start.operands[index], lambda _: None)

    comparison = _comparison(module, condition, condition.root, carried)
    if comparison is None:
        return None
    bound, counter = comparison
    return max(0, bound - counter)


def _comparison(
    module: Module,
    computation: Computation,
    i: Instruction,
    argument: Callable[[int], int | None],
) -> tuple[int, int] | None:
    """The bound and the first value of `counter < bound`."""
    inner = module.called(i)
    if i.opcode == "fusion" and inner is not None:

        def outer(index: int) -> int | None:
            return _constant(module, computation, i.operands[index], argument)

        return _comparison(module, inner, inner.root, outer)
    if i.opcode != "compare" or i.named("direction") != "LT":
        return None
    counter, bound = (_constant(module, computation, o, argument) for o in i.operands)
    return None if counter is None or bound is None else (bound, counter)


def _constant(
    module: Module,
    computation: Computation,
    name: str,
    argument: Callable[[int], int | None],
) -> int | None:
    i = computation.instructions[name]
    if i.opcode == "constant":
        return int(i.literal) if i.literal.lstrip("-").isdecimal() else None
    if i.opcode == "parameter":
        return argument(int(i.literal))
    if i.opcode == "get-tuple-element":
        source = computation.instructions[i.operands[0]]
        if source.opcode == "parameter" and i.index is not None:
            return argument(i.index)
        return None
    if i.opcode in ("copy", "bitcast", "convert", "reshape"):
        return _constant(module, computation, i.operands[0], argument)
    return None


def accesses(
    module: Module, computation: Computation, i: Instruction
) -> tuple[list[tuple[Array, int]], list[tuple[Array, int]]]:
    """The arrays that an instruction, or what its `-start` begins, reads and writes.

    Returns:
      The operands with the bytes read of each, and the results with the bytes written.
      A slice reads only itself, an update in place only writes what it updates.
    """
    operands = [computation.instructions[o] for o in i.operands]
    if i.opcode == "copy-start":  # (destination, source, context)
        return [(a, a.nbytes) for a in i.parts[1]], [(a, a.nbytes) for a in i.parts[0]]
    if i.opcode.endswith("-start"):  # (operands, results, contexts)
        results = i.parts[1] if len(i.parts) > 1 else i.arrays
    else:
        results = i.arrays
    inner = module.called(i)
    if inner is not None:
        reads = [
            (_host_of(operand, parameter), _read_bytes(module, inner, parameter))
            for index, parameter in inner.parameters.items()
            for operand in operands[index : index + 1]
        ]
        written = _written(module, inner)
        if len(written) != len(results):
            written = [(a, a.nbytes) for a in results]
        return reads, [
            (a if a.on_host else b, size)
            for a, (b, size) in zip(results, written, strict=True)
        ]
    opcode = i.opcode.removesuffix("-start")
    if opcode in _SLICES:
        size = sum(a.nbytes for a in results)
        return [(operands[0].arrays[0], size)], [(a, a.nbytes) for a in results]
    if opcode == "dynamic-update-slice":
        update = operands[1].arrays[0]
        return [(update, update.nbytes)], [(a, update.nbytes) for a in results]
    reads = [(a, a.nbytes) for o in operands for a in o.arrays]
    return reads, [(a, a.nbytes) for a in results]


def _host_of(operand: Instruction, parameter: Instruction) -> Array:
    """A fusion's operand, in host memory if either side of the call says so."""
    outer, inner = operand.arrays, parameter.arrays
    return inner[0] if (inner and inner[0].on_host) or not outer else outer[0]


def _read_bytes(module: Module, computation: Computation, i: Instruction) -> int:
    """The number of bytes of a parameter that a fusion reads."""
    total = 0
    for user in computation.users.get(i.name, ()):
        first = user.operands[0] == i.name
        inner = module.called(user)
        if user.opcode in _SLICES and first:
            total += user.nbytes
        elif user.opcode == "dynamic-update-slice" and first:
            continue  # Updated in place.
        elif user.opcode == "bitcast":
            total += _read_bytes(module, computation, user)
        elif user.opcode == "fusion" and inner is not None:
            index = user.operands.index(i.name)
            total += _read_bytes(module, inner, inner.parameters[index])
        elif user.opcode != "tuple":
            return i.nbytes
    return min(total, i.nbytes)


def _written(module: Module, computation: Computation) -> list[tuple[Array, int]]:
    """The results of a fusion, and how many bytes of each it writes."""
    root = computation.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    found = []
    for name in names:
        i = result = computation.instructions[name]
        while i.opcode == "bitcast":
            i = computation.instructions[i.operands[0]]
        inner = module.called(i)
        if i.opcode == "dynamic-update-slice":
            size = computation.instructions[i.operands[1]].nbytes
        elif i.opcode == "parameter":
            size = 0
        elif i.opcode == "fusion" and inner is not None:
            size = sum(n for _, n in _written(module, inner))
        else:
            size = i.nbytes
        found += [(a, size) for a in result.arrays[:1]]
    return found

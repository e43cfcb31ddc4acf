"""Reading the text of a scheduled XLA program: as much of it as the census needs.

Instructions are in the order in which the compiler scheduled them. In a layout, `S(5)`
is host memory and `S(1)` a TPU's VMEM; without either a value is in device memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

DEVICE_SPACE, HOST_SPACE = 0, 5


@dataclasses.dataclass(frozen=True)
class Array:
    """An array, as printed: `f32[16,2048]{1,0:T(8,128)S(5)}`."""

    dtype: str
    dimensions: tuple[int, ...]
    space: int

    @property
    def size(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Without the padding of tiles; 0 for tokens and the like."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits[0]) if bits else 8 * (self.dtype == "pred")) // 8

    @property
    def on_host(self) -> bool:
        return self.space == HOST_SPACE


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: without the percent sign.
      opcode: as printed, as in "dynamic-slice-start".
      parts: its result, by the elements of its outermost tuple, each flattened.
      operands: their names.
      literal: the text between its parentheses.
      attributes: the text after them.
    """

    name: str
    opcode: str
    parts: tuple[tuple[Array, ...], ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def arrays(self) -> tuple[Array, ...]:
        return tuple(itertools.chain(*self.parts))

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.arrays)

    def named(self, attribute: str) -> str | None:
        """The name (of a computation, a target) that an attribute gives."""
        match = re.search(rf'\b{attribute}=[%"]?([\w.$\-]+)', self.attributes)
        return match[1] if match else None


@dataclasses.dataclass
class Computation:
    """Instructions by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for i in self:
            for operand in dict.fromkeys(i.operands):
                found.setdefault(operand, []).append(i)
        return found


@dataclasses.dataclass
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: Computation

    def called(
        self, instruction: Instruction, attribute: str = "calls"
    ) -> Computation | None:
        return self.computations.get(instruction.named(attribute) or "")


_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s+\(.*\{$")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?|token\[\]")
_SPACE = re.compile(r"S\((\d+)\)")


def parse(text: str) -> Module:
    """Reads a program.

    Raises:
      ValueError: the text is not that of a scheduled HLO module.
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError(
            "not the text of a scheduled HLO module, whose first line says "
            f"is_scheduled=true: {text[:80]!r}. Pass compiled.as_text()"
        )
    computations: dict[str, Computation] = {}
    entry = name = None
    instructions: dict[str, Instruction] = {}
    root = None
    for line in text.splitlines():
        if name is None:
            if match := _HEADER.match(line):
                name, instructions, root = match[2], {}, None
                entry = name if match[1] else entry
        elif line.startswith("}"):
            root = root or list(instructions.values())[-1]
            computations[name] = Computation(name, instructions, root)
            name = None
        else:
            instruction = _instruction(_COMMENT.sub("", line).strip())
            instructions[instruction.name] = instruction
            root = instruction if line.lstrip().startswith("ROOT ") else root
    if entry is None:
        raise ValueError("the HLO module has no ENTRY computation")
    return Module(computations, computations[entry])


def _instruction(line: str) -> Instruction:
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest)
    literal = rest[len(opcode) + 1 : end]
    # Operands may be printed with their shapes.
    operands = re.findall(r"%([\w.\-]+)", literal) if opcode != "constant" else []
    return Instruction(
        name=name.removeprefix("%"),
        opcode=opcode,
        parts=tuple(map(_arrays, _elements(shape))),
        operands=tuple(operands),
        literal=literal,
        attributes=rest[end + 1 :],
    )


def _closing(text: str) -> int:
    """The position of the parenthesis that closes the first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:200]!r}")


def _elements(shape: str) -> list[str]:
    """The elements of a tuple's outermost level, or the shape itself."""
    if not shape.startswith("("):
        return [shape]
    found, depth, start = [], 0, 1
    for match in re.finditer(r"[({\[]|[)}\]]|,", shape):
        if match[0] in "({[":
            depth += 1
        elif match[0] in ")}]":
            depth -= 1
        elif depth == 1:
            found.append(shape[start : match.start()])
            start = match.end()
    return [*found, shape[start:-1]]


def _arrays(shape: str) -> tuple[Array, ...]:
    found = []
    for dtype, sizes, layout in _ARRAY.findall(shape):
        space = _SPACE.search(layout)
        dimensions = tuple(int(s.lstrip("<=")) for s in sizes.split(",") if s)
        found.append(Array(dtype, dimensions, int(space[1]) if space else DEVICE_SPACE))
    return tuple(found)


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """How often a while loop runs, or None where the text does not tell.

    As the compiler noted it, else from a condition `counter < bound`, for a counter
    that starts at a constant and goes up by one, as JAX's own loops do.
    """
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
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
    if i.opcode != "compare" or "direction=LT" not in i.attributes:
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
        return int(i.literal) if re.fullmatch(r"-?\d+", i.literal) else None
    if i.opcode == "parameter":
        return argument(int(i.literal))
    if i.opcode == "get-tuple-element":
        source = computation.instructions[i.operands[0]]
        index = re.search(r"\bindex=(\d+)", i.attributes)
        if source.opcode == "parameter" and index:
            return argument(int(index[1]))
        return None
    if i.opcode in ("copy", "bitcast", "convert", "reshape"):
        return _constant(module, computation, i.operands[0], argument)
    return None


def accesses(
    module: Module, computation: Computation, i: Instruction
) -> tuple[list[tuple[Array, int]], list[tuple[Array, int]]]:
    """What an instruction, or what its `-start` begins, reads and writes.

    Returns:
      The operands with the bytes read of each, and the results with the bytes written.
      A slice reads only itself, an update in place only writes what it updates.
    """
    operands = [computation.instructions[o] for o in i.operands]
    if i.opcode == "copy-start":  # (destination, source, context)
        return [(a, a.bytes) for a in i.parts[1]], [(a, a.bytes) for a in i.parts[0]]
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
            written = [(a, a.bytes) for a in results]
        return reads, [
            (a if a.on_host else b, size)
            for a, (b, size) in zip(results, written, strict=True)
        ]
    opcode = i.opcode.removesuffix("-start")
    if opcode in _SLICES:
        size = sum(a.bytes for a in results)
        return [(operands[0].arrays[0], size)], [(a, a.bytes) for a in results]
    if opcode == "dynamic-update-slice":
        update = operands[1].arrays[0]
        return [(update, update.bytes)], [(a, update.bytes) for a in results]
    reads = [(a, a.bytes) for o in operands for a in o.arrays]
    return reads, [(a, a.bytes) for a in results]


_SLICES = ("dynamic-slice", "slice", "gather")


def _host_of(operand: Instruction, parameter: Instruction) -> Array:
    """A fusion's operand, in host memory if either side of the call says so."""
    outer, inner = operand.arrays, parameter.arrays
    return inner[0] if (inner and inner[0].on_host) or not outer else outer[0]


def _read_bytes(module: Module, computation: Computation, i: Instruction) -> int:
    """How many bytes of a parameter a fusion reads."""
    total = 0
    for user in computation.users.get(i.name, ()):
        first = user.operands[0] == i.name
        inner = module.called(user)
        if user.opcode in _SLICES and first:
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and first:
            continue  # Updated in place.
        elif user.opcode == "bitcast":
            total += _read_bytes(module, computation, user)
        elif user.opcode == "fusion" and inner is not None:
            index = user.operands.index(i.name)
            total += _read_bytes(module, inner, inner.parameters[index])
        elif user.opcode != "tuple":
            return i.bytes
    return min(total, i.bytes)


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
            size = computation.instructions[i.operands[1]].bytes
        elif i.opcode == "parameter":
            size = 0
        elif i.opcode == "fusion" and inner is not None:
            size = sum(n for _, n in _written(module, inner))
        else:
            size = i.bytes
        found += [(a, size) for a in result.arrays[:1]]
    return found


def flops(module: Module, computation: Computation, i: Instruction) -> int:
    """The multiply-adds, two operations each, of matrix products and convolutions."""
    inner = module.called(i)
    if inner is not None:
        return sum(flops(module, inner, j) for j in inner)
    if i.opcode == "dot":
        left = computation.instructions[i.operands[0]].arrays[0]
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
        contracted = [int(n) for n in axes[1].split(",") if n] if axes else []
        return 2 * i.arrays[0].size * math.prod(left.dimensions[n] for n in contracted)
    if i.opcode == "convolution":
        return _convolution_flops(computation, i)
    if i.opcode == "custom-call" and "gemm" in (i.named("custom_call_target") or ""):
        # (m, k) by (k, n) is (m, n), whichever of them are transposed.
        m_k, k_n = (computation.instructions[o].arrays[0].size for o in i.operands[:2])
        m_n = i.arrays[0].size
        return 2 * math.isqrt(m_k * k_n * m_n)
    return 0


def _convolution_flops(computation: Computation, i: Instruction) -> int:
    """As XLA counts them: positions of the window that fall into padding are free.

    A TPU's batched matrix product is a convolution that is dilated such that all but
    the diagonal falls into it.
    """
    left, kernel = (computation.instructions[o].arrays[0] for o in i.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        return 0
    left_labels, kernel_labels, output_labels = labels.groups()
    output = i.arrays[0]
    window = dict(re.findall(r"(\w+)=([\w\-]+)", _window(i.attributes)))
    positions = 1
    for axis in sorted(c for c in output_labels if c.isdigit()):
        at = int(axis)
        positions *= _positions(
            inputs=left.dimensions[left_labels.index(axis)],
            kernel=kernel.dimensions[kernel_labels.index(axis)],
            outputs=output.dimensions[output_labels.index(axis)],
            stride=_nth(window.get("stride"), at),
            padding=int(_nth_text(window.get("pad"), at, "0_0").split("_")[0]),
            left_dilation=_nth(window.get("lhs_dilate"), at),
            kernel_dilation=_nth(window.get("rhs_dilate"), at),
        )
    features = output.dimensions[output_labels.index("f")]
    batch = output.dimensions[output_labels.index("b")]
    inputs = kernel.dimensions[kernel_labels.index("i")]
    return 2 * batch * features * inputs * positions


def _window(attributes: str) -> str:
    match = re.search(r"window=\{([^}]*)\}", attributes)
    return match[1] if match else ""


def _nth_text(text: str | None, at: int, default: str) -> str:
    return text.split("x")[at] if text else default


def _nth(text: str | None, at: int) -> int:
    return int(_nth_text(text, at, "1"))


@functools.cache
def _positions(
    inputs: int,
    kernel: int,
    outputs: int,
    stride: int,
    padding: int,
    left_dilation: int,
    kernel_dilation: int,
) -> int:
    """Pairs of an output and a kernel position that meet an input."""
    end = (inputs - 1) * left_dilation + 1
    found = 0
    for o in range(outputs):
        for k in range(kernel):
            at = o * stride - padding + k * kernel_dilation
            found += 0 <= at < end and at % left_dilation == 0
    return found

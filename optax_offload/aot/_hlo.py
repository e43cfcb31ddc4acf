"""Reading the text of a scheduled XLA program. Nothing else reads HLO text.

Instructions are in the order in which the compiler scheduled them. In a layout, `S(5)`
is host memory and `S(1)` a TPU's VMEM; without either a value is in device memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Memory spaces, by the numbers that XLA prints as `S(n)`.
DEVICE_SPACE, HOST_SPACE = 0, 5
_BITS_OF_A_BYTE = 8
# Bits of the dtypes whose name does not say them.
_BITS = {"pred": _BITS_OF_A_BYTE}
# What JAX calls the dtypes whose HLO names are abbreviations.
_DTYPES = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}

# An array's dtype, sizes and layout, as in `bf16[8,<=128]{1,0:T(8,128)(2,1)S(5)}`.
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?|token\[\]")
_SPACE = re.compile(r"S\((\d+)\)")
# The first line of a computation.
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s+\(.*\{$")
_COMMENT = re.compile(r"/\*.*?\*/")
# Arguments and results with their layouts, in the first line of a module.
_ENTRY_LAYOUT = re.compile(r"entry_computation_layout=\{(.*?)->(.*?)\}(?:, \w+=|$)")
_NUMPY_DTYPE = re.compile(r"(bf|f|s|u|c)(\d+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array, as printed: `f32[16,2048]{1,0:T(8,128)S(5)}`.

    Attributes:
      dtype: XLA's name of it, such as `"f32"`.
      dimensions: Its shape on one device.
      layout: The text between the braces, such as `"1,0:T(8,128)S(5)"`.
    """

    dtype: str
    dimensions: tuple[int, ...]
    layout: str = ""

    @property
    def space(self) -> int:
        """The number of its memory space."""
        match = _SPACE.search(self.layout)
        return int(match[1]) if match else DEVICE_SPACE

    @property
    def on_host(self) -> bool:
        """True if it is in host memory."""
        return self.space == HOST_SPACE

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.dimensions)

    @property
    def nbytes(self) -> int:
        """Its bytes without the padding of tiles; 0 for tokens and the like."""
        bits = re.search(r"\d+", self.dtype)
        each = int(bits[0]) if bits else _BITS.get(self.dtype, 0)
        return self.size * each // _BITS_OF_A_BYTE

    @property
    def numpy_dtype(self) -> str:
        """JAX's name of its dtype, such as `"float32"`."""
        if self.dtype == "pred":
            return "bool"
        match = _NUMPY_DTYPE.fullmatch(self.dtype)
        return f"{_DTYPES[match[1]]}{match[2]}" if match else self.dtype


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: Its name without the percent sign.
      opcode: The operation as printed, such as `"dynamic-slice-start"`.
      parts: The elements of its result's outermost tuple, each flattened.
      operands: The names of its operands.
      literal: The text between its parentheses.
      attributes: The text after them.
    """

    name: str
    opcode: str
    parts: tuple[tuple[Array, ...], ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of its result."""
        return tuple(itertools.chain(*self.parts))

    @property
    def nbytes(self) -> int:
        """The bytes of its result."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def starts(self) -> bool:
        """True if it begins an operation that another instruction waits for."""
        return self.opcode.endswith("-start") or self.opcode in ("send", "recv")

    @property
    def ends(self) -> bool:
        """True if it waits for, or goes on with, what another instruction began."""
        return self.opcode.endswith(("-done", "-update"))

    @property
    def op_name(self) -> str:
        """The operation of the program that it comes from; else its own name."""
        match = re.search(r'\bop_name="([^"]*)"', self.attributes)
        return match[1] if match else self.name

    @property
    def computes_on_host(self) -> bool:
        """True if the compiler left it to the host's processor.

        A GPU's compiler marks what it computes in host memory, and a TPU's calls the
        host; both do so for `compute_on`.
        """
        marked = '_xla_compute_type="host"' in self.attributes
        return marked or self.named("custom_call_target") == "HostExecute"

    @property
    def moves_with_host(self) -> bool:
        """True if it is a send or a receive whose other end is the host."""
        is_pair = self.opcode in ("send", "recv")
        return is_pair and "is_host_transfer=true" in self.attributes

    @property
    def known_trip_count(self) -> int | None:
        """The number of times that a loop runs; None if the compiler noted none."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    @property
    def copies_by_engine(self) -> bool:
        """True if a GPU's compiler gives this slice to the copy engines.

        It does so where the slice's position is a linear function of the counter of a
        loop of known trip count, and notes that function (F14).
        """
        return "dynamic_slice_config" in self.attributes

    @property
    def index(self) -> int | None:
        """The index of the element of a tuple that it takes."""
        match = re.search(r"\bindex=(\d+)", self.attributes)
        return int(match[1]) if match else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The names of the computations that a conditional chooses between."""
        names = self.braced("branch_computations").replace("%", "").split(",")
        names += [self.named(f"{w}_computation") or "" for w in ("true", "false")]
        return tuple(name.strip() for name in names if name.strip())

    @property
    def window(self) -> Mapping[str, str]:
        """The window of a convolution, such as `{"size": "3x3", "pad": "1_1x1_1"}`."""
        return dict(re.findall(r"(\w+)=([\w\-]+)", self.braced("window")))

    @property
    def dim_labels(self) -> tuple[str, str, str] | None:
        """A convolution's axes: of its input, its kernel and its output."""
        match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", self.attributes)
        return (match[1], match[2], match[3]) if match else None

    @property
    def backend_config(self) -> Mapping[str, Any]:
        """The compiler's own configuration of it; empty if it has none in JSON."""
        text = self.attributes.partition("backend_config=")[2]
        try:
            found, _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def integers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute, such as `lhs_contracting_dims={1,2}`."""
        return tuple(int(n) for n in self.braced(attribute).split(",") if n)

    def named(self, attribute: str) -> str | None:
        """The name (of a computation, a target) that an attribute gives."""
        match = re.search(rf'\b{attribute}=[%"]?([\w.$\-]+)', self.attributes)
        return match[1] if match else None

    def braced(self, attribute: str) -> str:
        """The text between the braces of an attribute; empty if it has none."""
        match = re.search(rf"\b{attribute}=\{{([^}}]*)\}}", self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass
class Computation:
    """Instructions in the order of the schedule.

    Attributes:
      name: Its name without the percent sign.
      instructions: The instructions by their names.
      root: The instruction whose result is the computation's.
    """

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by their numbers."""
        return {int(i.literal): i for i in self if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """The instructions that have an instruction among their operands."""
        found: dict[str, list[Instruction]] = {}
        for i in self:
            for operand in dict.fromkeys(i.operands):
                found.setdefault(operand, []).append(i)
        return found


@dataclasses.dataclass
class Module:
    """A program.

    Attributes:
      computations: All its computations by their names.
      entry: The computation that is the program.
      arguments: Its arguments, on one device.
      results: Its results, on one device.
    """

    computations: dict[str, Computation]
    entry: Computation
    arguments: tuple[Array, ...] = ()
    results: tuple[Array, ...] = ()

    def called(
        self, instruction: Instruction, attribute: str = "calls"
    ) -> Computation | None:
        """The computation that an attribute of an instruction names."""
        return self.computations.get(instruction.named(attribute) or "")

    def inside(self) -> frozenset[str]:
        """The computations that are one operation: what fusions and the like call."""
        calls = (i.named("calls") for c in self.computations.values() for i in c)
        return frozenset(name for name in calls if name)


def parse(text: str) -> Module:
    """Reads a program.

    Raises:
      ValueError: The text is not that of a scheduled HLO module.
    """
    header = text.split("\n", 1)[0]
    if "is_scheduled=true" not in header:
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
        raise ValueError(
            f"the HLO module has no ENTRY computation: {header[:80]!r}. Pass the whole "
            "of compiled.as_text()"
        )
    layout = _ENTRY_LAYOUT.search(_COMMENT.sub("", header))
    arguments, results = map(_arrays, layout.groups() if layout else ("", ""))
    return Module(computations, computations[entry], arguments, results)


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
    raise ValueError(
        f"unbalanced parentheses in HLO: {text[:200]!r}. Pass the whole of "
        "compiled.as_text()"
    )


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
        dimensions = tuple(int(s.lstrip("<=")) for s in sizes.split(",") if s)
        found.append(Array(dtype, dimensions, layout))
    return tuple(found)

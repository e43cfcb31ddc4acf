"""What a compiled program says of memory: its text, read.

XLA marks host memory by ``S(5)`` in the layout of an array.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\](?P<layout>\{[^{}]*\})?")
_INSTRUCTION = re.compile(
    r"^ *(?:ROOT )?%(?P<name>[^ ]+) = (?P<type>.*?) (?P<opcode>[a-z][\w-]*)\("
    r"(?P<operands>[^()]*)"
)
_DTYPES = {
    "bf16": "bfloat16",
    "f32": "float32",
    "pred": "bool",
    "s32": "int32",
    "u32": "uint32",
}
# They pass arrays on, wherever these are, as does what ends an asynchronous operation.
_PASS_ON = {"parameter", "tuple", "get-tuple-element", "bitcast", "opt-barrier"}
_PASS_ON |= {"while", "conditional", "call"}


class Array(NamedTuple):
    """An array in a program: of one device, in its memory or in the host's."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def on_host(self) -> bool:
        return "S(5)" in self.layout


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    results: list[Array]
    opcode: str
    operands: list[str]


def arrays_in(text: str) -> list[Array]:
    """The arrays of a type, as of ``(f32[8,128]{1,0:S(5)}, s32[])``."""
    return [
        Array(
            _DTYPES.get(match["dtype"], match["dtype"]),
            tuple(int(n) for n in match["shape"].split(",") if n),
            match["layout"] or "",
        )
        for match in _ARRAY.finditer(text)
    ]


def signature(compiled: jax.stages.Compiled) -> tuple[list[Array], list[Array]]:
    """The arguments and the results of a compiled program, on one device."""
    header = _text(compiled).splitlines()[0]
    match = re.search(r"entry_computation_layout=\{(.*?)->(.*?)\}(, \w+=|$)", header)
    return arrays_in(match[1]), arrays_in(match[2])


def instructions(compiled: jax.stages.Compiled) -> Iterator[Instruction]:
    """All lines of a program that compute or move something, but those in fusions.

    A fusion, or what is asynchronous, is one operation; what it is made of has no place
    in memory.
    """
    text = _text(compiled)
    inside = set(re.findall(r"calls=%([^ ,]+)", text))
    computation = ""
    for line in text.splitlines():
        if line.endswith("{") and (match := re.match(r"(?:ENTRY )?%([^ ]+) \(", line)):
            computation = match[1]
        elif (match := _INSTRUCTION.match(line)) and computation not in inside:
            yield Instruction(
                match["name"],
                arrays_in(match["type"]),
                match["opcode"],
                re.findall(r"%([^ ,]+)", match["operands"]),
            )


class Transfers(NamedTuple):
    """What crosses between the memories, and what only seems to.

    Attributes:
      loads: from the host's to the device's; the arrays in host memory.
      stores: the other way; the arrays in host memory.
      pretended: copies within device memory, same layout, of what was just loaded or
        only to be stored.
    """

    loads: list[Array]
    stores: list[Array]
    pretended: list[str]


def transfers(compiled: jax.stages.Compiled) -> Transfers:
    """The transfers in a program, those in loops and branches counted once each."""
    by_name = {i.name: i for i in instructions(compiled)}

    def passes_on(i: Instruction) -> bool:
        return i.opcode in _PASS_ON or i.opcode.endswith(("-done", "-update"))

    def made_by(name: str) -> str:
        while by_name[name].opcode == "bitcast" or by_name[name].opcode.endswith(
            "-done"
        ):
            (name,) = by_name[name].operands
        return name

    loads: dict[str, Array] = {}
    stores: dict[str, Array] = {}
    copies: dict[str, str] = {}
    for i in by_name.values():
        if passes_on(i):
            continue
        operands = [a for o in i.operands if o in by_name for a in by_name[o].results]
        results = i.results
        if i.opcode == "copy-start":  # Of (result, operand, context).
            results = results[:1]
        elif i.opcode.endswith("-start"):  # Of ((operands), result, context).
            results = results[len(operands) :]
        # Indices and the like are scalars, and move with what they are about.
        given = [a for a in operands if a.shape]
        made = [a for a in results if a.shape]
        from_host = [a for a in given if a.on_host]
        to_host = [a for a in made if a.on_host]
        if from_host and len(to_host) < len(made):
            loads[i.name] = from_host[0]
        elif to_host and len(from_host) < len(given):
            stores[i.name] = to_host[0]
        elif i.opcode in ("copy", "copy-start") and given == made:
            copies[i.name] = i.operands[0]
    pretended = {name for name, source in copies.items() if made_by(source) in loads}
    pretended |= {made_by(by_name[name].operands[0]) for name in stores} & set(copies)
    return Transfers(list(loads.values()), list(stores.values()), sorted(pretended))


def _text(compiled: jax.stages.Compiled) -> str:
    return compiled.as_text() or ""

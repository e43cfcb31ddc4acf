"""What tests ask of a compiled program beside `aot.transfers`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax

from optax_offload import aot
from optax_offload._emit import carry_out
from optax_offload._emit import step as emit
from optax_offload.aot import _hlo
from optax_offload.aot._dataflow import touches_no_data
from optax_offload.aot.transfers import instruction_transfers

# They pass arrays on, wherever these are.
_PASS_ON = ("while", "conditional", "call")


def signature(
    compiled: jax.stages.Compiled,
) -> tuple[tuple[_hlo.Array, ...], tuple[_hlo.Array, ...]]:
    """The arguments and the results of a compiled program, on one device."""
    module = _hlo.parse(compiled.as_text() or "")
    return module.arguments, module.results


def emitted(closed: Any, *, on_tpu: bool = True) -> Any:
    """What the only update, or streamed step, of a jaxpr becomes when it is lowered.

    Args:
      closed: The jaxpr of a function.
      on_tpu: Whether it is lowered for a TPU.
    """
    (e,) = (e for e in closed.jaxpr.eqns if "what" in e.params)
    what = e.params["what"]

    def step(*given: Any) -> Any:
        values = dict(zip(what.operands, given, strict=True))
        return emit.results(what.plan, values, {}, on_tpu=on_tpu)

    def update(*data: Any) -> Any:
        args = what.given.keys(list(data))
        return carry_out(what.update, what.caller.window_bytes, args, {})

    fn = step if e.primitive.name == "streamed_step" else update
    return jax.make_jaxpr(fn)(*(a.aval for a in e.invars)).jaxpr


def instructions(module: _hlo.Module) -> Iterator[_hlo.Instruction]:
    """Those that compute or move something, but those in fusions.

    A fusion, or what is asynchronous, is one operation; what it is made of has no place
    in memory.
    """
    inside = module.inside()
    for computation in module.computations.values():
        if computation.name not in inside:
            yield from computation


def slice_positions(
    compiled: jax.stages.Compiled,
) -> Iterator[tuple[aot.Transfer, list[int]]]:
    """The slices that a GPU's copy engines take, and where those of a loop begin.

    In bytes, in the order of iterations: by the first one and the distance that the
    compiler noted, which is all that the copies go by.
    """
    module = _hlo.parse(compiled.as_text() or "")
    named = {i.name: i for c in module.computations.values() for i in c}
    for t in aot.transfers(compiled):
        inner = module.called(named[t.name])
        if inner is None or "slice" not in t.form or t.by != "copy engine":
            continue
        (noted,) = (i.attributes for i in inner if i.copies_by_engine)
        found = re.findall(r'"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"', noted)
        # Newer compilers note a linear function beside one that is zero.
        first, distance = map(int, found[-1])
        yield t, [first + n * distance for n in range(t.times)]


def pretended(compiled: jax.stages.Compiled) -> list[str]:
    """Copies within device memory, same layout, of what was just loaded or for a store.

    A compiler that was misled makes them: they are transfers in name only.
    """
    module = _hlo.parse(compiled.as_text() or "")
    found = []
    for computation in module.computations.values():
        if computation.name not in module.inside():
            found += _pretended(module, computation)
    return sorted(found)


def _pretended(module: _hlo.Module, computation: _hlo.Computation) -> list[str]:
    loads, stores, copies = set(), set(), set()
    for i in computation:
        if touches_no_data(i) or i.opcode in _PASS_ON or i.ends:
            continue
        directions = {
            t.direction for t in instruction_transfers(module, computation, i)
        }
        if "load" in directions:
            loads.add(i.name)
        elif "store" in directions:
            stores.add(i.name)
        elif i.opcode in ("copy", "copy-start"):
            made = i.arrays if i.opcode == "copy" else i.parts[0]
            if computation.instructions[i.operands[0]].arrays == made:
                copies.add(i.name)

    def made_by(name: str) -> str:
        i = computation.instructions[name]
        passes_on = i.opcode == "bitcast" or i.opcode.endswith("-done")
        return made_by(i.operands[0]) if passes_on else name

    def source(name: str) -> str:
        return made_by(computation.instructions[name].operands[0])

    return [c for c in copies if source(c) in loads] + [
        made for made in map(source, stores) if made in copies
    ]

"""How a step takes what rests on the host, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._ground import trees
from optax_offload._ground.units import counted, size_text
from optax_offload._program import Program, Resting, Step, is_transfer, variables
from optax_offload._schedule.rest import Outer


def misplaced(step: Step) -> Iterator[str]:
    """A line on the state that is not where its update wants it."""
    if step.misplaced:
        yield (
            "state planned for pinned_host comes to its update on the device: "
            f"{trees.listed(step.misplaced)}. A call raises "
            "MemoryKindError, or moves it with on_misplaced='move'. A template of "
            "jax.eval_shape may say no memory: use optax_offload.eval_shape"
        )


def at_rest(
    step: Step, nodes: Sequence[Outer], by_turns: Collection[jex.Var]
) -> Iterator[str]:
    """Lines on the ways in which arguments at rest, other than state, are taken.

    Args:
      step: The step.
      nodes: What is evaluated outside of scans that have updates.
      by_turns: The arguments that turns of layers that no scan runs load.
    """
    rest, program = step.at_rest, step.program
    if rest is None:
        return
    updated = {v for node in nodes if node.left for v in node.reads}
    taken: dict[tuple[Any, ...], list[Resting]] = {}
    for x in rest.arguments:
        v = program.invars[x.position]
        in_turns = v in by_turns
        whole = () if in_turns else _loaded_whole(program, nodes, v, x.whole)
        with_state = v in updated and not x.is_state
        if x.scans or whole or in_turns or with_state:
            key = x.scans, x.again, whole, in_turns, with_state, x.returns
            taken.setdefault(key, []).append(x)
    for (scans, again, whole, in_turns, with_state, returns), some in taken.items():
        nbytes = sum(x.nbytes for x in some)
        how: list[str] = []
        if scans:
            each = sum(x.nbytes // scans[0] for x in some)
            lengths = ", ".join(map(str, sorted(set(scans))))
            how.append(
                f"{size_text(each)} of rows in each iteration of {len(scans)} "
                f"scan{'s' * (len(scans) > 1)} of {lengths}"
                + f", again in each of {again} iterations around"
                * (again > 1)
            )
        if in_turns:
            how.append("loaded by the turns that take them")
        if whole:
            # Codes are named, and then decoded.
            names = ["decoding" if name == "name" else name for name in whole]
            how.append(f"loaded whole by {trees.listed(names)}")
        if with_state:
            how.append("loaded with its state by its update")
        if returns:
            how.append("what replaces it returns there")
        line = counted(len(some), "argument", nbytes)
        yield f"{line} at rest on the host: {'; '.join(how)}"
    if rest.codes:
        yield (
            f"{counted(len(rest.codes), 'argument', sum(rest.codes.values()))} of "
            "codes on the device: each iteration of a scan decodes its own rows"
        )
    if rest.made_bytes:
        yield f"{size_text(rest.made_bytes)} are stored row by row as scans make them"
    if rest.residual_bytes:
        yield (
            f"{size_text(rest.residual_bytes)} of residuals rest on the host between "
            "the forward and the backward pass"
        )


def _loaded_whole(
    program: Program, nodes: Sequence[Outer], v: jex.Var, names: tuple[str, ...]
) -> tuple[str, ...]:
    """The names of the equations that load all of an argument at rest."""
    outer = [node for node in nodes if node.left is None]
    readers = [program.equations[n.position] for n in outer if v in n.reads]
    readers = [e for e in readers if e.primitive.name != "scan"]
    inside = not all(map(is_transfer, readers))  # In the body of one of them, too.
    readers = [e for e in readers if is_transfer(e)]
    loaded = {x for e in readers for x in e.outvars}
    users = {
        program.equations[n.position].primitive.name
        for n in outer
        if not loaded.isdisjoint(n.reads)
    }
    # What is computed of rows is made whole by a scan.
    if inside or "scan" in users.difference(names):
        users.update(set(names) - _takers(program, v))
    return tuple(name for name in names if name in users)


def _takers(program: Program, v: jex.Var) -> set[str]:
    """The names of a program's equations that take all of a variable, loaded."""
    equations = program.equations
    loads = (e for e in equations if is_transfer(e) and v in e.invars)
    loaded = {x for e in loads for x in e.outvars}
    return {
        e.primitive.name
        for e in equations
        if not loaded.isdisjoint(variables(e.invars))
    }

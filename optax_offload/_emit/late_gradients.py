"""Updates whose gradients wait in host memory: carried out as `offload` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._emit.update import carry_out
from optax_offload._places import memory
from optax_offload._program import Input, Output, Program, Sharded, Step, Update, bound
from optax_offload._rows import Kernel, kernel_of
from optax_offload._schedule import Fused, asked_window


def updated(
    step: Step,
    fused: Sequence[Fused],
    env: Mapping[jex.Var, Any],
    sharded: Mapping[jex.Var, Sharded],
) -> dict[jex.Var, Any]:
    """The results of updates whose gradients wait in host memory."""
    update, sources, results = _one_update(
        step, [(f, kernel_of(f.rows.restricted(f.component.results))) for f in fused]
    )
    args = [env[v] for v in sources]
    on_host = [i for i, x in enumerate(args) if memory.on_host(x)]
    update = update.with_inputs_on_host(on_host)
    window_bytes = asked_window(step, fused)
    known = {i: sharded[v] for i, v in enumerate(sources) if v in sharded}
    values = carry_out(update, window_bytes, args, known)
    return bound(results, values)


def _one_update(
    step: Step, fused: Sequence[tuple[Fused, Kernel]]
) -> tuple[Update, list[jex.Var], list[jex.Var]]:
    """One update of all that waits, with its arguments and its results in the step."""
    program = step.program
    equations: dict[int, jex.JaxprEqn] = {}
    sources: dict[jex.Var, jex.Var] = {}
    axes: dict[jex.Var, int] = {}
    outputs: list[tuple[jex.Var, jex.Var, jex.Var | None]] = []
    codes = {v for f, _ in fused for v in f.codes}
    for f, k in fused:
        for e in k.rows.equations:
            equations[program.producers[e.outvars[0]]] = e
        axes |= {v: i for v, i in k.rows.axes.items() if v in k.rows.inputs}
        sources |= bound(k.rows.inputs, k.sources)
        inside = bound(k.targets, k.rows.outputs)
        outputs += [(v, inside[v], f.replaced[v]) for v in f.component.results]
    known = set(sources.values())
    for _, _, before in outputs:
        if before is not None and before not in known:
            sources[jex.Var(memory.device_type(before.aval))] = before
    invars = list(sources)
    position = {v: i for i, v in enumerate(sources.values())}
    paths = {
        v: of[-1].inlined.what.update.outputs[of[-1].output].path
        for v, of in step.origins.items()
    }
    ordered = [equations[i] for i in sorted(equations)]
    inner = Program(ordered, {}, invars, [a for _, a, _ in outputs], program.debug_info)
    update = Update(
        inner,
        tuple(Input(slice_axis=axes.get(v)) for v in invars),
        tuple(
            Output(
                paths.get(v, "a parameter"),
                memory.kind_of_type(v.aval),
                None if before is None else position[before],
                is_update=False,
                holds_codes=v in codes,
            )
            for v, _, before in outputs
        ),
    )
    return update, list(sources.values()), [v for v, _, _ in outputs]

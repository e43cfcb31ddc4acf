"""Evaluating a step as its plan says: it decides nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._emit import late_gradients
from optax_offload._emit import scan as body
from optax_offload._emit.moves import together
from optax_offload._emit.segment import There, reads, run_segment
from optax_offload._emit.spread import constrained, spread_by
from optax_offload._emit.update import carry_out
from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    Sharded,
    bound,
    dependents,
    evaluate,
    flops_of,
    read,
    shape,
    variables,
)
from optax_offload._schedule import (
    Chain,
    FusedScan,
    FusedStep,
    Outer,
    RemainingUpdate,
    Scan,
    Segment,
    Turns,
    of_waiting,
)


def results(
    plan: FusedStep,
    values: Mapping[jex.Var, Any],
    sharded: Mapping[jex.Var, Sharded],
    *,
    on_tpu: bool,
) -> list[Any]:
    """The results of a step, evaluated as its plan says.

    Args:
      plan: The plan.
      values: The values of its arguments, and of the constants that it closes over.
      sharded: The shardings of arguments whose types do not say it.
      on_tpu: Whether it is for a TPU's compiler.
    """
    return _Run(plan, values, sharded, on_tpu).results()


class _Run:
    """The values of a step's variables, as they become known."""

    def __init__(
        self,
        plan: FusedStep,
        values: Mapping[jex.Var, Any],
        sharded: Mapping[jex.Var, Sharded],
        on_tpu: bool,
    ):
        self._plan, self._step, self._on_tpu = plan, plan.step, on_tpu
        self._sharded = sharded
        streaming = () if on_tpu else plan.streaming
        self._scans = {s.scan.position: s for s in (*plan.scans, *streaming)}
        self._env: dict[jex.Var, Any] = {**values, **plan.step.program.constants}

    def results(self) -> list[Any]:
        """The values of the step's results."""
        program = self._step.program
        fused = [f for s in self._plan.scans for f in s.fused]
        nodes, after = self._plan.before_and_after
        if self._plan.chain:
            self._run_chain(self._plan.chain)
        else:
            self._run_nodes(nodes)
        waiting = [each for each in self._plan.scans if each.late]
        for number in range(1, self._plan.passes.last + 1):
            for each in waiting:
                self._run_pass(each, number)
        self._run_nodes(after)
        for v in (v for f in fused for v in f.component.results):
            self._env[v] = constrained(program, v, self._env[v])
        self._move_over(
            chain.nodes if (chain := self._plan.chain) else (*nodes, *after)
        )
        # What is loaded wherever it is taken is in no turn, if it is only returned.
        self._require(variables(program.outvars))
        return [read(a, self._env.__getitem__) for a in program.outvars]

    def _move_over(self, nodes: Iterable[Outer]) -> None:
        """Has results that updates wrote into arguments spread as the step says."""
        step = self._step
        replaced: dict[Atom, Atom] = {**step.replaced}
        for inlined in step.inlined_updates:
            for k, a in enumerate(inlined.results):
                alias = inlined.what.update.outputs[k].alias
                if alias is not None and isinstance(a, jex.Var):
                    replaced[a] = inlined.operands[alias]
        made = [v for node in nodes if node.left for v in node.left.results]
        made += (
            v for s in self._plan.scans for f in s.fused for v in f.component.results
        )
        for v in made:
            of = replaced.get(v)
            if isinstance(of, jex.Var) and memory.on_host(v.aval):
                has = self._sharded.get(of)
                self._env[v] = spread_by(step.program, v, self._env[v], has)

    def _run_chain(self, chain: Chain) -> None:
        """Evaluates a step in segments."""
        program = self._step.program
        resting = {v: x for v, x in self._env.items() if memory.on_host(v.aval)}
        self._sharded = {**self._sharded, **self._sharded_like_state(chain)}
        counted = itertools.count(), 0
        there = There(
            self._env, resting, {}, (), self._sharded, *counted, chain.rows, {}
        )
        for link in chain.links:
            if isinstance(link, Segment):
                self._require(reads(link.updates))
                there = run_segment(program, link, there._replace(env=self._env))
                self._env = there.env | self._tokens(link.positions)
                continue
            self._require(reads(link))
            self._run_nodes(link)
            results = (v for node in link if node.left for v in node.left.results)
            made = [v for v in results if shape(v) and not _is_key(v)]
            there = there._replace(made=(*there.made, *made))

    def _run_scan(self, each: FusedScan) -> None:
        turns = self._plan.turns(each, 0, on_tpu=self._on_tpu)
        assert turns is not None
        self._run_turns(each, turns, self._step.reads(each.scan.position))
        self._env |= dict.fromkeys(self._step.tokens(each.scan.position))

    def _run_pass(self, each: FusedScan, number: int) -> None:
        """Passes over what waits: for a norm of what norms have scaled, or at last."""
        turns = self._plan.turns(each, number, on_tpu=self._on_tpu)
        if turns is not None:
            self._run_turns(each, turns)
        if number == self._plan.passes.last and each.way == "host":
            self._require(each.given(each.late))
            self._env |= late_gradients.updated(
                self._step, each.late, self._env, self._sharded
            )

    def _run_turns(
        self, each: FusedScan, turns: Turns, reads: Iterable[jex.Var] = ()
    ) -> None:
        scan, turn = turns
        self._require([*reads, *each.given(u.fused for u in turn.updates)])
        if turn.delayed or (turn.ahead and not self._on_tpu):
            self._finish_products(scan)
        like = {
            g: self._sharded[v]
            for f in each.late
            for g in f.component.gradients
            if (v := self._like(f.rows.inputs, g)) is not None
        }
        program, sharded = self._step.program, {**self._sharded, **like}
        self._env |= body.ScanLoop(program, scan, turn, self._env, sharded).run()

    def _sharded_like_state(self, chain: Chain) -> dict[jex.Var, Sharded]:
        """The shardings of gradients that wait, before and after they are stored.

        In Auto mode their slices would be others than those of their state (F89).
        """
        found: dict[jex.Var, Sharded] = {}
        for g, some in of_waiting(chain).items():
            like = self._like(some, g)
            if like is not None:
                found[g] = self._sharded[like]
        for left in (node.left for node in chain.nodes if node.left):
            if left.update.only_stores:
                program = left.update.program
                of = bound(program.invars, left.operands)
                made = zip(variables(program.outvars), left.results, strict=True)
                found |= {of[a]: found[v] for a, v in made if v in found}
        return found

    def _like(self, inputs: Iterable[jex.Var], g: jex.Var) -> jex.Var | None:
        """Returns the state, else the parameter, that a gradient is sharded like."""
        fits = (v for v in inputs if v in self._sharded and shape(v) == shape(g))
        return max(fits, key=lambda v: memory.on_host(v.aval), default=None)

    def _finish_products(self, scan: Scan) -> None:
        """Has products that only the rest of the step reads computed before a scan.

        Without this a compiler may compute them beside the scan's last stores, or after
        it where it is told to hide loads, and keep their operands over all of it: the
        gradient of logits (F67), or a table that was loaded for them (F83). Values that
        depend on no product, such as a cast, are left to be fused with their readers.
        """
        program, at = self._step.program, scan.position
        nodes = (node for node in self._plan.rest if node.position > at)
        wanted = {v for node in nodes for v in node.reads}
        wanted.update(variables(program.outvars))
        wanted -= {v for s in self._plan.scans for f in s.fused for v in f.replaced}
        products = (e for e in program.equations[:at] if flops_of(e))
        wanted &= dependents(program, {v for e in products for v in e.outvars})
        found = [v for v in self._env if v in wanted and not memory.on_host(v.aval)]
        found += variables(scan.body.carry)
        self._env |= together({v: self._env[v] for v in found})

    def _require(self, wanted: Iterable[jex.Var]) -> None:
        """Evaluates the equations that lead to variables, but for known values."""
        program = self._step.program
        missing = {v for v in wanted if v not in self._env}
        if not missing:
            return
        found: list[int] = []
        for i in reversed(range(len(program.equations))):
            if not missing.isdisjoint(self._step.defines(i)):
                found.append(i)
                missing.update(v for v in self._step.reads(i) if v not in self._env)
        for i in found[::-1]:
            self._evaluate([i])

    def _run_nodes(self, nodes: Iterable[Outer]) -> None:
        """Evaluates nodes, which take what is known or can be computed of it."""
        for kind, some in itertools.groupby(nodes, self._kind):
            if isinstance(kind, FusedScan):
                self._run_scan(kind)
            elif kind is not None:
                self._run_remaining(kind)
            else:
                missing = (
                    node.position
                    for node in some
                    if any(v not in self._env for v in node.defines)
                )
                self._evaluate(list(missing))

    def _kind(self, node: Outer) -> FusedScan | RemainingUpdate | None:
        """What is carried out otherwise than it is written; None for an equation."""
        return self._scans.get(node.position) or node.left

    def _evaluate(self, positions: Sequence[int]) -> None:
        """Evaluates equations of the step."""
        step = self._step
        self._env |= evaluate(step.program, positions, self._env.__getitem__)
        self._env |= self._tokens(positions)

    def _tokens(self, positions: Iterable[int]) -> dict[jex.Var, None]:
        """What stands for the effects of equations, once these were had."""
        return dict.fromkeys(v for i in positions for v in self._step.tokens(i))

    def _run_remaining(self, left: RemainingUpdate) -> None:
        """Carries out the part of an update that no scan has taken over."""
        inlined, results, update, operands, at_once = left
        args = [read(a, self._env.__getitem__) for a in operands]
        sharded = {
            i: self._sharded[a]
            for i, a in enumerate(operands)
            if isinstance(a, jex.Var) and a in self._sharded
        }
        window_bytes = inlined.what.caller.window_bytes
        values = carry_out(update, window_bytes, args, sharded, at_once=at_once)
        self._env |= bound(results, values)


def _is_key(v: jex.Var) -> bool:
    return memory.movable_nbytes(v.aval) is None

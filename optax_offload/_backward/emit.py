"""Evaluating a step as its plan says: it decides nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from optax_offload import _flops, _memory
from optax_offload._backward import body, held, order
from optax_offload._backward.fused import Fused
from optax_offload._backward.fused_step import FusedScan, FusedStep
from optax_offload._backward.platforms import in_form
from optax_offload._backward.rest import Left, Node
from optax_offload._backward.rows import Scan, Sum
from optax_offload._backward.step import constrained
from optax_offload._errors import CAUSES, MemoryKindError, warn
from optax_offload._program import (
    Program,
    dependents,
    evaluate,
    read,
    shape,
    variables,
)
from optax_offload._update import Deferred, compare, defer, note_arguments, schedule


def run(plan: FusedStep, args: Sequence[Any]) -> list[Any]:
    """The results of a step, evaluated as its plan says.

    A TPU's compiler spreads transfers over an iteration by itself: there no row is
    stored late, so that none is on the device longer.

    Refs are read before it, and written after it.

    Args:
      plan: The plan.
      args: The values of its arguments.
    """
    _warn(plan)
    args = [*args, *plan.step.refs]
    values = [x[...] if isinstance(x, jax.Ref) else x for x in args]

    def in_time(*args: Any) -> list[Any]:
        return _Run(plan, args, late=False).results()

    def late(*args: Any) -> list[Any]:
        return _Run(plan, args, late=True).results()

    in_scans = [
        (each.scan, fused)
        for each in plan.scans
        for fused in (each.now, each.held if each.way == "twice" else ())
    ]
    forms = [in_time]
    if any(order.delayed(scan, _ordered(scan, fused)) for scan, fused in in_scans):
        forms.append(late)
    results = in_form(forms, plan.step.closed, values)
    refs = [
        (v, x)
        for v, x in zip(plan.step.program.invars, args, strict=True)
        if isinstance(x, jax.Ref)
    ]
    first = len(results) - len(refs)
    after = zip(refs, plan.step.program.outvars[first:], results[first:], strict=True)
    for (before, ref), a, value in after:
        if a is not before:
            ref[...] = value
    return results[:first]


def _ordered(scan: Scan, fused: Sequence[Fused]) -> list[Fused]:
    """Updates in order, without those in parts: their window is for less than a row."""
    return [f for f in order.by_gradients(scan, fused) if f.parts is None]


def _warn(plan: FusedStep) -> None:
    """Warns of rows over the window; what waits on the host does so by itself."""
    for each in plan.scans:
        stored = [f for f in each.held if f.component.late_sums]
        some = [*each.now, *stored] if each.way == "store" else each.fused
        for over in each.over_window(some):
            message = f"fused into the backward pass over the window: {over}"
            warn(message)


class _Run:
    """The values of a step's variables, as they become known."""

    def __init__(self, plan: FusedStep, args: Sequence[Any], *, late: bool):
        self._plan, self._step, self._late = plan, plan.step, late
        program = plan.step.program
        # What an equation keeps of this must not keep traced values.
        tell = functools.partial(_tell, program)
        noted, cells = note_arguments(list(args), tell, on_device=True)
        self._cells = {program.invars[i]: cell for i, cell in cells.items()}
        self._env: dict[jex.Var, Any] = dict(zip(program.invars, noted, strict=True))
        self._env |= program.constants
        for compared, tell in self._step.comparisons:
            if self._env.keys() >= set(compared):
                half = len(compared) // 2
                values = [self._env[v] for v in compared]
                values = compare(values[:half], values[half:], tell)
                self._env |= zip(compared, values, strict=True)

    def results(self) -> list[Any]:
        """The values of the step's results."""
        program = self._step.program
        scans = {s.scan.position: s for s in self._plan.scans}
        fused = [f for s in self._plan.scans for f in s.fused]
        nodes = self._plan.rest
        wanted = {v for node in nodes for v in node.reads}
        wanted.update(variables(program.outvars))
        wanted.update(v for f in fused for v in f.rows.inputs)
        postponed: list[Node] = []
        for is_scan, some in itertools.groupby(nodes, lambda n: n.position in scans):
            if is_scan:
                for node in some:
                    self._run_scan(scans[node.position], wanted)
            else:
                postponed += self._run_nodes(list(some))
        waiting = [each for each in self._plan.scans if each.held]
        for number in range(1, self._plan.passes.last + 1):
            for each in waiting:
                self._run_pass(each, number)
        self._run_nodes(postponed)
        for v in (v for f in fused for v in f.component.results):
            self._env[v] = constrained(program, v, self._env[v])
        return [read(a, self._env.__getitem__) for a in program.outvars]

    def _run_scan(self, each: FusedScan, wanted: set[jex.Var]) -> None:
        gradients = {g for f in each.fused for g in f.component.gradients}
        held = [g for f in each.held for g in f.component.gradients]
        waiting = held if each.way == "store" else []
        kept = [v for v in each.scan.stacked if v in wanted and v not in gradients]
        sums = self._plan.passes.sums(each.fused, 0)
        first = [*each.now, *(f.summing(sums) for f in each.held)]
        work = self._work(each, first, sums, kept, waiting)
        self._require([*self._step.reads(each.scan.position), *_inputs(each, first)])
        self._run_work(each.scan, work)
        self._env |= dict.fromkeys(self._step.tokens(each.scan.position))

    def _work(
        self,
        each: FusedScan,
        fused: Sequence[Fused],
        sums: Sequence[Sum],
        kept: Sequence[jex.Var] = (),
        waiting: Sequence[jex.Var] = (),
    ) -> body.Work:
        ordered = order.by_gradients(each.scan, fused)
        delayed = frozenset[jex.Var]()
        if self._late:
            delayed = order.delayed(each.scan, _ordered(each.scan, fused))
        like = {g: self._like(f, g) for f in each.held for g in f.component.gradients}
        return body.Work(ordered, delayed, sums, kept, waiting, like)

    def _like(self, f: Fused, g: jex.Var) -> jex.Var | None:
        """What a gradient is to be sharded like: its state, else its parameter."""
        fits = (v for v in f.rows.inputs if v in self._cells and shape(v) == shape(g))
        return max(fits, key=lambda v: _memory.on_host(v.aval), default=None)

    def _run_pass(self, each: FusedScan, number: int) -> None:
        """Passes over what waits: for a norm of what norms have scaled, or at last."""
        last = number == self._plan.passes.last
        sums = self._plan.passes.sums(each.held, number)
        some = [
            f.summing(sums)
            for f in each.held
            if not set(sums).isdisjoint(f.component.sums)
        ]
        if each.way == "twice":
            some = each.held if last else some
            if some:
                self._require(_inputs(each, some))
                self._run_work(each.scan, self._work(each, some, sums))
            return
        if some:
            self._require(_inputs(each, some))
            scan = held.over_rows(each.scan)
            self._run_work(scan, body.Work(some, (), sums, (), (), {}))
        if last:
            self._require(_inputs(each, each.held))
            self._env |= held.run(self._step, each.held, self._env, self._cells)

    def _run_work(self, scan: Scan, work: body.Work) -> None:
        if work.delayed:
            self._finish_products(scan)
        self._env |= body.run(self._step.program, scan, work, self._env, self._cells)

    def _finish_products(self, scan: Scan) -> None:
        """Has what only the rest of the step reads be computed before a scan.

        Else a compiler may do so beside the scan's last stores, and keep over all of it
        what products are made of, such as the gradient of logits (F67). What depends on
        no product, such as a cast, is left to be joined with what reads it.
        """
        program, at = self._step.program, scan.position
        nodes = (node for node in self._plan.rest if node.position > at)
        wanted = {v for node in nodes for v in node.reads}
        wanted.update(variables(program.outvars))
        wanted -= {v for s in self._plan.scans for f in s.fused for v in f.replaced}
        products = (e for e in program.equations[:at] if _flops.of_equation(e))
        wanted &= dependents(program, {v for e in products for v in e.outvars})
        found = [v for v in self._env if v in wanted and not _memory.on_host(v.aval)]
        found = list(dict.fromkeys([*found, *variables(scan.carry)]))
        values = lax.optimization_barrier([self._env[v] for v in found])
        self._env |= zip(found, values, strict=True)

    def _require(self, wanted: Iterable[jex.Var]) -> None:
        """Evaluates what variables take, as far as it is not known yet."""
        program = self._step.program
        missing = {v for v in wanted if v not in self._env}
        found: list[int] = []
        for i in reversed(range(len(program.equations))):
            if not missing.isdisjoint(self._step.defines(i)):
                found.append(i)
                missing.update(v for v in self._step.reads(i) if v not in self._env)
        for i in found[::-1]:
            self._evaluate([i])

    def _run_nodes(self, nodes: Sequence[Node]) -> list[Node]:
        """Evaluates nodes, and returns those that take what is not known yet.

        What is summed up over rows that have to wait is known when these are updated.
        """
        known = set(self._env)
        ready: list[Node] = []
        postponed: list[Node] = []
        for node in nodes:
            (ready if known.issuperset(node.reads) else postponed).append(node)
            if ready and ready[-1] is node:
                known.update(self._defines(node))
        for left, some in itertools.groupby(ready, lambda node: node.left):
            if left is None:
                found = (
                    node.position
                    for node in some
                    if any(v not in self._env for v in self._defines(node))
                )
                self._evaluate(list(found))
            else:
                self._run_left(left)
        return postponed

    def _evaluate(self, positions: Sequence[int]) -> None:
        """Evaluates equations of the step."""
        step = self._step
        self._env |= evaluate(step.program, positions, self._env.__getitem__)
        self._env |= dict.fromkeys(v for i in positions for v in step.tokens(i))

    def _defines(self, node: Node) -> list[jex.Var]:
        if node.left is None:
            return self._step.defines(node.position)
        return variables(node.left.region.results[k] for k in node.left.wanted)

    def _run_left(self, left: Left) -> None:
        """Carries out what is left of an update."""
        region, wanted, update, operands = left
        args = [read(a, self._env.__getitem__) for a in operands]
        cells = {
            i: self._cells[a]
            for i, a in enumerate(operands)
            if isinstance(a, jex.Var) and a in self._cells
        }
        window_bytes = region.what.window_bytes
        planned = schedule(update, window_bytes)
        values = defer(Deferred(update, window_bytes, cells), planned, args)
        for k, value in zip(wanted, values, strict=True):
            a = region.results[k]
            if isinstance(a, jex.Var):
                self._env[a] = value


def _tell(program: Program, argument: int) -> None:
    aval: Any = program.invars[argument].aval
    raise MemoryKindError(
        f"argument {argument} of the step, {aval.str_short()}, should come from "
        f"host memory and is on the device. {CAUSES}"
    )


def _inputs(each: FusedScan, fused: Iterable[Fused]) -> list[jex.Var]:
    """What updates take besides what the scan gives them."""
    given = set(each.scan.equation.outvars)
    return [v for f in fused for v in f.rows.inputs if v not in given]

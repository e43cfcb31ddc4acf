"""Choosing rules for a memory budget, by compiling the step that will run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from optax_offload import _rules, aot
from optax_offload._low_bit import codec_of
from optax_offload._plan.cost import checked_budget_bytes, cost_of_step, environment
from optax_offload._plan.result import Plan, does_not_fit
from optax_offload._plan.search import (
    CandidateCompiler,
    Progress,
    smallest_that_fits,
)
from optax_offload._plan.state import Selection, movable_state, record
from optax_offload._plan.step import Step, StepFactory


def plan(  # noqa: PLR0913 - keyword-only options
    make_step: Callable[..., Step],
    *args: Any,
    target: aot.Target | str,
    budget_bytes: int | None = None,
    rules: _rules.Rules | None = None,
    codec: _rules.CodecName | None = None,
    link_bytes_per_second: float | None = None,
    progress: Progress = lambda _: None,
) -> Plan:
    r"""Finds the least state to move for a step to fit, by compiling it.

    The step is compiled as it is; if that does not fit, with its updates in the
    backward pass and nothing moved (`stream`; a jitted step is left as it is);
    then with all state moved, and with some, about as often again as the number of leaf
    patterns halves, with updates in the backward pass if that lowers the peak. The
    result has been compiled: its peak is known, not estimated.

    Args:
      make_step: Makes the step to be compiled, called as
        ``make_step(offload, target, *args)`` for every candidate. It gives its
        optimizer to ``offload``, in the place where `offload` goes (as in
        ``optax.chain(clip, offload(adamw))``), and builds the optimizer's state with
        it, as in ``oo.eval_shape(tx.init, params)``.
      *args: Further arguments for it.
      target: What to compile for: an `optax_offload.aot.Target`, or its name, such as
        ``"h100"``, ``"h100:8"`` or ``"v5e:2x4"``.
      budget_bytes: What the step may take on each device: by default the target's
        memory less a reserve, 10 % on a GPU and 2 % on a TPU.
      rules: What is decided already: what goes, and (``memory_kind="device"``) what
        stays. The plan decides about leaves that none of them matches.
      codec: A format in which moments may be kept, such as ``"int8"``; see `low_bit`.
        If the step does not fit as it is, all that optax is known to have and no rule
        decides about are, before anything more moves. None leaves their dtype.
      link_bytes_per_second: Each way between host and device, for the cost; by default
        what is documented. See `measure_link`.
      progress: Is told what is being compiled, and then what came of it.

    Returns:
      A `Plan`. If the step fits as it is, or fused, it moves nothing, and its
      ``offload`` returns the optimizer itself. Where ``after.fused``, train with `jit`
      or `stream`.

    Raises:
      aot.DoesNotFitError: the step does not fit with all state moved. Says by how much,
        what takes the memory and what would help.
      TypeError: ``make_step`` does not return a `Step`.
      ValueError: it does not give an optimizer to ``offload``, or does not initialise
        it; the budget is more than the target has; a rule is wrong.
      ImportError: the compiler's wheel is not installed.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_offload as oo
      >>> def make_step(offload, target):
      ...     params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
      ...     tx = offload(optax.adam(1e-3))
      ...     state = oo.eval_shape(tx.init, params)
      ...     def step(params, state, x):
      ...         grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
      ...         updates, state = tx.update(grads, state, params)
      ...         return optax.apply_updates(params, updates), state
      ...     x = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
      ...     return oo.Step(step, (params, state, x), donate_argnums=(0, 1))
      >>> found = oo.plan(
      ...     make_step, target="h100", budget_bytes=200 * 2**20
      ... )  # doctest: +SKIP
      >>> [rule.regex for rule in found.config.rules]  # doctest: +SKIP
      ['\\d+/mu/w']
    """
    target = aot.Target(target) if isinstance(target, str) else target
    budget_bytes = checked_budget_bytes(budget_bytes, target)
    given = None if rules is None else _rules.as_config(rules)
    factory = StepFactory(make_step, target, args)
    if codec is not None:
        codec_of(codec)
    state = movable_state(record(factory, given), given, target.device_count)
    compiler = CandidateCompiler(factory, state, budget_bytes, progress)
    nothing: Selection = frozenset()
    before = compiler.candidate(nothing)
    fused = before if before.fits else compiler.candidate(nothing, fuse=True)
    compiled = compiler.compiled
    if codec is not None and not (before.fits or fused.fits):
        recorded = record(factory, given, codec)
        state = movable_state(recorded, given, target.device_count)
        compiler = CandidateCompiler(factory, state, budget_bytes, progress)
        compiler.compiled = compiled
    sizes = [pattern.nbytes_per_device for pattern in state.patterns]
    # Where gradients have to wait for a norm, it lowers the peak only if state moves.
    fuse = not before.fits and any(
        compiler.fusing_lowers_the_peak(x) for x in (nothing, state.everything)
    )
    selection = smallest_that_fits(
        sizes, lambda x: compiler.candidate(x, fuse).used_bytes, budget_bytes
    )
    if selection is None:
        everything = compiler.candidate(state.everything, fuse)
        if not everything.fused:
            everything = dataclasses.replace(everything, outside=fused.outside)
        raise does_not_fit(target, budget_bytes, everything, state.state_bytes)
    after = compiler.candidate(selection, fuse)
    return Plan(
        target=target,
        budget_bytes=budget_bytes,
        config=state.config(selection),
        moved=state.selected(selection),
        encoded=state.encoded,
        before=before,
        after=after,
        compiled=tuple(compiled),
        cost=cost_of_step(factory, after, link_bytes_per_second),
        environment=environment(
            target, after.used_bytes, after.moved_bytes + after.stored_bytes
        ),
        fused=fused if fused.fused else None,
        outside=after.outside if after.fused else fused.outside,
    )

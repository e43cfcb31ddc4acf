"""The fastest way to train a step that fits, by compiling the step that will run."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from optax_offload import aot
from optax_offload._places.rules import OffloadConfig, Rules, as_config
from optax_offload._places.step_options import Options
from optax_offload._plan.allowed import Codecs, allowed, forms, worth_allowing
from optax_offload._plan.alternatives import (
    Alternatives,
    NothingFitsError,
    alternatives,
)
from optax_offload._plan.budget import PlanRequest, checked_budget, environment
from optax_offload._plan.candidates import (
    CompiledCandidate,
    Progress,
    compiled,
    parts_of,
    planned,
    traced,
)
from optax_offload._plan.frozen import FrozenParameters, names_of
from optax_offload._plan.result import Plan
from optax_offload._plan.search import Search, smallest_that_fits
from optax_offload._plan.state import (
    MovableState,
    RecordedOptimizer,
    Selection,
    leaf_patterns,
    movable_state,
)
from optax_offload._plan.step import (
    Step,
    StepFactory,
    check_factory,
    check_remainder,
    donated,
    name_of,
    record,
)
from optax_offload._plan.variants import (
    WITHOUT_HIDING,
    Outlook,
    Sizes,
    StepFacts,
    Variant,
    variants,
)

_logger = logging.getLogger("optax_offload.plan")

# Where a compilation takes longer than this, few are spent on moving less state.
QUICK_SECONDS = 10.0
LESS_STATE_ATTEMPTS = 3
# And none where a step would be faster by no more than this share, at best.
GAIN_OF_LESS_STATE = 0.05


def plan(  # noqa: PLR0913 - keyword-only options
    make_step: Callable[..., Step],
    *args: Any,
    target: aot.Target | str,
    budget_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    rules: Rules | None = None,
    frozen: str | None = None,
    allow: str | Sequence[str] | None = None,
    link_bytes_per_second: float | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress = lambda _: None,
) -> Plan:
    r"""Finds the fastest way to train a step that fits, by compiling it.

    If the step fits as it is, nothing is done. If not, the plan combines the values
    that can rest on the host (optimizer state, parameters, residuals), the ways to
    treat gradients (`stream`), and the codecs that are allowed. Tracing tells the least
    memory that each combination needs. Combinations are compiled in the order of the
    time that is expected, until no other can be faster than the best one that fits.
    Then less of the state is moved if that is faster. Peaks and modeled times
    (`aot.step_time`) are those of compiled programs.

    Args:
      make_step: Makes the step to be compiled, called as
        ``make_step(offload, target, *args)`` for every candidate. It gives its
        optimizer to ``offload``, in the place of `offload` in a chain (as in
        ``optax.chain(clip, offload(adamw))``), and builds the optimizer's state with
        it, as in ``oo.eval_shape(tx.init, params)``.
      *args: Further arguments for it.
      target: The chips to compile for: an `optax_offload.aot.Target`, or its name, such
        as ``"h100"``, ``"h100:8"`` or ``"v5e:2x4"``.
      budget_bytes: The memory that the step may take on each device: by default the
        target's memory less a reserve, 10 % on a GPU and 2 % on a TPU.
      host_memory_bytes: The memory that the step may take of each host. None does not
        bound it; the plan says how much is needed.
      rules: The rules that are decided already. They say which leaves of the state move
        and (``memory_kind="device"``) which stay; an `OffloadConfig` can have rules of
        parameters too. The plan decides about leaves that none of them matches.
      frozen: A regex of the parameters that are not trained, as the base under
        adapters. It matches whole paths, which begin in the step's argument that they
        are in, as those of rules for `place` do. They may rest on the host.
      allow: The codecs that may be used, a name or several, as
        ``"int8,bfloat16-remainder"``. Those of `place` (``"nf4"``) are for frozen
        parameters; those of `low_bit` for state: ``"bfloat16-remainder"`` for the
        weights of `master_weights`, which changes no number, the others for moments.
        None leaves all its dtype.
      link_bytes_per_second: Bandwidth of the link to the host, each way, for the model;
        by default the documented one. See `measure_link`.
      folder: The folder that keeps peaks and times of compiled programs, so that other
        plans need not compile them again. None keeps nothing.
      progress: A function that is called with what is being compiled, and then with the
        result. The logger ``optax_offload.plan`` says the same at level INFO.

    Returns:
      A `Plan`. If the step fits as it is, it moves nothing, and its ``offload`` returns
      the optimizer itself. Its ``config`` is all that a train script needs: rules of
      state for `offload`, of parameters for `place`, and the options of `jit`.

    Raises:
      aot.DoesNotFitError: Nothing fits. Says by how much, what takes the memory and
        what would help; its ``alternatives`` are the table of what was tried.
      TypeError: ``make_step`` does not return a `Step`.
      ValueError: It does not give an optimizer to ``offload``, or does not initialise
        it; a budget is no whole number of bytes, or more than the target has; a rule is
        wrong; a codec is none, or for what the step does not have; what is said to be
        frozen is replaced.
      ImportError: The compiler's wheel is not installed.

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
    budget = checked_budget(budget_bytes, host_memory_bytes, target)
    check_factory(make_step, name_of(make_step), *args)
    asked = PlanRequest(budget, allowed(allow), link_bytes_per_second, folder, frozen)
    given = None if rules is None else as_config(rules)
    planner = Planner(StepFactory(make_step, target, args), asked, given, progress)
    planner.run()
    return planner.plan()


class Planner:
    """Looks for a plan; what was found can be asked for while it does.

    Attributes:
      complete: Whether all was looked at that should be.
    """

    complete: bool = False

    def __init__(
        self,
        factory: StepFactory,
        asked: PlanRequest,
        given: OffloadConfig | None = None,
        progress: Progress = lambda _: None,
    ):
        """Makes the step, and compiles nothing yet.

        Args:
          factory: Makes the step.
          asked: Budgets, and what the model needs.
          given: Rules of what is decided already.
          progress: Is told what is being compiled, and then what came of it.
        """

        def tell(what: str | CompiledCandidate) -> None:
            _logger.info("%s", what)
            progress(what)

        self._factory, self._asked, self._given = factory, asked, given
        self._progress = tell
        self._started = time.perf_counter()
        optimizers = record(factory, given)
        self._frozen = FrozenParameters.of(factory, optimizers, asked.frozen, given)
        self._frozen.check(asked.allow)
        check_remainder(asked.allow, optimizers, factory)
        self._states: dict[Codecs, MovableState] = {(): self._movable((), optimizers)}
        self._facts = StepFacts(Sizes.of(self._states))
        self._known: dict[Variant, CompiledCandidate] = {}
        self._search: Search | None = None

    def run(self) -> None:
        """Looks for the fastest way that fits."""
        plain = self._known[Variant()] = self._compile(Variant())
        if not plain.fits:
            self._trace()
            self._search = search = self._searching()
            search.run()
            self._move_less()
            least = search.least()
            # What needs least is the end of the table, where that does not take long.
            if least is not None and search.best is not None and not self._is_slow:
                used = min(c.used_bytes for c in self.compiled)
                if search.predicted(least) < used:
                    search.ask(least)
        self.complete = True

    @property
    def _is_slow(self) -> bool:
        """Whether a compilation takes long: of layers that no scan runs it does."""
        return self._facts.cut and self.compiled[0].seconds > QUICK_SECONDS

    @property
    def compiled(self) -> tuple[CompiledCandidate, ...]:
        """The candidates that were compiled so far; the first is the step as given."""
        return tuple(c for c in self._known.values() if not c.same_as)

    @property
    def best(self) -> CompiledCandidate | None:
        """The best that was compiled by now; None where nothing fits."""
        if self._search is not None:
            return self._search.best
        return next((c for c in self.compiled if c.fits), None)

    @property
    def alternatives(self) -> Alternatives:
        """The table of what was looked at by now."""
        passed = () if self._search is None else tuple(self._search.passed_over())
        budget, target = self._asked.budget, self._factory.target
        tried = tuple(self._known.values())
        return alternatives(tried, passed, budget, target, self.best)

    def plan(self) -> Plan:
        """The best that was found by now.

        Raises:
          aot.DoesNotFitError: Nothing that was compiled fits.
        """
        target, asked = self._factory.target, self._asked
        best, compiled = self.best, self.compiled
        if best is None:
            table = dataclasses.replace(self.alternatives, outside=self._facts.outside)
            state = self._states[()]
            codecs = worth_allowing(asked.allow, state.optimizers, bool(state.frozen))
            raise NothingFitsError(target, asked.budget, compiled, table, codecs)
        state, on_host = self._states[best.variant.codecs], asked.budget.host_bytes
        placed = state.placed(best.variant.parameters, best.variant.frozen)
        return Plan(
            target=target,
            budget_bytes=asked.budget.device_bytes,
            host_memory_bytes=on_host and on_host * target.devices_per_host,
            config=best.variant.config(state),
            moved=state.selected(best.variant.state),
            encoded=state.encoded,
            frozen=tuple(leaf_patterns([x.leaf for x in placed if x.frozen], 0)),
            placed=names_of(self._factory.plain_step(), placed),
            before=compiled[0],
            after=best,
            compiled=compiled,
            alternatives=self.alternatives,
            environment=environment(target, best.used_bytes, best.host_bytes),
            outside=self._facts.outside,
            tokens=self._factory.plain_step().tokens,
            complete=self.complete,
            donated=donated(self._factory.plain_step()),
        )

    def _movable(
        self, codecs: Codecs, recorded: tuple[RecordedOptimizer, ...] = ()
    ) -> MovableState:
        return movable_state(
            recorded or record(self._factory, self._given, codecs),
            self._given,
            self._factory.target.device_count,
            self._frozen.kept_in(codecs),
        )

    def _compile(self, variant: Variant) -> CompiledCandidate:
        so_far = time.perf_counter() - self._started
        self._progress(
            f"compiling: {variant.text(self._facts.sizes)} ({len(self.compiled)} "
            f"compiled, {so_far:.0f} s so far)"
        )
        state = self._states[variant.codecs]
        found = compiled(self._factory, state, variant, self._facts, self._asked)
        for other in self.compiled:
            if found.program and other.program == found.program:
                found = dataclasses.replace(found, same_as=other.what)
        self._progress(found)
        return found

    def _trace(self) -> None:
        """Notes what can move, and what tracing the step with all of it moved tells."""
        for codecs in forms(self._asked.allow):
            self._states[codecs] = self._movable(codecs)
        state = self._states[()]
        options = Options(late_gradients="recompute", residuals="host")
        facts = traced(
            self._factory,
            state,
            Variant(state.everything, (), "all", options, frozen="all"),
        )
        for codecs, each in self._states.items():
            self._states[codecs] = each.with_rows(facts.row_arguments)
        facts = dataclasses.replace(facts, sizes=Sizes.of(self._states))
        if facts.cut:
            ways = [v for v in variants(facts) if not v.codecs]
            self._progress(f"planning {len(ways)} ways")
            known = planned(self._factory, self._states[()], ways)
            facts = dataclasses.replace(facts, planned=known)
        self._facts = facts
        # Now it can be told what fills the device where the step is as given.
        for variant, found in self._known.items():
            parts = parts_of(variant, self._facts, found.peak, found.used_bytes)
            self._known[variant] = dataclasses.replace(found, parts=parts)

    def _searching(self) -> Search:
        plain, chip = self._known[Variant()], self._factory.target.chip
        link = self._asked.link_bytes_per_second or chip.link.bytes_per_second
        computed = self._facts.flops / chip.flops_per_second
        if plain.time is not None:
            computed = plain.time.compute_seconds
        self._outlook = Outlook(self._facts, plain.used_bytes, computed, link)
        ways = variants(self._facts)
        ways += [less for v in ways if (less := self._within_host(v)) is not None]
        budget = self._asked.budget
        search = Search(ways, self._outlook, self._compile, budget, self._known)
        if self._facts.can_stream and self._facts.on_gpus:
            # What it takes of any way, nothing but a program tells.
            search.ask(Variant(options=WITHOUT_HIDING))
        return search

    def _within_host(self, variant: Variant) -> Variant | None:
        """A way that moves as much of its state as the host has room for, not all."""
        host_bytes = self._asked.budget.host_bytes
        if host_bytes is None or not variant.state:
            return None
        left = host_bytes - self._outlook(variant).host_bytes
        if left >= 0:
            return None
        sizes = self._facts.sizes.patterns[variant.codecs]
        left += sum(sizes[i] for i in variant.state)
        kept: set[int] = set()
        for i in sorted(variant.state):
            if sizes[i] <= left:
                left -= sizes[i]
                kept.add(i)
        return dataclasses.replace(variant, state=frozenset(kept)) if kept else None

    def _move_less(self) -> None:
        """Moves less of the state where that can be faster."""
        assert self._search is not None
        search, best = self._search, self._search.best
        if best is None or not best.variant.state:
            return
        whole = best.variant
        budget_bytes = self._asked.budget.device_bytes
        # What has room on the device again, of what waits for the link.
        share = min((budget_bytes - best.used_bytes) / max(best.moved_bytes, 1), 1.0)
        waiting = best.step_seconds - self._outlook.least_seconds(whole)
        if share * waiting < best.step_seconds * GAIN_OF_LESS_STATE:
            return

        # The host may have no room for more than it moves.
        positions = sorted(whole.state)

        def used(selection: Selection) -> int:
            state = frozenset(positions[i] for i in selection)
            variant = dataclasses.replace(whole, state=state)
            if not selection:
                return search.predicted(variant)
            found = search.ask(variant)
            return budget_bytes + 1 if found is None else found.used_bytes

        smallest_that_fits(
            [self._facts.sizes.patterns[whole.codecs][i] for i in positions],
            used,
            budget_bytes,
            LESS_STATE_ATTEMPTS if best.seconds > QUICK_SECONDS else None,
        )

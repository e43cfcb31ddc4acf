"""Choosing rules for a memory budget, by compiling the step that will run."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Sharding

from optax_offload import _memory, _offload, _rules, _trees, aot
from optax_offload._plan import cost as _cost
from optax_offload._plan import flops as _flops
from optax_offload._plan import patterns
from optax_offload._plan import plan_file as _plan_file
from optax_offload._report import host_memory as _host
from optax_offload._units import size_text
from optax_offload.aot import Target
from optax_offload.aot import chips as _figures

# What a program cannot have of a device's memory. A GPU's: CUDA's context and modules,
# NCCL's buffers, fragmentation, batches on their way; JAX by default takes 75 % and
# leaves the rest (docs.jax.dev/en/latest/gpu_memory_allocation.html), so a plan that
# needs more says what to set. A TPU's: `Target.memory_bytes` is less the compiler's
# own reserve already; batches and what else the process keeps remain.
RESERVES = {"gpu": 0.10, "tpu": 0.02}
GPU_DEFAULT_FRACTION = 0.75
GPUS_OF_A_HOST = 8


class Step(NamedTuple):
    """A train step, to be compiled: what a step factory returns.

    Attributes:
      fn: the function, or a jitted one, which brings its own options.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`, with shardings on the
        target's mesh if it has several devices. The optimizer's state is among them.
      donate_argnums: as of `jax.jit`.
      out_shardings: as of `jax.jit`.
      tokens: how many a step trains on, for what a plan tells of time.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: int | Sequence[int] | None = None
    out_shardings: Any = None
    tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A candidate that was compiled.

    Attributes:
      moved_bytes: of state that is in host memory, of each device.
      used_bytes: the peak on each device; where the compiler refused, what it says.
      peak: in parts; None where the compiler refused.
      fits: the budget, and the target.
      seconds: it took.
      parts: what the peak is made of: see `Plan`.
    """

    moved_bytes: int
    used_bytes: int
    peak: aot.Peak | None
    fits: bool
    seconds: float
    parts: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "moved_bytes": self.moved_bytes,
            "used_bytes": self.used_bytes,
            "fits": self.fits,
            "seconds": round(self.seconds, 3),
            "parts": dict(self.parts),
        }

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{size_text(self.moved_bytes)} of state moved: peak "
            f"{size_text(self.used_bytes)}, {fits} ({self.seconds:.0f} s)"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rules by which a step fits, what they save and what they cost.

    ``str()`` of it is the same for a person.

    Attributes:
      target: what it was compiled for.
      budget_bytes: on each device.
      config: the rules. If nothing is to be moved, one that keeps all on the device.
      moved: the families of leaves that the plan moves, beside what was given.
      before: the step as the given rules have it: the plain one if there are none.
      after: the step with the plan; the same if nothing is to be moved. The ``parts``
        of both are of parameters, gradients, activations (with all else that is
        temporary), state, and other arguments and results; parameters and state are
        those of the arguments, gradients count as much as parameters, as far as the
        temporaries reach.
      compiled: all that were, in order.
      cost: in time.
      environment: variables to set for the process that trains.
    """

    target: Target
    budget_bytes: int
    config: _rules.OffloadConfig
    moved: tuple[patterns.Family, ...]
    before: Compiled
    after: Compiled
    compiled: tuple[Compiled, ...]
    cost: _cost.Cost
    environment: Mapping[str, str]

    @property
    def empty(self) -> bool:
        """Whether all state stays on the device."""
        return all(rule.memory_kind == "device" for rule in self.config.rules)

    def offload(self, inner: Any) -> Any:
        """Wraps an optimizer as the plan says: with `offload`, or not at all.

        Args:
          inner: the optimizer that the step factory gave to its ``offload``.
        """
        return inner if self.empty else _offload.offload(inner, self.config)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rules as a file for `load_config`, with a comment on each.

        Raises:
          OSError: the file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.rule_file())

    def rule_file(self) -> str:
        """What `save` writes."""
        return _plan_file.text(self.config, self.moved, self._summary())

    def _summary(self) -> list[str]:
        took = sum(c.seconds for c in self.compiled)
        before, after = self.before.used_bytes, self.after.used_bytes
        lines = [
            f"for {self.target.name}, {size_text(self.budget_bytes)} on each device",
            f"peak as given: {size_text(before)}"
            + (", fits: nothing is moved" if not self.moved else ""),
        ]
        if self.moved:
            moved = self.after.moved_bytes
            lines.append(
                f"peak with these rules: {size_text(after)}, with {size_text(moved)} "
                "of state in host memory"
            )
        lines.append(f"compiled {len(self.compiled)} times, {took:.0f} s")
        return lines + [f"set {name}={x}" for name, x in self.environment.items()]

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs: what `optax-offload fit --json` prints."""
        rules = [
            {
                "pattern": rule.regex,
                "memory_kind": rule.memory_kind,
                "min_bytes": rule.min_bytes,
                "slice_axis": rule.slice_axis,
                "optional": rule.optional,
            }
            for rule in self.config.rules
        ]
        moved = [
            {
                "pattern": family.pattern,
                "leaves": [leaf.path for leaf in family.leaves],
                "bytes_per_device": family.nbytes_per_device,
            }
            for family in self.moved
        ]
        return {
            "target": self.target.name,
            "budget_bytes": self.budget_bytes,
            "empty": self.empty,
            "rules": rules,
            "moved": moved,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "compiled": [c.as_dict() for c in self.compiled],
            "cost": self.cost.as_dict(),
            "environment": dict(self.environment),
        }

    def __str__(self) -> str:
        after = self.after.parts
        families = [
            f"  {size_text(f.nbytes_per_device):>10}  {f.pattern}" for f in self.moved
        ]
        parts = [
            f"  {part:<12} {size_text(n):>10} -> {size_text(after[part]):>10}"
            for part, n in self.before.parts.items()
        ]
        head, *rest = self._summary()
        return "\n".join([head, *rest, *parts, *families, *self.cost.lines()])


def plan(
    make_step: Callable[..., Step],
    *args: Any,
    target: Target,
    budget_bytes: int | None = None,
    rules: _rules.Rules | None = None,
    link_bytes_per_second: float | None = None,
    progress: Callable[[str | Compiled], None] = lambda _: None,
) -> Plan:
    """Finds the least state to move for a step to fit, by compiling it.

    The step is compiled as it is; if that does not fit, with all state moved, and then
    with some, about as often again as the number of families of leaves halves. The
    result has been compiled: its peak is known, not estimated.

    Args:
      make_step: makes the step to be compiled, called as
        ``make_step(offload, target, *args)`` for every candidate. It gives its
        optimizer to ``offload``, in the place where `offload` goes (as in
        ``optax.chain(clip, offload(adamw))``), and builds the optimizer's state with
        it, as in ``oo.eval_shape(tx.init, params)``.
      *args: further arguments for it.
      target: what to compile for.
      budget_bytes: what the step may take on each device: by default the target's
        memory less a reserve, 10 % on a GPU and 2 % on a TPU.
      rules: what is decided already: what goes, and (``memory_kind="device"``) what
        stays. The plan decides about leaves that none of them matches.
      link_bytes_per_second: each way between host and device, for the cost; by default
        what is documented. See `measure_link`.
      progress: is told what is being compiled, and then what came of it.

    Returns:
      A `Plan`. If the step fits as it is, it moves nothing, and its ``offload`` returns
      the optimizer itself.

    Raises:
      aot.DoesNotFitError: the step does not fit with all state moved. Says by how much,
        what takes the memory and what would help.
      TypeError: ``make_step`` does not return a `Step`.
      ValueError: it does not give an optimizer to ``offload``, or does not initialise
        it; the budget is more than the target has; a rule is wrong.
      ImportError: the compiler's wheel is not installed.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_offload as oo
      >>> from optax_offload import aot
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
      ...     make_step, target=aot.Target("h100"), budget_bytes=200 * 2**20
      ... )  # doctest: +SKIP
      >>> [family.pattern for family in found.moved]  # doctest: +SKIP
      ['\\d+/mu/w']
    """
    budget_bytes = _check_budget(budget_bytes, target)
    given = None if rules is None else _rules.as_config(rules)
    states = record(make_step, target, *args)
    compiler = _Compiler(make_step, args, target, budget_bytes, given, states, progress)
    families = compiler.families
    sizes = [f.nbytes_per_device for f in families]
    choice = patterns.fewest(sizes, compiler.used_bytes, budget_bytes)
    if choice is None:
        everything = compiler.compiled[frozenset(range(len(families)))]
        raise _does_not_fit(target, budget_bytes, everything, compiler)
    after = compiler.compiled[choice]
    return Plan(
        target=target,
        budget_bytes=budget_bytes,
        config=compiler.config(choice),
        moved=tuple(families[i] for i in sorted(choice)),
        before=compiler.compiled[frozenset()],
        after=after,
        compiled=tuple(compiler.compiled.values()),
        cost=_cost_of(make_step, args, target, after, link_bytes_per_second),
        environment=_environment(target, after),
    )


def default_budget_bytes(target: Target) -> int:
    """The memory of each device less the reserve."""
    return int(target.memory_bytes * (1 - RESERVES[target.platform]))


def _check_budget(budget_bytes: int | None, target: Target) -> int:
    if budget_bytes is None:
        return default_budget_bytes(target)
    if not 0 < budget_bytes <= target.memory_bytes:
        raise ValueError(
            f"budget_bytes is {budget_bytes}; it must be at least 1 and at most what "
            f"{target.name!r} has, {target.memory_bytes} "
            f"({size_text(target.memory_bytes)})"
        )
    return budget_bytes


class Recorded(NamedTuple):
    """What a step factory does with an optimizer.

    Attributes:
      state: the leaves of the optimizer's state.
      parameter_bytes: of what it was initialised with, on each device.
      step: the plain one.
    """

    state: tuple[patterns.Leaf, ...]
    parameter_bytes: int
    step: Step


def make(
    make_step: Callable[..., Step], offload: Any, target: Target, *args: Any
) -> Step:
    """The step of a factory, with a name for what else it may return."""
    step = make_step(offload, target, *args)
    if not isinstance(step, Step):
        raise TypeError(
            f"a step factory returns an optax_offload.Step(fn, args, ...), got {step!r}"
        )
    return step


def record(
    make_step: Callable[..., Step], target: Target, *args: Any
) -> tuple[Recorded, ...]:
    """Calls a step factory, and notes what state each optimizer has."""
    calls: list[tuple[Any, Any] | None] = []

    def offload(inner: Any) -> Any:
        wrapped = _offload.check_inner(inner)
        position = len(calls)
        calls.append(None)

        def init(params: Any) -> Any:
            state = wrapped.init(params)
            calls[position] = (_types(params), _types(state))
            return state

        return optax.GradientTransformationExtraArgs(init, wrapped.update)

    step = make(make_step, offload, target, *args)
    if not calls or None in calls:
        missing = "init of what" if calls else "its first argument: what"
        raise ValueError(
            f"{make_step!r} does not call {missing} it makes has to be in the step. "
            "Write tx = optax.chain(..., offload(optimizer)), and give the step's args "
            "the state of oo.eval_shape(tx.init, params)"
        )
    arguments = _trees.leaves_with_paths(step.args)
    recorded = []
    for call in calls:
        assert call is not None
        params, state = call
        leaves = [_leaf(path, x, arguments, target) for path, x in state]
        weights = [_leaf(path, x, arguments, target) for path, x in params]
        nbytes = sum(leaf.nbytes_per_device for leaf in weights)
        recorded.append(Recorded(tuple(leaves), nbytes, step))
    return tuple(recorded)


def _types(tree: Any) -> list[tuple[str, Any]]:
    return [(path, jax.typeof(x)) for path, x in _trees.leaves_with_paths(tree)]


def _leaf(
    path: str, aval: Any, arguments: list[tuple[str, Any]], target: Target
) -> patterns.Leaf:
    """A leaf, with the sharding of the step's argument that it is.

    That is the one of its shape whose path ends in the leaf's. Where none is, it counts
    as a type does that says no more.
    """
    like = next(
        (
            x
            for found, x in arguments
            if (found == path or found.endswith(f"/{path}"))
            and getattr(x, "shape", None) == aval.shape
        ),
        None,
    )
    nbytes = _memory.nbytes(aval)
    sharding = getattr(like, "sharding", None)
    if isinstance(sharding, Sharding) and aval.ndim:
        shard = sharding.shard_shape(aval.shape)
        per_device = math.ceil(
            nbytes * math.prod(shard) / max(math.prod(aval.shape), 1)
        )
        whole = [i for i, n in enumerate(shard) if n == aval.shape[i]]
        axis = whole[0] if whole else None
    else:
        replicated = like is not None or target.device_count == 1
        per_device = nbytes if replicated else _memory.nbytes_on_each_device(aval)
        axis = 0 if aval.ndim else None
    return patterns.Leaf(
        path, _memory.movable_nbytes(aval), per_device, axis, aval.ndim >= 3
    )


class _Compiler:
    """Compiles candidates, each once."""

    def __init__(
        self,
        make_step: Callable[..., Step],
        args: tuple[Any, ...],
        target: Target,
        budget_bytes: int,
        given: _rules.OffloadConfig | None,
        states: tuple[Recorded, ...],
        progress: Callable[[str | Compiled], None],
    ):
        self._make_step, self._args, self._target = make_step, args, target
        self._budget_bytes = budget_bytes
        self._given = given
        self._states = states
        self._progress = progress
        leaves = [leaf for recorded in states for leaf in recorded.state]
        undecided, self._goes = leaves, []
        if given is not None:
            sizes = [(leaf.path, leaf.nbytes) for leaf in leaves]
            placements = list(zip(leaves, _rules.place(given, sizes), strict=True))
            undecided = [leaf for leaf, p in placements if p.rule is None]
            self._goes = [leaf for leaf, p in placements if p.memory_kind != "device"]
        self.families = patterns.families(undecided)
        self.state_bytes = sum(leaf.nbytes_per_device for leaf in leaves)
        self.parameter_bytes = sum(r.parameter_bytes for r in states)
        self.compiled: dict[patterns.Choice, Compiled] = {}

    def config(self, choice: patterns.Choice) -> _rules.OffloadConfig:
        """The given rules, and one for each family of a choice."""
        rules = list(self._given.rules) if self._given else []
        rules += [self._rule(self.families[i]) for i in sorted(choice)]
        if not rules:
            rules = [_rules.Rule(".*", "device")]
        # Each optimizer has to have a match for a rule; of several not all may.
        rules = [
            dataclasses.replace(rule, optional=True)
            if any(
                not any(rule.matches(leaf.path) for leaf in recorded.state)
                for recorded in self._states
            )
            else rule
            for rule in rules
        ]
        return _rules.OffloadConfig(rules, self._given and self._given.window_bytes)

    def _rule(self, family: patterns.Family) -> _rules.Rule:
        # What the library would find by itself need not be written: on one device, and
        # for stacked leaves on several, the leading axis.
        found = 0 if family.stacked or self._target.device_count == 1 else None
        if family.slice_axis == found:
            return _rules.Rule(family.pattern)
        return _rules.Rule(family.pattern, slice_axis=family.slice_axis)

    def moved(self, choice: patterns.Choice) -> list[patterns.Leaf]:
        """The leaves that go, by the given rules and by a choice."""
        chosen = [leaf for i in choice for leaf in self.families[i].leaves]
        return self._goes + chosen

    def used_bytes(self, choice: patterns.Choice) -> int:
        """Compiles a choice."""
        moved = sum(leaf.nbytes_per_device for leaf in self.moved(choice))
        self._progress(f"compiling with {size_text(moved)} of state moved")
        started = time.perf_counter()
        offload: Callable[[Any], Any] = lambda inner: inner  # noqa: E731
        if self.moved(choice):
            config = self.config(choice)
            offload = lambda inner: _offload.offload(inner, config)  # noqa: E731
        step = make(self._make_step, offload, self._target, *self._args)
        try:
            peak = aot.peak(compile_step(step, self._target))
            used = peak.peak_bytes
        except aot.DoesNotFitError as error:
            peak, used = error.peak, error.used_bytes
        self.compiled[choice] = Compiled(
            moved_bytes=moved,
            used_bytes=used,
            peak=peak,
            fits=used <= self._budget_bytes,
            seconds=time.perf_counter() - started,
            parts=self._parts(peak, used, moved),
        )
        self._progress(self.compiled[choice])
        return used

    def _parts(self, peak: aot.Peak | None, used: int, moved: int) -> dict[str, int]:
        state = self.state_bytes - moved
        arguments = self.parameter_bytes + state
        other = temporaries = max(used - arguments, 0)
        if peak is not None:
            temporaries = peak.temporary_bytes
            other = max(used - arguments - temporaries, 0)
        else:
            other = 0
        gradients = min(self.parameter_bytes, temporaries)
        return {
            "parameters": self.parameter_bytes,
            "gradients": gradients,
            "activations": temporaries - gradients,
            "state": state,
            "other": other,
        }


def compile_step(step: Step, target: Target) -> jax.stages.Compiled:
    """Compiles what a step factory returned.

    Raises:
      aot.DoesNotFitError: it does not fit on the target.
    """
    return aot.compile(
        step.fn,
        *step.args,
        target=target,
        donate_argnums=step.donate_argnums,
        out_shardings=step.out_shardings,
    )


def _cost_of(
    make_step: Callable[..., Step],
    args: tuple[Any, ...],
    target: Target,
    after: Compiled,
    link_bytes_per_second: float | None,
) -> _cost.Cost:
    step = make(make_step, lambda inner: inner, target, *args)
    with jax.sharding.use_abstract_mesh(aot.mesh_of(step.args, target)):
        flops = _flops.count(step.fn, *step.args) / target.device_count
    documented = _figures.figures(target.name)
    measured = link_bytes_per_second is not None
    return _cost.Cost(
        bytes_each_way=after.moved_bytes,
        link_bytes_per_second=(
            link_bytes_per_second if measured else documented.link_bytes_per_second
        ),
        link_source="measured" if measured else documented.link_source,
        link_utilization=1.0 if measured else _cost.LINK_UTILIZATION,
        flops=flops,
        flops_per_second=documented.flops_per_second,
        flops_source=documented.flops_source,
        tokens=step.tokens,
    )


def _environment(target: Target, after: Compiled) -> dict[str, str]:
    """What has to be set on a GPU for a plan to come true."""
    found = {}
    if target.platform == "gpu":
        share = after.used_bytes / target.memory_bytes
        if share > GPU_DEFAULT_FRACTION - 0.02:
            percent = min(math.ceil(share * 100) + 2, 97)
            found["XLA_CLIENT_MEM_FRACTION"] = f"{percent / 100:.2f}"
        host = after.moved_bytes * min(target.device_count, GPUS_OF_A_HOST)
        if host > 0.9 * _host.PLUGIN_DEFAULT_BYTES:
            limit = math.ceil(host * 11 / 10 / 2**30)
            found[_host.PLUGIN_LIMIT] = str(limit)
    return found


def _does_not_fit(
    target: Target, budget_bytes: int, everything: Compiled, compiler: _Compiler
) -> aot.DoesNotFitError:
    short = everything.used_bytes - budget_bytes
    parts = {name: n for name, n in everything.parts.items() if n}
    needs = ", ".join(f"{name} {size_text(n)}" for name, n in parts.items())
    stays = compiler.state_bytes - everything.moved_bytes
    weights = parts.get("parameters", 0) + parts.get("gradients", 0)
    activations = parts.get("activations", 0)
    help_with = []
    if compiler.state_bytes and stays > short:
        help_with.append(
            f"rules that let go of the {size_text(stays)} of state that stays"
        )
    if activations > short:
        help_with.append(
            f"a smaller batch, or remat (jax.checkpoint, nn.remat): activations and "
            f"all else that is temporary would have to go to "
            f"{size_text(activations - short)}"
        )
    if weights // 2 > short:
        help_with.append("bfloat16 parameters, if they are float32: half of both")
    ratio = everything.used_bytes / budget_bytes
    more = math.ceil(target.device_count * ratio)
    help_with.append(
        f"more devices: parameters, gradients and batch sharded over at least {more}"
        f" (now {target.device_count}), or larger ones"
    )
    return aot.DoesNotFitError(
        f"does not fit on {target.name!r} even with all state moved: short by "
        f"{size_text(short)} of {size_text(budget_bytes)} on each device. It needs "
        f"{size_text(everything.used_bytes)}: {needs}. What would help:"
        + "".join(f"\n- {line}" for line in help_with),
        used_bytes=everything.used_bytes,
        limit_bytes=budget_bytes,
        peak=everything.peak,
    )

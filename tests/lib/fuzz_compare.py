"""A random train step of ours against plain `jax.jit`: values, memories, donation.

How far values may differ is not guessed. The plain step is run again from parameters
that are a millionth of themselves away, and ours may differ from it by a multiple of
what that changes. Where this is not enough, the plain step is compiled in other ways,
which round otherwise, and may differ from itself by as much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_programs import Calls, Drawn, Program
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._emit import moves
from optax_offload._ground import limits
from optax_offload._places import memory

STEPS = 2
# A relative change of parameters. Numbers in few bits change by rounding to another
# one, and few of them are that near to where that begins.
NOISE, NOISE_OF_CODECS = 1e-6, 1e-4
PERTURBED = 3
# Ours may differ by so many times what noise changes, and by so many units of the last
# place of a leaf's largest value.
MULTIPLE, ULPS = 16, 16
# Of a hundred values of a leaf one may differ by as much as noise changes another one.
SHARE = 0.01
# As many turns as there may be, each with as many moves.
LEAST = dataclasses.replace(
    limits.now,
    segment_bytes=1,
    many_bytes=2**50,
    least_parted_bytes=1,
    least_alive_bytes=1,
    least_segments=1,
    least_freed_bytes=1,
    least_residual_bytes=1,
    small_bytes=64,
    turn_bytes=1,
    least_tied_bytes=1,
    least_taken_bytes=1,
    least_flops_per_byte=0,
    least_products=1,
)
# Errors that are right, by what was drawn.
REFUSALS: list[tuple[Callable[[Drawn], bool], str]] = [
    # JAX compiles no ordered effect beside a value in host memory (U07), and has words
    # of its own for it where `jax.jit` is the outermost.
    (
        lambda drawn: drawn.effect == "ordered io in step",
        r"ordered=True|safe_zip\(\) argument 1 has length",
    ),
]


@functools.cache
def quick_options() -> dict[str, Any]:
    """Compiler options with which the CPU's compiler takes a quarter of the time.

    Not every version has them.
    """
    options = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except Exception:
        return {}
    return options


def _precise() -> dict[str, Any]:
    return quick_options() | {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a seed in one mode.

    Attributes:
      drawn: What was drawn, with that mode alone.
      kind: "fused", "not fused", "refused" by an error that is right, "chaotic" where
        noise changes as much as a step does, "no program" where JAX itself refuses it,
        or "FAILED".
      detail: Why.
    """

    drawn: Drawn
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}\n  {self.drawn.text()}"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of what a step returned."""

    path: str
    value: np.ndarray
    dtype: Any
    kind: str


@dataclasses.dataclass(frozen=True)
class Record:
    """What a step did.

    Attributes:
      leaves: Its results.
      structure: Their structure.
      deleted: For each leaf of its arguments, whether it is gone.
      calls: The values with which its effects were called.
    """

    leaves: Sequence[Leaf]
    structure: Any
    deleted: Sequence[tuple[str, bool, bool]]
    calls: dict[str, list[float]]


class _FailedError(Exception):
    """Ours is not as the plain one."""


def run(drawn: Drawn) -> list[Outcome]:
    """Compares what was drawn with the plain step, in each of its modes."""
    program = Program(drawn)
    quiet = contextlib.ExitStack()
    with quiet:
        said = quiet.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        # Of what a failed restore of another test left behind (see `pyproject.toml`).
        warnings.filterwarnings("ignore", r"coroutine .* was never awaited")
        quiet.enter_context(jax.numpy_rank_promotion("allow"))
        least = LEAST if drawn.turns == "least" else limits.now
        least = dataclasses.replace(least, least_residual_rows_bytes=0)
        quiet.enter_context(mock.patch.object(limits, "now", least))
        if drawn.turns == "least":
            quiet.enter_context(mock.patch.object(moves, "TILE", (2, 2)))
        if drawn.axis_types == "Explicit" and program.mesh is not None:
            quiet.enter_context(jax.set_mesh(program.mesh))
        try:
            ours = _Steps(program, offloaded=True)
        except Exception as error:
            detail = f"init: {type(error).__name__}: {_first_line(error)}"
            return [Outcome(drawn, "FAILED", detail)]
        try:
            plain = _Plain(program, ours.init)
        except (AttributeError, NameError):
            raise  # A mistake of the fuzzer's own.
        except Exception as error:
            # JAX or optax refuse it: there is no step to compare.
            return [Outcome(drawn, "no program", _first_line(error))]
        found = []
        expected = {_kind_of_warning(w) for w in said}
        for mode in drawn.modes:
            del said[:]
            outcome = _compare(ours, plain, mode)
            more = {_kind_of_warning(w) for w in said} - expected - {"ours"}
            if outcome.kind in ("fused", "not fused") and more:
                outcome = Outcome(outcome.drawn, "FAILED", f"warned: {sorted(more)}")
            found.append(outcome)
    return found


def _kind_of_warning(w: warnings.WarningMessage) -> str:
    """What a warning is about; of ours, which may be right, nothing."""
    if issubclass(w.category, oo.OffloadWarning):
        return "ours"
    return f"{w.category.__name__} {str(w.message)[:60]}"


class _Steps:
    """A program with an optimizer, offloaded or plain: its state, and what is run.

    Attributes:
      init: The state as `init` left it.
    """

    def __init__(self, program: Program, *, offloaded: bool, like: Any = None):
        self.program, self.tx = program, program.transformation(offloaded=offloaded)
        self._offloaded = offloaded
        # What does not depend on them is on their devices, too.
        plain_init = jax.jit(self.tx.init, keep_unused=True)
        self._init: Any = self.tx.init if offloaded else plain_init
        self._like = like
        self.init = self._init(program.params())

    def start(self, noise: float, number: int) -> tuple[Any, Any]:
        """Parameters and state, in buffers of their own; sharded as others are."""
        params = self.program.params(noise, number)
        state = self._init(params) if noise else self.init
        if self._offloaded and self.program.resting:
            params = oo.set_memory_kind(params, self.program.resting, "pinned_host")

        def put(x: Any, like: Any) -> Any:
            if self.program.mesh is not None and len(like.device_set) == 1:
                like = NamedSharding(self.program.mesh, P())
            like = like.with_memory_kind(x.sharding.memory_kind)
            # Else it may be the same buffer.
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                data = np.asarray(jax.random.key_data(x))
                x = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
            elif not (_on_host(x) or getattr(x, "weak_type", False)):
                x = np.asarray(x)
            return jax.device_put(x, like, may_alias=False)

        like = self.init if self._like is None else self._like
        return params, jax.tree.map(
            put, state, jax.tree.map(lambda x: x.sharding, like)
        )

    def jitted(
        self, jit: Any, step: Any, *, donate: bool = True, **options: Any
    ) -> Any:
        """The step, with what was drawn for it."""
        program = self.program
        # JAX traces no call of a function that has options (on 0.10).
        quick = {} if program.drawn.called == "after make_jaxpr" else quick_options()
        options = {"compiler_options": quick} | options
        if donate and program.donates:
            options["donate_argnums"] = program.donates
        if program.drawn.out_shardings:
            given = dict(zip(("params", "state"), self.start(0.0, 0), strict=True))
            shardings = [
                jax.tree.map(lambda x: x.sharding, given.get(name))
                for name in program.takes
                if name != "ref"
            ]
            options["out_shardings"] = tuple(shardings)
        return jit(step, **options)

    def run(self, jitted: Any, noise: float = 0.0, number: int = 0) -> list[Record]:
        """Some steps, one after the other."""
        program, given = self.program, self.arguments(noise, number)
        records = []
        some = [given[name] for name in program.takes]
        if program.drawn.called == "compiled":
            jitted = jitted.lower(*some).compile()
        elif program.drawn.called == "after make_jaxpr" and self._offloaded:
            jax.make_jaxpr(jitted)(*some)
            jax.eval_shape(jitted, *some)
        for _ in range(STEPS):
            program.calls.values.clear()
            args = [given[name] for name in program.takes]
            results = jitted(*args)
            jax.block_until_ready(results)
            jax.effects_barrier()
            read = results
            if "ref" in program.takes:
                read = (*results, given["ref"][...])
            records.append(_record(args, read, program.calls))
            names = [name for name in program.takes if name != "ref"]
            found = dict(zip(names, results, strict=True))
            given |= {name: found[name] for name in ("params", "state")}
        return records

    def arguments(self, noise: float = 0.0, number: int = 0) -> dict[str, Any]:
        """What a step takes, by name."""
        params, state = self.start(noise, number)
        given = {"params": params, "state": state, "batch": self.program.placed_batch()}
        if "ref" in self.program.takes:
            given["ref"] = jax.new_ref(jnp.zeros(()))
        return given


def _on_host(x: Any) -> bool:
    return x.sharding.memory_kind != "device"


class _Plain:
    """The plain step's records, and how far they can be trusted."""

    def __init__(self, program: Program, like: Any):
        self.steps = _Steps(program, offloaded=False, like=like)
        step = program.step(self.steps.tx)
        self._jitted = self.steps.jitted(jax.jit, step)
        self.records = self.steps.run(self._jitted)
        self.noise = NOISE_OF_CODECS if program.drawn.codec else NOISE

    @functools.cached_property
    def perturbed(self) -> list[list[Record]]:
        """From parameters a little different."""
        return [self.steps.run(self._jitted, self.noise, n) for n in range(PERTURBED)]

    @functools.cached_property
    def others(self) -> list[list[Record]]:
        """Compiled in other ways."""
        apart = self.steps.program.step(self.steps.tx, apart=True)
        step = self.steps.program.step(self.steps.tx)
        found = [
            self.steps.jitted(jax.jit, apart),
            self.steps.jitted(jax.jit, step, compiler_options=_precise()),
            self.steps.jitted(jax.jit, step, compiler_options={}),
        ]
        return [*self.perturbed, *map(self.steps.run, found)]


def _record(args: Sequence[Any], results: Any, calls: Calls) -> Record:
    leaves, structure = jax.tree_util.tree_flatten_with_path(results)
    named, _ = jax.tree_util.tree_flatten_with_path(args)
    return Record(
        [_leaf(keys, x) for keys, x in leaves],
        structure,
        [
            (jax.tree_util.keystr(keys), x.is_deleted(), _on_host(x))
            for keys, x in named
            if isinstance(x, jax.Array) and type(x).__name__ == "ArrayImpl"
        ],
        {tag: sorted(values) for tag, values in calls.values.items()},
    )


def _leaf(keys: Any, x: Any) -> Leaf:
    dtype, kind = x.dtype, x.sharding.memory_kind
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    value = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        value = value.astype(np.float64)
    return Leaf(jax.tree_util.keystr(keys), value, dtype, kind)


def _compare(steps: _Steps, plain: _Plain, mode: str) -> Outcome:
    """Ours in one mode."""
    program = steps.program
    drawn = dataclasses.replace(program.drawn, modes=(mode,))
    try:
        _check_init(steps, plain.steps)
        jitted, scheduled = _in_mode(steps, mode)
        got = steps.run(jitted)
        for ours, theirs in zip(got, plain.records, strict=True):
            _check_form(program, ours, theirs, steps.init)
            _check_donated(program, _donated(program, mode), ours, theirs)
        try:
            _check_numbers(program, got, plain)
        except _FailedError:
            # A compiler may leave out roundings to few bits, and chooses where anew in
            # each program: what is wrong is so where it leaves out none, too.
            precise, _ = _in_mode(steps, mode, compiler_options=_precise())
            _check_numbers(program, steps.run(precise), plain)
        given = steps.arguments()
        text = str(scheduled(*(given[name] for name in program.takes)))
        if _says_nothing(program, plain):
            return Outcome(drawn, "chaotic", "noise changes as much as a step")
        if text.startswith("nothing is fused"):
            reasons = re.findall("left outside: (.*)", text)
            asked = mode in ("jit", "False")
            reasons = ["as asked"] if asked else [*reasons, "no scan"]
            return Outcome(drawn, "not fused", reasons[0])
        return Outcome(drawn, "fused")
    except _FailedError as error:
        return Outcome(drawn, "FAILED", str(error))
    except Exception as error:  # Whatever it is, plain JAX does not raise it.
        text = f"{type(error).__name__}: {_first_line(error)}"
        for applies, regex in REFUSALS:
            if applies(drawn) and re.search(regex, str(error)):
                return Outcome(drawn, "refused", text)
        return Outcome(drawn, "FAILED", text)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _in_mode(steps: _Steps, mode: str, **others: Any) -> tuple[Any, Any]:
    """The step as it is run, and what tells what is fused.

    Args:
      steps: The step.
      mode: How ours is asked to run it.
      **others: More arguments for what jits it.
    """
    program, step = steps.program, steps.program.step(steps.tx)
    late_gradients: Any = mode.removeprefix("stream ")
    options: Any = {"late_gradients": late_gradients}
    if late_gradients in ("jit", "unfused"):
        options = {"fuse": False}
    options["residuals"] = program.drawn.residuals
    ours = steps.jitted(functools.partial(oo.jit, **options), step, **others)
    if mode == "jit" or mode.startswith("stream "):
        if mode != "jit":
            step = oo.stream(step, **options)
        donate = bool(_donated(program, mode))
        return steps.jitted(jax.jit, step, donate=donate, **others), ours.schedule
    return ours, ours.schedule


def _donated(program: Program, mode: str) -> Sequence[int]:
    """The arguments that are donated in a mode, by position."""
    by_jax = mode == "jit" or mode.startswith("stream ")
    if by_jax and (program.drawn.order != "params first" or program.donates != (0, 1)):
        return ()  # JAX would pair buffers of two memories: `oo.jit` is for that.
    return program.donates


def _check_init(ours: _Steps, plain: _Steps) -> None:
    """Whether the state is the plain one, where the rules have it."""
    named = jax.tree_util.tree_flatten_with_path(ours.init)[0]
    want = jax.tree.leaves(plain.init)
    exact = ours.program.drawn.wrapped == "inside" and not ours.program.drawn.codec
    for (keys, x), y in zip(named, want, strict=True):
        path = jax.tree_util.keystr(keys)
        nbytes = memory.movable_nbytes(x)
        host = nbytes is not None and nbytes >= 8 and x.ndim > 0
        if exact and x.sharding.memory_kind != ("pinned_host" if host else "device"):
            raise _FailedError(f"init: {path} is in {x.sharding.memory_kind}")
        a, b = _leaf(keys, x), _leaf(keys, y)
        if (a.dtype, a.value.shape) != (b.dtype, b.value.shape):
            raise _FailedError(f"init: {path} is {a.dtype}{a.value.shape}")
        if np.max(_away(a.value, b.value), initial=0) > 0:
            raise _FailedError(f"init: {path} has other values")


def _check_form(program: Program, got: Record, want: Record, init: Any) -> None:
    """Structure, shapes, dtypes, memory kinds, and how often effects ran."""
    if got.structure != want.structure:
        raise _FailedError(f"structure: {got.structure} instead of {want.structure}")
    kinds = {
        jax.tree_util.keystr(keys): x.sharding.memory_kind
        for keys, x in jax.tree_util.tree_flatten_with_path(init)[0]
    }
    at = f"[{program.takes.index('state')}]"
    of_params = [f"[{program.takes.index('params')}]"]
    if program.drawn.results == "old parameters":
        names = [name for name in program.takes if name != "ref"]
        of_params.append(f"[{names.index('batch')}]")
    for x, y in zip(got.leaves, want.leaves, strict=True):
        if (x.dtype, x.value.shape) != (y.dtype, y.value.shape):
            raise _FailedError(f"{x.path}: {x.dtype}{x.value.shape}, plain {y.dtype}")
        is_state = x.path.startswith(at)
        kind = kinds[x.path.removeprefix(at)] if is_state else "device"
        if program.resting and x.path.startswith(tuple(of_params)):
            leaf = re.sub(r"\W+", "/", x.path[3:]).strip("/")
            if re.fullmatch(program.resting, leaf):
                kind = "pinned_host"
        if x.kind != kind:
            raise _FailedError(f"{x.path} is in {x.kind}, not in {kind}")
    if got.calls.keys() != want.calls.keys() or any(
        len(got.calls[tag]) != len(values) for tag, values in want.calls.items()
    ):
        counts = [{t: len(v) for t, v in x.calls.items()} for x in (got, want)]
        raise _FailedError(f"effects ran {counts[0]} times, plain {counts[1]}")


def _check_donated(
    program: Program, donates: Sequence[int], got: Record, want: Record
) -> None:
    """What plain deletes is deleted, and nothing that was not donated.

    Plain may have paired it with a result that here is in the other memory: what is on
    the host with a result on the device; or, where nothing says how results are
    sharded, XLA a parameter with state of as many bytes.
    """
    drawn = program.drawn
    by_bytes = program.mesh is not None and not drawn.out_shardings
    for (path, ours, on_host), (_, plain, _) in zip(
        got.deleted, want.deleted, strict=True
    ):
        donated = any(path.startswith(f"[{i}]") for i in donates)
        if ours and not donated:
            raise _FailedError(f"argument {path} is deleted, and was not donated")
        if plain and donated and not (ours or on_host or by_bytes):
            raise _FailedError(f"argument {path} is not deleted, but plain deletes it")


def _check_numbers(program: Program, got: Sequence[Record], plain: _Plain) -> None:
    """Values of all steps; other ways to compile tell only where noise does not."""
    for n, (ours, theirs) in enumerate(zip(got, plain.records, strict=True)):
        try:
            _check_values(program, n, ours, theirs, [p[n] for p in plain.perturbed])
        except _FailedError:
            _check_values(program, n, ours, theirs, [p[n] for p in plain.others])


def _check_values(
    program: Program, n: int, got: Record, want: Record, noisy: Iterable[Record]
) -> None:
    """Values, as far as noise allows."""
    others = list(noisy)
    # A difference of parameters is as exact as these are.
    names = [name for name in program.takes if name != "ref"]
    at, result = (f"[{names.index(name)}]" for name in ("params", "batch"))
    sizes = {
        result + x.path.removeprefix(at): float(np.max(np.abs(x.value), initial=0))
        for x in want.leaves
        if program.drawn.results == "difference of parameters" and x.path.startswith(at)
    }
    for i, (x, y) in enumerate(zip(got.leaves, want.leaves, strict=True)):
        noise = [o.leaves[i] for o in others]
        near, most = _allowed(y, noise, sizes.get(x.path, 0.0))
        away = _away(x.value, y.value)
        # Noise may make no numbers of what is equal: then it allows nothing.
        apart = away != 0
        over = int(np.sum(apart & ~(away <= near)))
        if over > max(SHARE * away.size, 1) or np.any(apart & ~(away <= most)):
            raise _FailedError(
                f"step {n}: {x.path} is {np.max(away):.3g} away in {over} of "
                f"{away.size} values; {np.median(near):.3g} is allowed"
            )
    for tag, values in want.calls.items():
        changed = max(np.max(_away(o.calls[tag], values)) for o in others)
        scale = np.max(np.abs(values), initial=0)
        if np.any(_away(got.calls[tag], values) > MULTIPLE * changed + 1e-5 * scale):
            raise _FailedError(
                f"step {n}: effect {tag} with {got.calls[tag]}: {values}"
            )


def _away(x: Any, y: Any) -> np.ndarray:
    """How far values are away; what is equal, or no number in both, is not."""
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype == np.bool_:
        return (x != y).astype(np.float64)
    x, y = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        away = np.abs(x - y)
    return np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, away)


def _allowed(
    want: Leaf, noisy: Sequence[Leaf], size: float
) -> tuple[np.ndarray, float]:
    """How far each value may be away as a rule, and any of them.

    Args:
      want: The values.
      noisy: The same with noise.
      size: That of the largest number that they are made of.
    """
    if not want.value.size:
        return np.zeros_like(want.value), 0.0
    changed = np.max([_away(x.value, want.value) for x in noisy], axis=0)
    usual = np.percentile(np.nan_to_num(changed, nan=np.inf), 90)
    units = np.zeros_like(changed)
    if jnp.issubdtype(want.dtype, jnp.floating):
        finite = np.abs(np.where(np.isfinite(want.value), want.value, 0))
        eps = float(jnp.finfo(want.dtype).eps)
        # A number in few bits is rounded once, as it is stored, whatever else is done.
        units = eps * finite if eps > 1e-4 else ULPS * eps * np.max(finite)
        units = np.maximum(units, ULPS * eps * size)
        units = np.maximum(units, 1e-37)
    near = MULTIPLE * (changed + usual) + units
    return near, float(MULTIPLE * np.max(changed) + np.max(units))


def _says_nothing(program: Program, plain: _Plain) -> bool:
    """Whether noise allows about all that the first step changes of a parameter."""
    at = f"[{program.takes.index('params')}]"
    noise = plain.noise

    def moves(record: Record, size: float, number: int) -> dict[str, np.ndarray]:
        before = jax.tree_util.tree_flatten_with_path(program.params(size, number))[0]
        values = {f"{at}{jax.tree_util.keystr(k)}": x for k, x in before}
        return {
            x.path: x.value - np.asarray(values[x.path]).astype(np.float64)
            for x in record.leaves
            if x.path in values
        }

    want = moves(plain.records[0], 0.0, 0)
    noisy = [moves(p[0], noise, n) for n, p in enumerate(plain.perturbed)]
    for x in plain.records[0].leaves:
        if x.path in want and x.value.size:
            changed = np.max([_away(m[x.path], want[x.path]) for m in noisy], axis=0)
            moved = np.max(np.abs(want[x.path]))
            units = ULPS * float(jnp.finfo(x.dtype).eps) * np.max(np.abs(x.value))
            if not MULTIPLE * np.median(changed) <= max(moved / 2, units):
                return True
    return False


def shrink(outcome: Outcome) -> Iterator[Outcome]:
    """Simpler programs that fail too, each simpler than the one before."""
    simplest = Drawn()
    current = outcome
    for field in dataclasses.fields(Drawn):
        if field.name in ("seed", "modes"):
            continue
        default = getattr(simplest, field.name)
        if getattr(current.drawn, field.name) == default:
            continue
        simpler = dataclasses.replace(current.drawn, **{field.name: default})
        try:
            (found,) = run(simpler)
        except Exception:  # Not a program that can be drawn.
            continue
        if found.kind == "FAILED":
            current = found
            yield current

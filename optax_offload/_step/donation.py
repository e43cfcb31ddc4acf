"""Donated arguments and the results that are written into them, in one kind of memory.

`jax.jit` pairs them by shape and dtype alone, in their order, wherever the sharding of
one argument or one result is not given (`_set_up_aliases` in JAX's
`jax/_src/interpreters/mlir.py`: "For jit's where out_shardings is not specified, we
don't know the memory kind so don't condition the logic based on the memory kind"; the
same in JAX 0.10.2 and 0.12.0.1). A host buffer is then the place of a device result:
the CPU client ends the process, and on a GPU the result silently is in host memory.

When the function's body is lowered, all is known: what is donated, and the kind of each
argument and result. Both, and JAX's pairs, are attributes of the program's main
function. So the step begins with one more equation, `pair_donations`, which is nothing
in the program: lowering it looks at the pairs, and where one is of two kinds makes all
anew.
A program that needs none of this is the one that `jax.jit` makes, letter for letter,
and calls cost nothing, as they would if leaves were put into another order for JAX.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from optax_offload._ground import compat, trees
from optax_offload._ground.errors import warn
from optax_offload._ground.units import size_text
from optax_offload._places import memory
from optax_offload._schedule import FusedStep

_ALIAS = "tf.aliasing_output"  # This argument's buffer is that result's.
_DONOR = "jax.buffer_donor"  # This argument's buffer may be any result's; XLA chooses.
_KIND = "mhlo.memory_kind"
_SHARDING = ("sdy.sharding", "mhlo.sharding")


def pair(args: Any, traced: jax.stages.Traced, plan: FusedStep) -> Any:
    """The arguments of a call; when they are lowered, those donated are paired anew.

    First of all, since what the function does may look at the pairs (`check_pairs`).

    Args:
      args: Positional and keyword arguments of the call, as they are being traced.
      traced: The same call.
      plan: The plan of its step.
    """
    # What is not traced is static.
    leaves = [x for x in jax.tree.leaves(args) if isinstance(x, jax.core.Tracer)]
    infos = jax.tree.leaves(traced.args_info)
    used = compat.used_inputs(traced)
    found = [
        (x, info.donated) for x, info, u in zip(leaves, infos, used, strict=True) if u
    ]
    invars = plan.step.program.invars[: len(leaves)]
    planned = {
        id(x): v in plan.step.planned for x, v in zip(leaves, invars, strict=True)
    }
    if not any(donated for _, donated in found):
        return args
    # JAX's own pairs say which keys are donated. Any argument will do besides that is
    # read, or the equation would be dropped.
    numbers = [x for x in found if memory.movable_nbytes(x[0]) is not None]
    of_donated = [x for x, donated in numbers if donated]
    operands = of_donated or [x for x, _ in (numbers or found)[:1]]
    first = _pair_donations.bind(
        *operands,
        donated=bool(of_donated),
        planned=tuple(planned[id(x)] for x in operands),
    )
    if (
        not numbers
    ):  # Nothing was drawn from it, whatever `debug_key_reuse` takes it for.
        first = jax.random.clone(first)
    return jax.tree.map(lambda x: first if x is operands[0] else x, args)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An argument or a result of a program.

    Attributes:
      position: Among the program's arguments, or its results.
      type: Its shape and dtype.
      size: The number of its elements.
      kind: Its memory kind.
      sharding: Its sharding over the program's devices; None where XLA decides.
    """

    position: int
    type: Hashable
    size: int
    kind: str
    sharding: Hashable = None


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of donated arguments and results.

    Attributes:
      aliases: The result that is written into an argument, by position.
      donors: Arguments that XLA finds a result for; it looks at memory kinds.
      unusable: Arguments that no result of their kind can use.
    """

    aliases: Mapping[int, int]
    donors: frozenset[int]
    unusable: frozenset[int]


def pairs_by_kind(
    donated: Iterable[Buffer], results: Iterable[Buffer], partitioned: bool
) -> Pairs:
    """Pairs as JAX does (in their order, by shape and dtype), within a memory kind.

    Args:
      donated: the donated arguments.
      results: the results that are not taken by others.
      partitioned: whether the program runs on several devices. Then, as with JAX, only
        results whose sharding is given can be paired here; XLA pairs the others.
    """

    def key(buffer: Buffer) -> Hashable:
        return buffer.type, buffer.kind, buffer.sharding if partitioned else None

    free = list(results)
    waiting: dict[Hashable, collections.deque[Buffer]] = collections.defaultdict(
        collections.deque
    )
    for result in free:
        if result.sharding is not None or not partitioned:
            waiting[key(result)].append(result)
    aliases: dict[int, int] = {}
    rest: list[Buffer] = []
    for argument in donated:
        same = waiting[key(argument)]
        if same:
            result = same.popleft()
            aliases[argument.position] = result.position
            free.remove(result)
        else:
            rest.append(argument)
    donors = set()
    for argument in rest:
        fitting = [
            result
            for result in free
            if result.kind == argument.kind
            and (result.size == argument.size or partitioned)
        ]
        if fitting:
            free.remove(fitting[0])
            donors.add(argument.position)
    unusable = {argument.position for argument in rest} - donors
    return Pairs(aliases, frozenset(donors), frozenset(unusable))


def _pair_in(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    donated: bool,
    planned: tuple[bool, ...],
) -> list[Any]:
    """Lowers `pair_donations`: to nothing, but for the main function's attributes."""
    module = ctx.module_context.module
    main: Any = ctx.module_context.symbol_table["main"]
    attributes = [_named(a) for a in main.arg_attrs]
    kinds = {
        _position(main, value): memory.kind_of_type(aval)
        for value, aval in zip(operands, ctx.avals_in, strict=True)
        if donated
    }
    arguments = [
        dataclasses.replace(buffer, kind=_kind(attributes[i], kinds.get(i, "device")))
        for i, buffer in enumerate(_buffers(main.type.inputs, attributes))
    ]
    results = _buffers(main.type.results, [_named(a) for a in main.result_attrs])
    given = {
        i: ir.IntegerAttr(a[_ALIAS]).value
        for i, a in enumerate(attributes)
        if _ALIAS in a
    }
    crossing = [i for i, j in given.items() if arguments[i].kind != results[j].kind]
    if not crossing:
        return [operands[0]]
    keys = set(crossing).difference(kinds)
    kinds |= {i: arguments[i].kind for i in keys}
    taken = {j for i, j in given.items() if i not in kinds}
    # State that should be on the host comes last. Its update tells of it, and what to
    # do: a warning that it is not donated would come before that error.
    misplaced = {
        _position(main, x)
        for x, is_planned in zip(operands, planned, strict=True)
        if is_planned
    }
    misplaced = {i for i in misplaced if arguments[i].kind == "device"}
    order = [*sorted(kinds.keys() - misplaced), *sorted(kinds.keys() & misplaced)]
    pairs = pairs_by_kind(
        [arguments[i] for i in order],
        [r for r in results if r.position not in taken],
        _partitions(module) > 1,
    )
    said = [attributes[i] for i in sorted(kinds)]
    unusable = pairs.unusable - misplaced
    _warn_of_unusable(unusable, said, arguments, bool(keys & unusable))
    for i in kinds:
        attributes[i].pop(_ALIAS, None)
        attributes[i].pop(_DONOR, None)
        if i in pairs.aliases:
            i32 = ir.IntegerType.get_signless(32)
            attributes[i][_ALIAS] = ir.IntegerAttr.get(i32, pairs.aliases[i])
        elif i in pairs.donors:
            attributes[i][_DONOR] = ir.BoolAttr.get(True)
    main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in attributes])
    return [operands[0]]


def _warn_of_unusable(
    unusable: Collection[int],
    attributes: Sequence[Mapping[str, Any]],
    arguments: Sequence[Buffer],
    keys: bool,
) -> None:
    """Warns as JAX does, of those that it has not warned of; keys among them or not."""
    warned = sum(_ALIAS not in a and _DONOR not in a for a in attributes)
    if len(unusable) > warned:
        shown = ", ".join(
            f"{arguments[i].type} in {arguments[i].kind}" for i in sorted(unusable)
        )
        warnings.warn(
            f"Some donated buffers were not usable: {shown}. No result of their size "
            "is left in their memory. Do not donate them, or return what takes their "
            "place"
            + keys
            * (
                ". New random keys are on the device, as JAX types keys wherever they "
                "are: keep keys there, optax_offload.set_memory_kind(keys, '.*', "
                "'device')"
            ),
            stacklevel=2,
        )


def _position(main: Any, value: Any) -> int:
    """Returns the position of a value among the main function's arguments."""
    argument = ir.BlockArgument(value)
    assert argument.owner == main.entry_block
    return argument.arg_number


def _named(attributes: Any) -> dict[str, Any]:
    return {a.name: a.attr for a in ir.DictAttr(attributes)}


def _kind(attributes: Mapping[str, Any], otherwise: str) -> str:
    kind = attributes.get(_KIND)
    return otherwise if kind is None else ir.StringAttr(kind).value


def _buffers(
    types: Iterable[Any], attributes: Iterable[Mapping[str, Any]]
) -> list[Buffer]:
    found = []
    for i, (type_, named) in enumerate(zip(types, attributes, strict=True)):
        ranked = isinstance(type_, ir.RankedTensorType)
        shape = tuple(ir.RankedTensorType(type_).shape) if ranked else ()
        sharding = next((str(named[k]) for k in _SHARDING if k in named), None)
        kind = _kind(named, "device")
        found.append(Buffer(i, str(type_), math.prod(shape), kind, sharding))
    return found


def _partitions(module: Any) -> int:
    return ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value


_pair_donations = jex.Primitive("pair_donations")
_pair_donations.def_impl(lambda *operands, **_: operands[0])
_pair_donations.def_abstract_eval(lambda *operands, **_: operands[0])
# Lowered where it is, not in a function of its own that JAX would use again.
mlir.register_lowering(_pair_donations, _pair_in, cacheable=False)


def places(traced: jax.stages.Traced) -> dict[int, int]:
    """The donated argument in whose place each result is, both as positions.

    A result, or a member of it, or of a tuple in it, is in the place of an argument
    that is a tree like it. Of several that are, it is that of its own position, or the
    first, and one in a tuple comes last. What became of Flax' objects is in a tuple.
    """
    out = traced.out_info
    results = _members(out, 0)
    if isinstance(out, (tuple, list)):
        results |= _members(out, 1)
        inside = {i for i, x in enumerate(out) if type(x) in (tuple, list)}
        members = _members(out, 2).items()
        results |= {k: x for k, x in members if getattr(k[0], "idx", None) in inside}
    found: dict[int, int] = {}
    for key, (tree, positions, donated) in _members(traced.args_info, 2).items():
        like = [k for k, (other, *_) in results.items() if other == tree]
        if not (donated and like):
            continue
        taken = min(like, key=lambda k: (len(k) > 1, k[-1:] != key[1:]))
        found |= dict(zip(results[taken][1], positions, strict=True))
        del results[taken]
    return found


def _members(tree: Any, depth: int) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """For each member its leaves, their positions, and whether all are donated."""
    found: dict[tuple[Any, ...], list[tuple[int, Any, Any]]] = {}
    for i, (keys, x) in enumerate(trees.flatten_with_path(tree)[0]):
        found.setdefault(keys[:depth], []).append((i, keys[depth:], x))
    return {
        key: (
            [(rest, x.shape, x.dtype) for _, rest, x in some],
            [i for i, *_ in some],
            all(getattr(x, "donated", False) for *_, x in some),
        )
        for key, some in found.items()
    }


def check_returned(traced: jax.stages.Traced, plan: FusedStep) -> None:
    """Raises where a donated argument that scans take rows of finds no result there.

    Its successor would be on the device, where it may have no room.
    """
    rest, jaxpr = plan.step.at_rest, plan.step.jaxpr
    if rest is None:
        return
    infos = trees.leaves_with_paths(traced.args_info)
    donated = {x.position: x for x in rest.arguments if infos[x.position][1].donated}
    left = collections.Counter(
        _form(a) for a in jaxpr.outvars if memory.on_host(a.aval)
    )
    left.subtract(_form(jaxpr.invars[i]) for i in donated)
    lost = [
        infos[i][0].split("/", 1)[1]
        for i, x in donated.items()
        if x.scans and not x.returns and left[_form(jaxpr.invars[i])] < 0
    ]
    if lost:
        raise ValueError(
            "donated arguments rest on the host, and no result replaces them there: "
            f"{trees.listed(lost)}. A result replaces an argument if it is that "
            "argument plus something, of the same shape and dtype. Move another result "
            "there in the function (oo.set_memory_kind(result, '.*', 'pinned_host')), "
            "or do not donate them"
        )


def asked_for(options: Mapping[str, Any]) -> bool:
    """Returns whether a function is jitted with arguments to donate."""
    given = (options.get("donate_argnums"), options.get("donate_argnames"))
    return any(isinstance(x, int) or x for x in given)  # The first is number 0.


def warn_if_none(
    traced: jax.stages.Traced, plan: FusedStep, options: Mapping[str, Any]
) -> bool:
    """Warns of a step that returns new state on the host and donates nothing.

    An empty ``donate_argnums`` says that nothing should be. State that should be on the
    host and is not comes first: its error, or the warning that it is moved.

    Args:
      traced: A call.
      plan: The plan of its step.
      options: The arguments that `jax.jit` is given.

    Returns:
      Whether it warned.
    """
    donates = any(k.startswith("donate") for k in options)
    kept = [v.aval for v in plan.step.planned]
    results = [a.aval for a in plan.step.jaxpr.outvars]
    right = kept and not plan.step.misplaced
    if donates or not right or not any(map(memory.on_host, results)):
        return False
    where = "donate_argnums=..."
    if not any(k.startswith("static") for k in options):
        where = f"donate_argnums={_replaced(traced, plan)}"
    size = size_text(sum(map(memory.nbytes_on_each_device, kept)))
    warn(
        "the step returns new state and donates nothing, so that old and new state are "
        f"in memory at once, {size} of the host for each device. Jit it with "
        f"optax_offload.jit(step, {where}), or with donate_argnums=() if you need the "
        "old state after it"
    )
    return True


def _replaced(traced: jax.stages.Traced, plan: FusedStep) -> tuple[int, ...]:
    """The positional arguments that results replace, by shape, dtype and memory."""
    jaxpr = plan.step.jaxpr
    left = collections.Counter(
        (_form(a), memory.on_host(a.aval)) for a in jaxpr.outvars
    )
    forms: dict[int, collections.Counter[Any]] = {}
    paths = [path for path, _ in trees.leaves_with_paths(traced.args_info)]
    for path, v in zip(paths, jaxpr.invars, strict=False):
        positional, position, *_ = path.split("/")
        if positional == "0":
            of_argument = forms.setdefault(int(position), collections.Counter())
            of_argument[_form(v), memory.on_host(v.aval)] += 1
    found: list[int] = []
    for position, needed in forms.items():
        if needed <= left:
            found.append(position)
            left -= needed
    return tuple(found)


def _form(a: Any) -> tuple[object, ...]:
    return a.aval.shape, a.aval.dtype

"""The transfers of a compiled program between device and host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax

from optax_offload.aot import _hlo
from optax_offload.aot._dataflow import accesses, touches_no_data, trip_count

Direction = Literal["load", "store", "host copy"]
_SLICES = ("dynamic-slice", "dynamic-update-slice", "slice")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A transfer in the text of a compiled program; in a loop it runs many times.

    Attributes:
      name: The instruction that does it, or that starts it.
      op_name: The operation of the traced program that it comes from, such as
        `"jit(step)/while/body/device_put"`; else the instruction's name.
      direction: `"load"` from host to device memory, `"store"` from device to host
        memory, or `"host copy"` within host memory.
      dtype: The dtype of the array in host memory, such as `"float32"`.
      shape: The shape on one device of the array in host memory, of which a part or
        all is moved.
      nbytes: The bytes that are moved each time, on each device.
      times: The number of runs in one run of the program: the trip counts of the loops
        around it, multiplied.
      times_known: Whether the text tells that. It does not where a loop's trip count is
        not in it (then the loop is counted once), and in a branch of a conditional
        (which is counted as if it were taken).
      loops: The `while` instructions around it, from the outermost to the innermost.
      form: The operation that moves: `"copy"`, `"slice"`, `"dynamic-slice"`,
        `"dynamic-update-slice"`, the target of a custom call, or `"fusion"` where the
        device computes on host memory itself.
      by: `"copy engine"`, beside which the device computes, or `"kernel"`, which the
        device's own processors carry out.
      asynchronous: Whether it has a start and a done, between which others run.
    """

    name: str
    op_name: str
    direction: Direction
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    times: int
    times_known: bool
    loops: tuple[str, ...]
    form: str
    by: Literal["copy engine", "kernel"]
    asynchronous: bool

    @property
    def total_bytes(self) -> int:
        """The bytes that all its runs move, on each device."""
        return self.nbytes * self.times

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        times = f"{'' if self.times_known else 'assumed '}{self.times} times"
        return (
            f"{self.direction} {self.nbytes} B of {self.dtype}[{size}], {times}, by "
            f"{self.by} ({self.form})"
        )


def transfers(compiled: jax.stages.Compiled) -> tuple[Transfer, ...]:
    """Lists the transfers of a compiled program between device and host memory.

    On a TPU copy engines do all of it, unless a fusion reads or writes host memory. On
    a GPU they copy whole arrays, and contiguous slices whose position is a linear
    function of the counter of a loop of known trip count. Any other slice is a kernel
    that reaches into pinned memory with the multiprocessors, beside which nothing else
    computes.

    Args:
      compiled: A program, of `aot.compile` or of JAX itself.

    Returns:
      The transfers in the order of the schedule, one for each array in host memory that
      an instruction reads or writes. Of a conditional, those of all branches.

    Raises:
      ValueError: The program's text is not that of a scheduled program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_offload import aot
      >>> target = aot.Target("h100")
      >>> host = jax.NamedSharding(target.mesh(), jax.P(), memory_kind="pinned_host")
      >>> x = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=host)
      >>> load = lambda x: jax.device_put(x, jax.memory.Space.Device) * 2
      >>> compiled = aot.compile(load, x, target=target)  # doctest: +SKIP
      >>> print(*aot.transfers(compiled))  # doctest: +SKIP
      load 1048576 B of float32[256x1024], 1 times, by copy engine (copy)
    """
    module = _hlo.parse(compiled.as_text() or "")
    return tuple(_walk(module, module.entry, _Scope()))


def host_computations(compiled: jax.stages.Compiled) -> tuple[str, ...]:
    """Lists the operations that a compiled program computes on the host.

    A compiler turns every operation on a value in host memory, other than moving it,
    into host computation, which is slow and hardly ever meant. A GPU's compiler logs
    that, and a TPU's is silent.

    Args:
      compiled: A program, of `aot.compile` or of JAX itself.

    Returns:
      The operations' names (`op_name` in the program's text), without repetitions.

    Raises:
      ValueError: The program's text is not that of a scheduled program.
    """
    module = _hlo.parse(compiled.as_text() or "")
    found = (i for c in module.computations.values() for i in c if i.computes_on_host)
    return tuple(dict.fromkeys(i.op_name for i in found))


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The loops around an instruction. See `Transfer`."""

    loops: tuple[str, ...] = ()
    times: int = 1
    times_known: bool = True


def _walk(
    module: _hlo.Module, computation: _hlo.Computation, scope: _Scope
) -> Iterator[Transfer]:
    for i in computation:
        if i.opcode == "while" and (body := module.called(i, "body")):
            trips = trip_count(module, computation, i)
            inner = _Scope(
                loops=(*scope.loops, i.name),
                times=scope.times * (1 if trips is None else trips),
                times_known=scope.times_known and trips is not None,
            )
            yield from _walk(module, body, inner)
        elif i.opcode == "conditional":
            inner = dataclasses.replace(scope, times_known=False)
            for name in i.branches:
                yield from _walk(module, module.computations[name], inner)
        elif i.opcode == "call" and (to := module.called(i, "to_apply")):
            yield from _walk(module, to, scope)
        else:
            for transfer in instruction_transfers(module, computation, i):
                yield dataclasses.replace(transfer, **vars(scope))


def instruction_transfers(
    module: _hlo.Module, computation: _hlo.Computation, i: _hlo.Instruction
) -> tuple[Transfer, ...]:
    """The transfers of one instruction, or of what its `-start` begins, once."""
    if touches_no_data(i) or i.ends:
        return ()
    form = _form(module, i)
    by = "kernel" if _is_kernel(module, i, form) else "copy engine"

    def moved(direction: Direction, array: _hlo.Array, nbytes: int) -> Transfer:
        return Transfer(
            name=i.name,
            op_name=i.op_name,
            direction=direction,
            dtype=array.numpy_dtype,
            shape=array.dimensions,
            nbytes=nbytes,
            times=1,
            times_known=True,
            loops=(),
            form=form,
            by=by,
            asynchronous=i.starts,
        )

    if i.moves_with_host:
        array = max(i.arrays, key=lambda a: a.nbytes)
        direction = "load" if i.opcode == "recv" else "store"
        return (moved(direction, array, array.nbytes),)
    reads, writes = accesses(module, computation, i)
    loaded = [(a, n) for a, n in reads if a.on_host and n]
    stored = [(a, n) for a, n in writes if a.on_host and n]
    same = sum(n for _, n in loaded) == sum(n for _, n in stored)
    if loaded and same and form != "fusion":
        return tuple(moved("host copy", a, n) for a, n in stored)
    return tuple(moved("load", a, n) for a, n in loaded) + tuple(
        moved("store", a, n) for a, n in stored
    )


def _form(module: _hlo.Module, i: _hlo.Instruction) -> str:
    inner = module.called(i)
    if inner is None:
        return i.named("custom_call_target") or i.opcode.removesuffix("-start")
    work = _work(inner)
    if not work:
        return "copy"
    return work[0].opcode if _is_slice(work) else "fusion"


def _is_kernel(module: _hlo.Module, i: _hlo.Instruction, form: str) -> bool:
    if form == "fusion":
        return True
    inner = module.called(i)
    if inner is None or not i.opcode.startswith("fusion"):
        return False
    # A GPU's slice in a fusion is given to a copy engine if the compiler noted how its
    # position follows from a loop's counter; one at a constant position always is.
    work = _work(inner)
    dynamic = bool(work) and work[0].opcode.startswith("dynamic")
    return dynamic and not work[0].copies_by_engine


def _work(inner: _hlo.Computation) -> list[_hlo.Instruction]:
    """The instructions of a computation beside copies, as JAX 0.10 adds to a slice."""
    return [i for i in inner if not touches_no_data(i) and i.opcode != "copy"]


def _is_slice(work: list[_hlo.Instruction]) -> bool:
    return len(work) == 1 and work[0].opcode in _SLICES

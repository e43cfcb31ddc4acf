"""The update on the host's own processor, inside the step: what compilers make of it.

Two forms of Adam under `compute_on("device_host")`, beside what `offload` compiles to,
for chips that need not be here. Neither form is in the library; why, and what the
figures mean, is in docs/how-it-works.md.

- "leaf": each leaf's update is one host computation. The next leaf's gradient waits, on
  the device, for the update of the one before.
- "rows": a loop over blocks of rows; the host computation reads and writes its rows of
  the state, which it is given whole.

Run:
    python -m benchmarks.memory.host_update
    python -m benchmarks.memory.host_update --workloads=stacked --targets=h100
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax import lax
from jax.experimental import compute_on
from jax.experimental.layout import Layout, with_layout_constraint

from benchmarks.common.steps import OURS, Mode, compile_step
from benchmarks.common.workloads import USUAL_WORKLOADS, WORKLOADS
from optax_offload import aot
from optax_offload._units import MIB
from optax_offload.aot import _hlo
from optax_offload.aot._dataflow import accesses, trip_count

FLAGS = flags.FLAGS

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SMALL_BYTES = 64 * 1024
BLOCKS = 8
_ON: Any = functools.partial(  # Until JAX 0.11 it has another name.
    getattr(compute_on, "compute_on2", None) or compute_on.compute_on,
    compute_type="device_host",
    out_memory_spaces=(DEVICE, HOST, HOST),
)


class Moments(NamedTuple):
    """Adam's state."""

    mu: Any
    nu: Any


def adam(g: Any, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
    """An update of Adam's, without the correction of its first steps."""
    mu = 0.9 * mu + 0.1 * g
    nu = 0.999 * nu + 0.001 * g * g
    return -1e-3 * mu / (jnp.sqrt(nu) + 1e-8), mu, nu


def to_host(g: jax.Array) -> jax.Array:
    """A gradient in host memory; a GPU's compiler fails unless its layout is named."""
    return jax.device_put(with_layout_constraint(g, Layout(tuple(range(g.ndim)))), HOST)


def leaf(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[Any, Any, Any]:
    """The update of a leaf as one host computation."""
    return _ON(adam)(to_host(g), mu, nu)


def rows(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[Any, Any, Any]:
    """The update of a leaf by blocks of rows, each a host computation."""
    blocks = g.shape[0] if g.ndim > 2 else BLOCKS
    size = g.shape[0] // blocks

    def cut(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * size, size)

    def paste(x: jax.Array, row: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, row, i * size, 0)

    def on_host(g: Any, mu: Any, nu: Any, i: Any) -> tuple[Any, Any, Any]:
        u, new_mu, new_nu = adam(g, cut(mu, i), cut(nu, i))
        return u, paste(mu, new_mu, i), paste(nu, new_nu, i)

    def body(i: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        u, mu, nu = carry
        position = jax.device_put(i, HOST)
        new, mu, nu = _ON(on_host)(to_host(cut(g, i)), mu, nu, position)
        return paste(u, new, i), mu, nu

    return lax.fori_loop(0, blocks, body, (jnp.zeros_like(g), mu, nu))


def on_host(
    update_leaf: Callable[..., tuple[Any, Any, Any]], inner: Any
) -> optax.GradientTransformation:
    """Adam with its moments in host memory, updated there, a leaf after the other."""
    del inner  # It is Adam.

    def init(params: Any) -> Moments:
        def zeros(p: jax.Array) -> jax.Array:
            return jax.device_put(jnp.zeros_like(p), HOST if is_large(p) else DEVICE)

        return Moments(jax.tree.map(zeros, params), jax.tree.map(zeros, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        done, results = None, []
        for g, mu, nu in zip(
            leaves, jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), strict=True
        ):
            if not is_large(g):
                results.append(adam(g, mu, nu))
                continue
            if done is not None:
                g, _ = lax.optimization_barrier((g, done))
            results.append(update_leaf(g, mu, nu))
            done = results[-1][0]
        u, mu, nu = (structure.unflatten(r) for r in zip(*results, strict=True))
        return u, Moments(mu, nu)

    return optax.GradientTransformation(init, update)


def is_large(x: Any) -> bool:
    """Whether a leaf's moments are in host memory."""
    return x.size * x.dtype.itemsize >= SMALL_BYTES


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a program moves, in bytes on each device.

    Attributes:
      down: From device to host memory.
      up: From host to device memory.
      within_host: From host to host memory, by an instruction of the device.
    """

    down: int
    up: int
    within_host: int


def traffic(compiled: jax.stages.Compiled) -> Traffic:
    """What a program moves, with what its host computations read and return.

    `aot.transfers` counts what a host computation reads in host memory as loaded.
    """
    found = [t for t in aot.transfers(compiled) if t.form != "HostExecute"]
    sums = {
        way: sum(t.total_bytes for t in found if t.direction == way)
        for way in ("store", "load", "host copy")
    }
    module = _hlo.parse(compiled.as_text() or "")
    down, up = map(sum, zip(*_of_host(module, module.entry, 1), (0, 0), strict=True))
    return Traffic(sums["store"] + down, sums["load"] + up, sums["host copy"])


def _of_host(module: Any, computation: Any, times: int) -> Iterator[tuple[int, int]]:
    """What host computations take from device memory, and return to it."""
    for i in computation:
        if i.opcode == "while" and (body := module.called(i, "body")):
            trips = trip_count(module, computation, i) or 1
            yield from _of_host(module, body, times * trips)
        elif i.named("custom_call_target") == "HostExecute":
            reads, writes = accesses(module, computation, i)
            yield (
                times * sum(n for a, n in reads if not a.on_host),
                times * sum(n for a, n in writes if not a.on_host),
            )


FORMS = {
    "offload": Mode(OURS),
    "leaf": Mode(functools.partial(on_host, leaf)),
    "rows": Mode(functools.partial(on_host, rows)),
}


def main(argv: Sequence[str]) -> None:
    """Compiles each workload in each form, and prints a row for each."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    print(f"JAX {jax.__version__}, MiB on each device; Adam, nothing clipped")
    heads = ("peak", "host state", "host temp", "down", "up", "in host")
    print(f"{'':34s}" + "".join(f"{head:>11s}" for head in heads))
    for name in FLAGS.workloads:
        work = dataclasses.replace(WORKLOADS[name](), optimizer=optax.adam(1e-3))
        for target_name in FLAGS.targets:
            for form in FLAGS.forms:
                compiled = compile_step(work, aot.Target(target_name), FORMS[form])
                peak, moved = aot.peak(compiled), traffic(compiled)
                sizes = (
                    *(peak.peak_bytes, peak.host_argument_bytes),
                    *(peak.host_temporary_bytes, moved.down, moved.up),
                    moved.within_host,
                )
                mib = "".join(f"{size / MIB:11.1f}" for size in sizes)
                print(f"{name:17s} {target_name:9s} {form:7s}{mib}", flush=True)


def define_flags() -> None:
    """Not on import: tests import this, and others have flags of the same names."""
    flags.DEFINE_list("targets", ["h100", "v5e:2x2"], "Chips to compile for.")
    flags.DEFINE_list("workloads", USUAL_WORKLOADS, f"Of {', '.join(WORKLOADS)}.")
    flags.DEFINE_list("forms", list(FORMS), f"Of {', '.join(FORMS)}.")


if __name__ == "__main__":
    define_flags()
    app.run(main)

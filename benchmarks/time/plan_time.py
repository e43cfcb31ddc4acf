r"""A plan's predicted slowdown beside the measured one, on the accelerator here.

A Flax decoder is planned for with a budget that makes a part of its state go, or all of
it, with the link of this machine measured; then the plain step and the planned one are
timed. The share of the chip's peak that the plain step reaches is told beside.

Run:
    python -m benchmarks.time.plan_time --target=h100 \
        --out=benchmarks/results/plan_time_h100
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

import optax_offload as oo
from benchmarks.common.steps import train_step
from benchmarks.common.workloads import decoder
from optax_offload import aot

FLAGS = flags.FLAGS
flags.DEFINE_string("target", "h100", "What this machine has one of.")
flags.DEFINE_integer("layers", 24, "Of the decoder.")
flags.DEFINE_integer("width", 2048, "Of a layer, which has 12 * width**2 parameters.")
flags.DEFINE_list("batches", ["8", "32"], "Sequences in a step, of each plan.")
flags.DEFINE_integer("context", 512, "Tokens in a sequence.")
flags.DEFINE_list("shares", ["0.5", "1.0"], "Of the state that has to go.")
flags.DEFINE_integer("steps", 10, "That are timed.")
flags.DEFINE_float("link_gb", None, "GB/s each way, instead of measuring it.")
flags.DEFINE_string("out", "out/plan_time", "Where the .json goes.")


def make_step(offload: Any, target: aot.Target, batch: int) -> oo.Step:
    """The step of a decoder, on one device."""
    work = decoder(
        True,
        layers=FLAGS.layers,
        width=FLAGS.width,
        heads=max(1, FLAGS.width // 128),
        batch=batch,
        context=FLAGS.context,
    )
    params, x = work.on(target)
    tx = offload(work.optimizer)
    state = oo.eval_shape(tx.init, params)
    shardings = jax.tree.map(lambda s: s.sharding, (params, state))
    tokens = batch * FLAGS.context
    step = train_step(work, tx)
    return oo.Step(step, (params, state, x), (0, 1), shardings, tokens)


def seconds(plan: oo.Plan | None, target: aot.Target, batch: int) -> float:
    """Of a step, on this machine, after two that are not timed; of a plan if given."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = make_step(plan.offload if plan else lambda tx: tx, target, batch)

    def zeros(x: Any) -> jax.Array:
        # By device_put: of a jit's result with such a sharding the type says "device".
        host = x.sharding.memory_kind == "pinned_host"
        kind = device.with_memory_kind("pinned_host" if host else "device")
        return jax.device_put(jax.numpy.zeros(x.shape, x.dtype), kind)

    params, state, x = jax.tree.map(zeros, step.args)
    if plan:
        params = oo.place(params, plan.config.parameters)
        jit: Any = functools.partial(oo.jit, **plan.config.step)
    else:
        jit = jax.jit
    compiled: Any = jit(step.fn, donate_argnums=(0, 1))

    def run(steps: int) -> float:
        nonlocal params, state
        started = time.perf_counter()
        for _ in range(steps):
            params, state = compiled(params, state, x)
        jax.block_until_ready((params, state))
        return (time.perf_counter() - started) / max(steps, 1)

    run(2)
    return run(FLAGS.steps)


def main(argv: Sequence[str]) -> None:
    """Times plans beside what they predicted."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    target = aot.Target(FLAGS.target)
    link = FLAGS.link_gb * 1e9 if FLAGS.link_gb else oo.measure_link()
    rows = []
    for batch in map(int, FLAGS.batches):
        plain = seconds(None, target, batch)
        for share in map(float, FLAGS.shares):
            row = compare(target, batch, share, link, plain)
            rows.append(row)
            print(
                f"batch {batch}, {row['moved_bytes'] / 2**30:.2f} GiB moved, link "
                f"{link / 1e9:.1f} GB/s: {plain:.3f} s becomes {row['seconds']:.3f} s,"
                f" {row['measured']:.2f} times; modelled {row['predicted']:.2f}",
                flush=True,
            )
    out = Path(FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    table = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    table |= {"link_bytes_per_second": link, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")


def compare(
    target: aot.Target, batch: int, share: float, link: float, plain: float
) -> dict[str, Any]:
    """A plan that has to move a share of the state, and its step."""
    whole = oo.plan(
        make_step, batch, target=target, rules=".*", link_bytes_per_second=link
    )
    budget = whole.after.used_bytes
    if share < 1:
        unmoved = oo.plan(make_step, batch, target=target).after.used_bytes
        budget = int(unmoved - share * (unmoved - budget))
    plan = oo.plan(
        make_step,
        batch,
        target=target,
        budget_bytes=budget,
        link_bytes_per_second=link,
    )
    took = seconds(plan, target, batch)
    modelled, given = plan.after.time, plan.before.time
    assert modelled is not None, "a GPU's compiler refuses nothing"
    assert given is not None, "nor the step as given"
    return {
        "batch": batch,
        "moved_bytes": plan.after.moved_bytes,
        "peak_bytes": plan.after.used_bytes,
        "what": plan.after.what,
        "plain_seconds": plain,
        "seconds": took,
        "measured": took / plain,
        "predicted": modelled.seconds / given.seconds,
        "utilization": given.compute_seconds / plain,
    }


if __name__ == "__main__":
    app.run(main)

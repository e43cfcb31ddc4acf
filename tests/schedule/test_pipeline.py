"""What the plan says that an iteration does for others is what is written down."""

import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import committed
from limited import limited
from program import emitted

import optax_offload as oo
from benchmarks.common.steps import train_step
from benchmarks.common.workloads import gated
from optax_offload._ground import compat
from optax_offload._ground.units import size_text
from optax_offload._places import memory
from optax_offload._program.bodies import entered, of_platforms
from optax_offload._program.graph import in_pairs
from optax_offload._program.primitives import handed_on

WORKLOAD = gated(tokens=256, layers=6, width=32, inner=88, vocabulary=256)
CHIPS = ["GPU", "TPU"]


@pytest.fixture(autouse=True)
def every_row(monkeypatch):
    """As with the newest JAX, and residuals of any size."""
    for name in ("COPIES_AT_POSITIONS", "STORES_OVERLAP"):
        monkeypatch.setattr(compat, name, True)
    limited(monkeypatch, least_residual_rows_bytes=0)


def planned(optimizer, **options):
    """The plan of a step of layers at rest, and the step, traced."""
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), WORKLOAD.params)
    params = oo.set_memory_kind(committed(params), "layers/.*", "pinned_host")
    offloading = oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0))
    tx = optax.chain(optimizer, offloading)
    args = params, tx.init(params), jnp.zeros(WORKLOAD.x.shape, WORKLOAD.x.dtype)
    step = oo.jit(train_step(WORKLOAD, tx), **options)
    return step.schedule(*args), step.trace(*args)


def moved(body):
    """The bytes of each row that turns of a loop load ahead, and store behind."""
    loads, stores, same = set(), set(), {}
    for e in body.jaxpr.eqns:
        kept = list(handed_on(e))
        if of_platforms(e):  # A layout, which only a TPU has.
            kept = list(zip(e.invars[1:], e.outvars, strict=True))
        same.update((v, same.get(a, a)) for a, v in kept)
        for a, v in in_pairs(e) if e.primitive.name == "device_put" else ():
            if memory.on_host(a.aval) and not memory.on_host(v.aval):
                loads.add(v)
            elif memory.on_host(v.aval) and not memory.on_host(a.aval):
                stores.add(same.get(a, a))
    before = body.split(body.jaxpr.invars).carry
    after = body.given(body.jaxpr.outvars).carried
    ahead = [memory.nbytes(v.aval) for v in after if v in loads]
    rows = [v for v in before if v in stores and v.aval.shape[:1] == (1,)]
    return ahead, [memory.nbytes(v.aval) for v in rows]


def said(some, how):
    """How the schedule says it; None if there is nothing."""
    rows = f"{len(some)} row{'s' * (len(some) != 1)} of {size_text(sum(some))}"
    when = {"loaded": "ahead", "stored": "behind"}[how]
    return f"{rows} {how} {when}" if some else None


@pytest.mark.parametrize("computes_longer", [False, True])
@pytest.mark.parametrize("residuals", ["device", "host"])
@pytest.mark.parametrize("chip", CHIPS)
def test_what_is_printed_is_what_is_emitted(
    chip, residuals, computes_longer, monkeypatch
):
    """Rows ahead and behind of each scan, by their number and their bytes."""
    limited(monkeypatch, flops_per_byte=0 if computes_longer else 1e9)
    plan, step = planned(optax.identity(), residuals=residuals)
    jaxpr, text = emitted(step.jaxpr, on_tpu=chip == "TPU"), str(plan)
    loops = [moved(body) for e in jaxpr.eqns for body in entered(e)]
    # The first iterations, and the last, are loops of their own.
    want = []
    for (ahead, behind), _ in itertools.groupby(loops):
        want += filter(None, (said(ahead, "loaded"), said(behind, "stored")))
    lines = re.findall(rf"^  on a {chip}: (.*)$", text, re.M)
    got = [part for line in lines for part in line.split("; ")]
    assert [x for x in got if x.endswith(("ahead", "behind"))] == want
    assert want or not computes_longer


@pytest.mark.parametrize("chip", CHIPS)
def test_nothing_is_stored_before_its_buffer_is_read(chip, monkeypatch):
    """What replaces a row that is loaded ahead waits for it, or what leads to it does.

    On a TPU rows that nothing is stored in place of, as residuals, are copied.
    """
    limited(monkeypatch, flops_per_byte=0)
    plan, _ = planned(optax.identity(), residuals="host")
    (each,) = plan.scans
    turns = plan.turns(each, 0, on_tpu=chip == "TPU")
    assert turns is not None
    turn = turns.turn
    replaced = {v for u in turn.updates for v in u.fused.replaced.values()}
    read = [v for v in turn.ahead if v in replaced]
    assert len(read) == 6
    for u in turn.updates:
        own = {v for v in read if v in u.fused.replaced.values()}
        assert own <= set(u.loads)
        assert u.held
    others = [v for v in turn.ahead if v not in replaced]
    assert len(others) == 1
    assert list(turn.copied) == (others if chip == "TPU" else [])


@pytest.mark.parametrize("residuals", ["device", "host"])
def test_loads_ahead_are_beside_most_products(residuals):
    """Those of a layer's first three updates, before the first; others where is room.

    `out` is the fourth, and its gradient needs the products that lead through all of
    the three before it. Beside the last update are two more products, and no state.
    """
    plan, _ = planned(optax.identity(), residuals=residuals)
    (each,) = plan.scans
    turns = plan.turns(each, 0, on_tpu=False)
    assert turns is not None
    found, left = [], {*turns.turn.ahead}
    for u in turns.turn.updates:
        found.append([v.aval.shape[1:] for v in u.loads if v in left])
        left.difference_update(u.loads)
    assert sorted(found[0]) == [(32, 88), (32, 88), (88, 32)]
    assert {(32, 32), (32, 96)} <= {*found[3]}
    assert ((256, 32) in found[5]) == (residuals == "host")

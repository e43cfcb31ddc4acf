"""The census: transfers in scheduled programs, and the model of the link."""

import re

import jax
import jax.numpy as jnp
import pytest
from census import Model, census
from jax import lax

from optax_offload import aot

# A transfer of 4 MiB takes 1 ms and 0.1 ms of latency, an operation that reads and
# writes as much 1 ms.
MODEL = Model(
    gb_per_second=2**22 / 1e6,
    latency_us=100.0,
    memory_gb_per_second=2**23 / 1e6,
    peak_tflops=1.0,
)

DEVICE = "f32[1048576]{0}"
HOST = "f32[1048576]{0:S(5)}"

TOP_LEVEL = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[1048576], b: f32[1048576]) -> (f32[1048576], f32[1048576]) {{
  %a = {HOST} parameter(0)
  %b = {HOST} parameter(1)
  %load.a = ({DEVICE}, {HOST}, u32[]) copy-start(%a), cross_program_prefetch_index=0
  %load.b = ({DEVICE}, {HOST}, u32[]) copy-start(%b)
  %loaded.a = {DEVICE} copy-done(%load.a)
  %new.a = {DEVICE} negate(%loaded.a), metadata={{op_name="jit(step)/neg"}}
  %store.a = ({HOST}, {DEVICE}, u32[]) copy-start(%new.a)
  %loaded.b = {DEVICE} copy-done(%load.b)
  %new.b = {DEVICE} negate(%loaded.b)
  %store.b = ({HOST}, {DEVICE}, u32[]) copy-start(%new.b)
  %stored.a = {HOST} copy-done(%store.a)
  %stored.b = {HOST} copy-done(%store.b)
  ROOT %out = ({HOST}, /*index=1*/{HOST}) tuple(%stored.a, %stored.b)
}}
"""


def milliseconds(value):
    return pytest.approx(value / 1e3)


def test_top_level():
    """Two leaves: the second is loaded while the first is computed.

    Loads: 0 to 1.1, 1.1 to 2.2. Computation: 1.1 to 2.1, 2.2 to 3.2. Stores: 2.1 to
    3.2, 3.2 to 4.3.
    """
    found = census(TOP_LEVEL, MODEL)
    assert found.count("load") == found.count("store") == 2
    assert found.sizes("load") == [2**22, 2**22]
    assert found.synchronous == 0
    assert found.most_in_flight == (2, 2, 2)
    assert [t.between for t in found.transfers("load")] == [0, 1]
    assert [t.between for t in found.transfers("store")] == [1, 0]
    assert found.seconds == milliseconds(4.3)
    assert found.compute_seconds == milliseconds(2)
    assert found.exposed_seconds == milliseconds(2.3)
    assert found.link_seconds == milliseconds(4.3)
    assert found.both_seconds == milliseconds(0.1)
    assert found.efficiency == pytest.approx(2 / 4.3)
    assert found.both_ways == pytest.approx(0.1 / 2.2)
    assert found.over_floor == pytest.approx(4.3 / 2)


def test_waiting_at_once():
    """Without a start and a done, a transfer is waited for at once.

    As a copy, in a fusion that reads host memory itself, and within host memory, which
    keeps both directions busy.
    """
    text = f"""HloModule jit_step, is_scheduled=true

%fused (p: f32[1048576]) -> f32[1048576] {{
  %p = {HOST} parameter(0)
  ROOT %n = {DEVICE} negate(%p)
}}

ENTRY %main (a: f32[1048576], b: f32[1048576]) -> (f32[1048576], f32[1048576]) {{
  %a = {HOST} parameter(0)
  %b = {HOST} parameter(1)
  %twin = {HOST} copy(%b)
  %new = {DEVICE} fusion(%a), kind=kLoop, calls=%fused
  %stored = {HOST} copy(%new)
  ROOT %out = ({HOST}, {HOST}) tuple(%stored, %twin)
}}
"""
    found = census(text, MODEL)
    assert {d: found.count(d) for d in ("load", "store", "host copy")} == {
        "load": 1,
        "store": 1,
        "host copy": 1,
    }
    assert found.synchronous == 3
    assert [t.form for t in found.transfers("load")] == ["fusion"]
    # The computation of the fusion writes 4 MiB of device memory, the store reads them.
    assert found.seconds == milliseconds(3 * 1.1 + 2 * 0.5)
    assert found.link_seconds == milliseconds(3.3)
    assert found.both_seconds == 0.0
    assert found.efficiency == pytest.approx(1 / 3.3)


SLICE, SLICES = "f32[1,1048576]{1,0}", "f32[8,1048576]{1,0:S(5)}"

LOOP = f"""HloModule jit_step, is_scheduled=true

%body (t: (s32[], f32[8,1048576], s32[])) -> (s32[], f32[8,1048576], s32[]) {{
  %t = (s32[], {SLICES}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %buffer = {SLICES} get-tuple-element(%t), index=1
  %n = s32[] get-tuple-element(%t), index=2
  %zero = s32[] constant(0)
  %load = (({SLICES}, s32[], s32[]), {SLICE}, u32[]) dynamic-slice-start(%buffer, %i, \
%zero), dynamic_slice_sizes={{1,1048576}}
  %loaded = {SLICE} dynamic-slice-done(%load)
  %new = {SLICE} negate(%loaded)
  %store = (({SLICES}, {SLICE}, s32[], s32[]), {SLICES}, u32[]) \
dynamic-update-slice-start(%buffer, %new, %i, %zero)
  %stored = {SLICES} dynamic-update-slice-done(%store)
  ROOT %out = (s32[], {SLICES}, s32[]) tuple(%i, %stored, %n)
}}

%condition (t.1: (s32[], f32[8,1048576], s32[])) -> pred[] {{
  %t.1 = (s32[], {SLICES}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %n.1 = s32[] get-tuple-element(%t.1), index=2
  ROOT %less = pred[] compare(%i.1, %n.1), direction=LT
}}

ENTRY %main (a: f32[8,1048576]) -> f32[8,1048576] {{
  %a = {SLICES} parameter(0)
  %start = s32[] constant(2)
  %end = s32[] constant(8)
  %first = (s32[], {SLICES}, s32[]) tuple(%start, %a, %end)
  %loop = (s32[], {SLICES}, s32[]) while(%first), condition=%condition, body=%body
  ROOT %result = {SLICES} get-tuple-element(%loop), index=1
}}
"""


def test_loop():
    """One slice after the other, six times: 1.1 ms there, 1 ms, and 1.1 ms back."""
    found = census(LOOP, MODEL)
    (loop,) = found.places
    assert (loop.kind, loop.trip_count, loop.runs) == ("loop", 6, 6)
    assert (loop.most_loads, loop.most_stores, loop.most_together) == (1, 1, 0)
    assert [(t.form, t.runs) for t in loop.transfers] == [
        ("dynamic-slice", 6),
        ("dynamic-update-slice", 6),
    ]
    assert found.sizes("load") == [2**22] * 6
    assert found.seconds == pytest.approx(6 * 3.2e-3)
    assert found.efficiency == pytest.approx(1 / 2.2)
    assert loop.efficiency(MODEL) == pytest.approx(1 / 3.2)


def test_trip_count_that_the_compiler_noted():
    noted = 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    assert census(LOOP.replace("body=%body", noted), MODEL).count("load") == 3


def test_trip_count_that_the_text_does_not_tell():
    """It is modelled as one, and says so."""
    text = LOOP.replace("direction=LT", "direction=NE")
    found = census(text, MODEL)
    assert found.places[0].trip_count is None
    assert found.count("load") == 1


def test_conditional():
    """The branch that moves more is modelled, both are listed."""
    text = f"""HloModule jit_step, is_scheduled=true

%wait (p: f32[1048576]) -> f32[1048576] {{
  ROOT %p = {HOST} parameter(0)
}}

%twin (q: f32[1048576]) -> f32[1048576] {{
  %q = {HOST} parameter(0)
  ROOT %c = {HOST} copy(%q)
}}

%move (r: f32[1048576]) -> f32[1048576] {{
  %r = {HOST} parameter(0)
  %loaded = {DEVICE} copy(%r)
  ROOT %stored = {HOST} copy(%loaded)
}}

ENTRY %main (i: s32[], a: f32[1048576]) -> f32[1048576] {{
  %i = s32[] parameter(0)
  %a = {HOST} parameter(1)
  ROOT %out = {HOST} conditional(%i, %a, %a, %a), branch_computations={{%wait, %twin, \
%move}}
}}
"""
    found = census(text, MODEL)
    assert {p.name: p.runs for p in found.places} == {"out/twin": 0, "out/move": 1}
    assert found.count("host copy") == 0
    assert found.count("load") == found.count("store") == 1


def test_matrix_products():
    """The longer of the products and the bytes is what an operation takes."""
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[512,1024], b: f32[1024,256]) -> f32[512,256] {
  %a = f32[512,1024]{1,0} parameter(0)
  %b = f32[1024,256]{1,0} parameter(1)
  ROOT %c = f32[512,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""
    found = census(text, Model(memory_gb_per_second=1e9, peak_tflops=1.0))
    assert found.seconds == pytest.approx(2 * 512 * 1024 * 256 / 1e12)
    assert found.efficiency is found.both_ways is None
    assert found.places == []


def test_text_that_is_not_scheduled():
    with pytest.raises(ValueError, match=r"is_scheduled=true: 'HloModule jit_f'"):
        census("HloModule jit_f")


@pytest.mark.parametrize("target", ["h100", "v5e:1x1"])
@pytest.mark.aot
def test_compiled_copies(target):
    """What the compilers make of a plain load and store, and of one within the host."""
    target = aot.Target(target)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    sharding = jax.NamedSharding(target.mesh(), jax.P(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=sharding)

    def step(xs):
        return [jax.device_put(jax.device_put(x, device) * 2, host) for x in xs]

    compiled = aot.compile(
        step, [x, x], target=target, out_shardings=[sharding] * 2, donate_argnums=0
    )
    found = census(compiled.as_text())
    assert found.sizes("load") == found.sizes("store") == [2**20] * 2
    assert found.count("host copy") == found.synchronous == 0
    assert {t.form for t in found.transfers("load")} == {"copy"}


@pytest.mark.parametrize("target", ["h100", "v5e:1x1"])
@pytest.mark.aot
def test_compiled_loop(target):
    """Slices in a loop are asynchronous on both, and left to a GPU's copy engines."""
    target = aot.Target(target)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    sharding = jax.NamedSharding(target.mesh(), jax.P(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((8, 256, 1024), jnp.float32, sharding=sharding)

    def step(x):
        def one(i, x):
            y = jax.device_put(lax.dynamic_slice_in_dim(x, i, 1), device)
            return lax.dynamic_update_slice_in_dim(x, jax.device_put(-y, host), i, 0)

        return lax.fori_loop(0, 8, one, x)

    compiled = aot.compile(
        step, x, target=target, out_shardings=sharding, donate_argnums=0
    )
    found = census(compiled.as_text())
    (loop,) = found.places
    assert (loop.kind, loop.trip_count) == ("loop", 8)
    assert found.sizes("load") == found.sizes("store") == [2**20] * 8
    assert [t.form for t in loop.transfers] == [
        "dynamic-slice",
        "dynamic-update-slice",
    ]
    assert found.synchronous == 0


@pytest.mark.aot
def test_compiled_matrix_products():
    """A TPU's are convolutions, also in batches; a GPU's are in fusions."""
    products = []
    for name in ("h100", "v5e:1x1"):
        target = aot.Target(name)
        struct = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16)
        compiled = aot.compile(lambda a, b: a @ b, struct, struct, target=target)
        text = compiled.as_text() or ""
        slow = Model(peak_tflops=1e-3)  # such that only the products count
        products.append(census(text, slow).seconds * 1e9)
        assert re.search(r"dot\(|convolution\(|gemm", text), text
    assert products == pytest.approx([2 * 8 * 512**3] * 2, rel=0.01)

"""What a program moves: how large, how often, by what; and what it does on the host."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import BRANCHES, HOST, LOOP, NOTED, TOP_LEVEL, WAITING, entry, gpu_slices
from jax import lax
from small_programs import BOTH, load_add_store, struct
from small_programs import DEVICE as TO_DEVICE
from small_programs import HOST as TO_HOST

from optax_offload import aot


def transfers(text):
    """Those of a program with this text."""
    return aot.transfers(types.SimpleNamespace(as_text=lambda: text))  # pyright: ignore


def test_whole_leaves():
    """Each field of one of them, and the order of all."""
    first, *others = transfers(TOP_LEVEL)
    assert first == aot.Transfer(
        name="load.a",
        op_name="load.a",
        direction="load",
        dtype="float32",
        shape=(2**20,),
        nbytes=2**22,
        times=1,
        times_known=True,
        loops=(),
        form="copy",
        by="copy engine",
        asynchronous=True,
    )
    assert first.total_bytes == 2**22
    assert [t.name for t in others] == ["load.b", "store.a", "store.b"]
    assert [t.direction for t in others] == ["load", "store", "store"]
    assert str(first) == (
        "load 4194304 B of float32[1048576], 1 times, by copy engine (copy)"
    )


def test_slices_in_a_loop():
    """Of the array that they are parts of, as often as the loop runs."""
    load, store = transfers(LOOP)
    assert (load.form, store.form) == ("dynamic-slice", "dynamic-update-slice")
    for t in (load, store):
        assert (t.shape, t.nbytes) == ((8, 2**20), 2**22)
        assert (t.times, t.times_known, t.loops) == (6, True, ("loop",))
        assert t.total_bytes == 6 * 2**22
        assert t.by == "copy engine"


def test_loops_in_loops():
    """The trip counts are multiplied, and one that is unknown makes all so."""
    outer = LOOP.replace("ENTRY %main", "%inner").replace(
        "%a = f32[8,1048576]{1,0:S(5)} parameter(0)",
        "%t.2 = (s32[], f32[8,1048576]{1,0:S(5)}, s32[]) parameter(0)\n"
        "  %a = f32[8,1048576]{1,0:S(5)} get-tuple-element(%t.2), index=1",
    )
    host = "f32[8,1048576]{1,0:S(5)}"
    outer += f"""
ENTRY %main (b: f32[8,1048576]) -> f32[8,1048576] {{
  %b = {host} parameter(0)
  %from = s32[] constant(5)
  %to = s32[] constant(8)
  %second = (s32[], {host}, s32[]) tuple(%from, %b, %to)
  ROOT %outer = (s32[], {host}, s32[]) while(%second), condition=%condition, body=%inner
}}
"""
    for t in transfers(outer):
        assert (t.loops, t.times, t.times_known) == (("outer", "loop"), 18, True)
    unknown = outer.replace("constant(5)", "parameter(1)")
    for t in transfers(unknown):
        assert (t.times, t.times_known) == (6, False)
    assert "assumed 6 times" in str(transfers(unknown)[0])


def test_branches():
    """Those of all branches, none of which is sure to run."""
    found = transfers(BRANCHES)
    assert [t.direction for t in found] == ["host copy", "load", "store"]
    assert not any(t.times_known for t in found)


def test_fusions_reach_into_host_memory():
    """A fusion that computes on what is there is a kernel.

    A copy within host memory is neither a load nor a store.
    """
    found = {t.name: t for t in transfers(WAITING)}
    assert [(t.direction, t.by) for t in found.values()] == [
        ("host copy", "copy engine"),
        ("load", "kernel"),
        ("store", "copy engine"),
    ]
    assert found["new"].form == "fusion"
    assert not any(t.asynchronous for t in found.values())


@pytest.mark.parametrize(
    ("position", "by"), [("", "kernel"), (NOTED, "copy engine")], ids=["kernel", "copy"]
)
def test_slices_of_a_gpu(position, by):
    """Copy engines take those whose position the compiler noted.

    Both are asynchronous, and of the whole array that the slice is a part of.
    """
    load, store = transfers(gpu_slices(position))
    assert (load.direction, load.form) == ("load", "dynamic-slice")
    assert (store.direction, store.form) == ("store", "dynamic-update-slice")
    for t in (load, store):
        assert (t.by, t.asynchronous) == (by, True)
        assert (t.shape, t.nbytes) == ((8, 128), 4 * 128 * 4)


def test_slices_of_a_gpu_at_a_constant_position():
    """Copy engines take them, and nothing has to be noted."""
    dynamic = "dynamic-slice(%p.1, %i.1, %i.1), dynamic_slice_sizes={4,128}"
    text = gpu_slices()
    assert dynamic in text
    load, _ = transfers(text.replace(dynamic, "slice(%p.1), slice={[4:8], [0:128]}"))
    assert (load.form, load.by, load.nbytes) == ("slice", "copy engine", 4 * 128 * 4)


def test_what_reads_and_writes_unlike_arrays_of_the_host():
    """It is no copy within host memory: what goes in does not come out."""
    found = transfers(
        entry(
            "  %p = f32[256]{0:S(5)} parameter(0)",
            '  ROOT %r = f32[64]{0:S(5)} custom-call(%p), custom_call_target="Sum"',
        )
    )
    assert [(t.direction, t.nbytes) for t in found] == [("load", 1024), ("store", 256)]


def test_one_for_each_array():
    """A fusion that reads two arrays in host memory is two transfers."""
    text = WAITING.replace(
        "ROOT %n = f32[1048576]{0} negate(%p)",
        f"%q = {HOST} parameter(1)\n  ROOT %n = f32[1048576]{{0}} add(%p, %q)",
    ).replace("fusion(%a)", "fusion(%a, %b)")
    assert [t.name for t in transfers(text)].count("new") == 2


def test_sends_to_the_host():
    """As older compilers write transfers: a pair of instructions."""
    found = transfers(
        entry(
            "  %p = f32[256]{0} parameter(0)",
            "  %t = token[] after-all()",
            "  %out = (f32[256]{0}, u32[], token[]) send(%p, %t), channel_id=1, "
            "is_host_transfer=true",
            "  %s = token[] send-done(%out), channel_id=1, is_host_transfer=true",
            "  %in = (f32[256]{0}, u32[], token[]) recv(%s), channel_id=2, "
            "is_host_transfer=true",
            "  ROOT %r = (f32[256]{0}, token[]) recv-done(%in), channel_id=2, "
            "is_host_transfer=true",
        )
    )
    assert [(t.direction, t.nbytes) for t in found] == [("store", 1024), ("load", 1024)]


def test_nothing_is_moved():
    """A program without host memory has none."""
    assert transfers(entry("  ROOT %a = f32[8] parameter(0)")) == ()


@pytest.mark.parametrize("read", [aot.transfers, aot.host_computations])
def test_no_text(read):
    """A program that has no text is an error, not one that moves nothing."""
    with pytest.raises(ValueError, match=r"is_scheduled=true.*Pass compiled.as_text"):
        read(types.SimpleNamespace(as_text=lambda: None))


def host_computations(*lines):
    """Those of a program with these instructions."""
    text = entry(*lines)
    return aot.host_computations(types.SimpleNamespace(as_text=lambda: text))  # pyright: ignore


def test_host_computations_of_a_text():
    """A GPU's mark and a TPU's call, each once, by the traced operation's name."""
    marked = 'frontend_attributes={_xla_compute_type="host"}'
    call = 'custom_call_target="HostExecute"'
    assert host_computations(
        f'  %a = f32[8] add(%p, %p), {marked}, metadata={{op_name="jit(f)/add"}}',
        f'  %b = f32[8] add(%a, %a), {marked}, metadata={{op_name="jit(f)/add"}}',
        f"  ROOT %c = f32[8] custom-call(%b), {call}",
    ) == ("jit(f)/add", "c")


@pytest.mark.aot
@BOTH
def test_host_computations(name):
    """What a compiler leaves to the host is found in its program."""
    target = aot.Target(name)
    on_host = struct((1024, 1024), target, kind="pinned_host")
    clean = aot.compile(load_add_store, on_host, struct((1024, 1024)), target=target)
    assert aot.host_computations(clean) == ()
    dirty = aot.compile(lambda x: x * 2.0, on_host, target=target)
    (name,) = aot.host_computations(dirty)
    assert name.endswith("/mul")


def negated(x, times, slices):
    """Negates so many slices, where they are."""

    def one(i, x):
        part = jax.device_put(lax.dynamic_slice_in_dim(x, i, 1), TO_DEVICE)
        part = jax.device_put(-part, TO_HOST)
        return lax.dynamic_update_slice_in_dim(x, part, i, 0)

    return lax.fori_loop(0, times(slices), one, x)


@pytest.mark.aot
@BOTH
@pytest.mark.parametrize("hidden", [False, True], ids=["known", "hidden"])
def test_compiled_slices(name, hidden):
    """A GPU's are kernels where the loop's trip count is hidden from it.

    A TPU's are not. Both texts tell how often the loop runs.
    """
    target = aot.Target(name)
    x = struct((8, 256, 1024), target, kind="pinned_host")
    times = lambda n: lax.optimization_barrier(jnp.int32(n)) if hidden else n  # noqa: E731
    compiled = aot.compile(
        lambda x: negated(x, times, 8),
        x,
        target=target,
        out_shardings=x.sharding,
        donate_argnums=0,
    )
    load, store = aot.transfers(compiled)
    assert [load.direction, store.direction] == ["load", "store"]
    for t in (load, store):
        assert (t.dtype, t.shape, t.nbytes) == ("float32", (8, 256, 1024), 2**20)
        assert (t.times, t.times_known, len(t.loops)) == (8, True, 1)
        assert t.asynchronous
        assert t.by == ("kernel" if hidden and name == "h100" else "copy engine")


@pytest.mark.aot
@pytest.mark.parametrize(
    ("axis", "times", "by"),
    [(0, 8, "copy engine"), (1, 8, "kernel"), (0, 1, "kernel")],
    ids=["rows", "columns", "once"],
)
def test_which_slices_a_gpu_copies(axis, times, by):
    """Not those that are not contiguous, nor those at a constant position (F60)."""
    target = aot.Target("h100")
    x = struct((8, 256, 1024), target, kind="pinned_host")

    def one(i, x):
        part = lax.dynamic_slice_in_dim(x, i, 1, axis)
        part = jax.device_put(-jax.device_put(part, TO_DEVICE), TO_HOST)
        return lax.dynamic_update_slice_in_dim(x, part, i, axis)

    compiled = aot.compile(
        lambda x: lax.fori_loop(0, times, one, x),
        x,
        target=target,
        out_shardings=x.sharding,
        donate_argnums=0,
    )
    load, store = aot.transfers(compiled)
    assert (load.direction, load.by) == ("load", by)
    assert (store.direction, store.by) == ("store", by)


def test_transfers_are_frozen():
    """So that they can be kept and compared."""
    (first, *_) = transfers(TOP_LEVEL)
    assert {first: 1}[dataclasses.replace(first)] == 1

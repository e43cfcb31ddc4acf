"""Where state is and what moves, in whole train steps: one table of cases, three ways.

Compiled for a TPU, compiled for a GPU (neither need be here), and run on what is
attached: on an accelerator with ``-m accelerator``, otherwise on CPU devices.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import program
import pytest
from cases import CASES, CONFIGS, LR, MOMENTS, OTHERS, RULE_FILES, Case, deep
from jax.sharding import AxisType

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground.trees import leaves_with_paths
from optax_offload.aot import _hlo

pytestmark = pytest.mark.usefixtures("rank_promotion")

TARGETS = {
    "tpu": {1: "v5e", 4: "v5e:2x2", 8: "v5e:2x4"},
    "gpu": {1: "h100", 4: "h100:4", 8: "h100:8"},
}
# One of each kind; the others are like these, or take long to compile.
QUICK = {"adam_moments-adamw", "all_states-adafactor", "scanned", "fsdp_4", "bfloat16"}
QUICK |= {"multi_steps-inside", "apply_if_finite-inside", "narrow_window"}


def slow_unless(quick):
    """What is left to CI."""
    return [] if quick else [pytest.mark.slow]


each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=slow_unless(name in QUICK))
        for name, case in CASES.items()
    ],
)
each_compiler = pytest.mark.parametrize(
    "platform",
    # A process for each, so that it loads one compiler, once.
    [
        pytest.param(p, marks=[pytest.mark.aot, pytest.mark.xdist_group(p)])
        for p in TARGETS
    ],
)


@pytest.fixture
def devices(request):
    """The devices to run on: the CPU's, or an accelerator's."""
    if request.param == "cpu":
        return jax.devices("cpu")
    if jax.default_backend() == "cpu":
        pytest.skip("JAX finds no accelerator (or JAX_PLATFORMS keeps it from looking)")
    return jax.devices()


attached = pytest.param("attached", marks=pytest.mark.accelerator)


def compiled_for(case, platform, train=None):
    """The step, with what goes from step to step."""
    pytest.importorskip("libtpu" if platform == "tpu" else "jax_plugins")
    target = aot.Target(TARGETS[platform][case.devices])
    train = train or case.training()
    carry, batch = case.templates(train, target.mesh())
    compiled = aot.compile(case.jit(train.step, carry), carry, batch, target=target)
    return compiled, carry, batch


def nbytes(x):
    """The bytes of an array."""
    return x.size * x.dtype.itemsize


def on_one_device(x, kind):
    """As a compiled program has it."""
    shape = x.sharding.shard_shape(x.shape)
    return str(x.dtype), shape, "S(5)" if kind == "pinned_host" else ""


def check_signature(case, compiled, carry, batch):
    """Every leaf is where it has to be, as an argument and as a result.

    What comes out goes in again: the second step is the same program.
    """
    arguments, results = program.signature(compiled)
    leaves = leaves_with_paths(carry)
    want = [on_one_device(x, case.kind(path, nbytes(x))) for path, x in leaves]
    want += [on_one_device(x, "device") for x in jax.tree.leaves(batch)]
    got = [
        (a.numpy_dtype, a.dimensions, "S(5)" if a.on_host else "") for a in arguments
    ]
    assert got == want, "the arguments"
    assert results == arguments[: len(leaves)], "the results"
    assert compiled.out_tree == jax.tree.structure(carry)
    for (path, x), sharding in zip(
        leaves, jax.tree.leaves(compiled.output_shardings), strict=True
    ):
        # A GPU's compile-only devices list no memories.
        assert sharding.memory_kind in (None, case.kind(path, nbytes(x))), path


def check_memory(case, platform, compiled, carry):
    """On the host are the offloaded bytes, once."""
    offloaded = sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for path, x in leaves_with_paths(carry)
        if case.kind(path, nbytes(x)) == "pinned_host"
    )
    assert offloaded
    peak = aot.peak(compiled)
    assert peak.host_argument_bytes == offloaded
    assert peak.host_output_bytes == offloaded
    assert peak.host_aliased_bytes == (offloaded if case.donate else 0)
    copied = platform in case.copied_on_host
    assert peak.host_temporary_bytes in ({0, offloaded} if copied else {0})


def check_transfers(case, platform, compiled):
    """Each host argument is loaded, each host result stored, nothing computed there.

    Only operations that move between the memories do it.
    """
    operations = {name.split("/")[-1] for name in aot.host_computations(compiled)}
    if platform in case.copied_on_host:
        # What a TPU's compiler calls a copy within host memory.
        operations = {name for name in operations if "host-call" not in name}
    assert operations == {*case.computed_on_host}
    arguments, results = program.signature(compiled)
    # A leaf may be moved in several places: in two branches, or a part in a loop.
    assert not hosts(arguments) - moved(compiled, "load"), "a leaf is not loaded"
    assert not hosts(results) - moved(compiled, "store"), "a leaf is not stored"
    assert program.pretended(compiled) == []


def hosts(arrays):
    """How often each type is among arrays on the host."""
    return collections.Counter(
        (a.numpy_dtype, a.dimensions) for a in arrays if a.on_host
    )


def moved(compiled, direction):
    """How often an array of each type is moved in a direction, or a part of it."""
    return collections.Counter(
        (t.dtype, t.shape) for t in aot.transfers(compiled) if t.direction == direction
    )


# Of the largest value of a leaf: where programs are fused differently, a multiplication
# and an addition round once instead of twice.
ULPS = 4


def check_arrays(case, carry, before):
    """Each array is where it has to be, sharded as it was."""
    for (path, x), y in zip(
        leaves_with_paths(carry), jax.tree.leaves(before), strict=True
    ):
        assert x.sharding.memory_kind == case.kind(path, nbytes(x)), path
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path
        assert (x.dtype, x.weak_type) == (y.dtype, y.weak_type), path


def max_error(got, want):
    """The largest difference, in units in the last place of a leaf's largest value."""
    errors = [0.0]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if jnp.issubdtype(x.dtype, jnp.floating):
            unit = float(jnp.finfo(x.dtype).eps) * np.max(np.abs(y.astype("f")))
            difference = np.max(np.abs(x.astype("f") - y.astype("f")))
            errors.append(difference / unit if difference else 0.0)
        else:
            assert np.array_equal(x, y)
    return max(errors)


def drift(got, want):
    """The mean difference of parameters whose gradients were computed apart."""
    return max(
        float(np.mean(np.abs(np.asarray(x, "f") - np.asarray(y, "f"))))
        for (path, x), y in zip(
            leaves_with_paths(got), jax.tree.leaves(want), strict=True
        )
        if "opt_state" not in path.split("/")
    )


def test_every_rule_file_has_a_case():
    """So that none of them is forgotten."""
    files = {path.stem for path in CONFIGS.glob("*.toml")}
    assert {name.split("-")[0] for name in RULE_FILES} == files


@each_compiler
@each_case
def test_compiled_step(case, platform):
    """Kinds, bytes and transfers, read from the program."""
    if platform in case.refused_by:
        with pytest.raises(jax.errors.JaxRuntimeError, match="output alias"):
            compiled_for(case, platform)
        return
    compiled, carry, batch = compiled_for(case, platform)
    check_signature(case, compiled, carry, batch)
    check_memory(case, platform, compiled, carry)
    check_transfers(case, platform, compiled)


def collectives(compiled):
    """How many elements the collectives of each kind make."""
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective", "reduce-scatter")
    found = collections.Counter()
    for i in program.instructions(_hlo.parse(compiled.as_text())):
        if i.opcode.startswith(kinds) and not i.ends:
            found[i.opcode.removesuffix("-start")] += sum(a.size for a in i.arrays)
    return found


@each_compiler
@pytest.mark.parametrize(
    "name", ["fsdp_4", pytest.param("fsdp_8", marks=pytest.mark.slow)]
)
def test_no_collective_is_added(platform, name):
    """No slice crosses a shard, so that offloading has no need of any."""
    case = CASES[name]
    ours, *_ = compiled_for(case, platform)
    plain, *_ = compiled_for(case, platform, case.training(lambda inner: inner))
    assert collectives(plain)
    assert not collectives(ours) - collectives(plain)


@each_compiler
@pytest.mark.filterwarnings("ignore:.* over the window:optax_offload.OffloadWarning")
def test_collectives_of_slices_across_shards_are_seen(platform):
    """As a rule that names a sharded axis makes them."""
    pytest.importorskip("libtpu" if platform == "tpu" else "jax_plugins")
    target = aot.Target(TARGETS[platform][4])
    rows = jax.NamedSharding(target.mesh(), jax.P("x"))
    params = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=rows)

    def compiled(slice_axis):
        rule = oo.Rule(".*", slice_axis=slice_axis)
        tx = oo.offload(optax.adam(LR), rule, window_bytes=2**17)
        state = oo.eval_shape(tx.init, params)
        return aot.compile(tx.update, params, state, target=target)

    assert not collectives(compiled("auto"))
    assert collectives(compiled(0))


def forgets_to_store(inner):
    """Its loads are there, and nothing brings the state back."""
    tx = oo.offload(inner)

    def update(updates, state, params):
        updates, state = tx.update(updates, state, params)
        return updates, oo.set_memory_kind(state, ".*", "device")

    return optax.GradientTransformation(tx.init, update)


@each_compiler
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("scanned", lambda inner: inner, "the arguments"),
        ("scanned", forgets_to_store, "the results"),
        ("multi_steps-around", None, "select_n|host-call"),
    ],
    ids=["plain", "forgets to store", "computes on the host"],
)
def test_what_is_wrong_is_caught(platform, name, wrong, message):
    """The plain optimizer, and offloading that does half of its work."""
    # Not donated: the TPU's compiler itself refuses an argument whose result is in the
    # other memory.
    case = dataclasses.replace(
        CASES[name], computed_on_host=(), copied_on_host=(), donate=False
    )
    compiled, carry, batch = compiled_for(case, platform, case.training(wrong))

    def check():
        check_signature(case, compiled, carry, batch)
        check_transfers(case, platform, compiled)

    with pytest.raises(AssertionError, match=message):
        check()


@pytest.mark.parametrize(
    ("devices", "case"),
    # On the CPU, so that nothing is run for the first time on an accelerator. That the
    # optimizers of the rule files have their bits there, the contract suite has shown.
    [
        pytest.param("cpu", case, id=f"cpu-{name}", marks=slow_unless(name in QUICK))
        for name, case in OTHERS.items()
    ]
    + [
        pytest.param(
            *attached.values, case, id=f"attached-{name}", marks=attached.marks
        )
        for name, case in CASES.items()
    ],
    indirect=["devices"],
)
def test_run(case, devices):
    """Three steps: kinds, shardings, one compilation, the plain optimizer's values.

    Where there is host memory to tell, the program too.
    """
    if len(devices) < case.devices:
        pytest.skip(f"needs {case.devices} devices, there are {len(devices)}")
    mesh = jax.make_mesh(
        (case.devices,), ("x",), (AxisType.Auto,), devices=devices[: case.devices]
    )
    train, plain = case.training(), case.plain()
    start, batch = case.arrays(train, mesh)
    want, _ = case.arrays(plain, mesh)
    check_arrays(case, start, start)

    # The same gradients for both: compiled in another step they may differ.
    gradients, plain_update = jax.jit(plain.gradients), jax.jit(plain.apply)
    update = case.jit(train.apply, start)
    got = copied(start)
    for _ in range(3):
        grads = gradients(want, batch)
        got, want = update(got, grads), plain_update(want, grads)
    check_arrays(case, got, start)
    assert max_error(got, want) <= ULPS

    step = case.jit(train.step, start)
    compiled = step.lower(start, batch).compile()
    check_signature(case, compiled, start, batch)
    if devices[0].platform != "cpu":
        check_memory(case, devices[0].platform, compiled, start)
        check_transfers(case, devices[0].platform, compiled)
    carry = copied(start)
    for _ in range(3):
        given, carry = carry, step(carry, batch)
        check_arrays(case, carry, start)
        donated = {x.is_deleted() for x in jax.tree.leaves(given)}
        assert donated == {case.donate}
    assert step._cache_size() == 1, "compiled again"
    assert drift(carry, want) <= 0.1 * LR


def copied(tree):
    """The same in memory of its own, which can be donated."""
    return jax.tree.map(
        lambda x: jax.device_put(x.item() if x.weak_type else np.array(x), x.sharding),
        tree,
    )


@pytest.mark.parametrize("devices", ["cpu", attached], indirect=True)
def test_peak(devices):
    """By the device's own count a step needs less, as its program said it would."""
    device = devices[0]
    counts = device.memory_stats() is not None
    width, layers = (2048, 16) if counts else (128, 2)
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=[device])
    case = Case(
        lambda wrap: wrap(optax.adamw(LR)), MOMENTS, lambda: deep(width, layers)
    )

    def run(train):
        """The peak of a step, as its program has it and as counted so far."""
        carry, batch = case.templates(train, mesh)
        compiled = case.jit(train.step, carry).lower(carry, batch).compile()
        carry, batch = case.arrays(train, mesh)
        for _ in range(2):
            carry = jax.block_until_ready(compiled(carry, batch))
        return aot.peak(compiled).peak_bytes, counted_peak_bytes(device)

    before = counted_peak_bytes(device)
    # This one first: a device remembers only the highest of all.
    our_peak, our_count = run(case.training())
    plain_peak, plain_count = run(case.training(lambda inner: inner))
    if not counts:
        return  # On the CPU, so that nothing here is run for the first time elsewhere.
    assert our_count > before, "the tests before this one needed more"
    moved = 2 * layers * width**2 * 4
    assert plain_peak - our_peak > 0.5 * moved
    assert plain_count - our_count > 0.8 * (plain_peak - our_peak)


def counted_peak_bytes(device):
    """The device's own count of its peak."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)

"""Donated buffers stay in their memory, in whatever order a step takes and returns."""

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from donation_orders import LEAF_BYTES, ORDERS, start, templates
from harness import kinds
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload import aot
from optax_offload._program import lowered as lowered_arguments
from optax_offload._step.donation import Buffer, Pairs, pairs_by_kind, places

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
HOST_KIND = "pinned_host"
UNUSABLE = "Some donated buffers were not usable"
orders = pytest.mark.parametrize("order", ORDERS, ids=str)


def run(step, order, first, steps=3):
    """Runs steps, as many as can follow on one another; what the last one returns."""
    values, results = dict(first), {}
    for _ in range(steps):
        results = step(*(values[name] for name in order.takes))
        results = results if len(order.returns) > 1 else (results,)
        results = dict(zip(order.returns, results, strict=True))
        if not set(order.donates) <= set(results):
            break
        values.update(results)
    return results


def main_arguments(lowered):
    """The attributes of each of a program's arguments."""
    (line,) = re.findall(r"func\.func public @main\((.*?)\) -> ", lowered.as_text())
    return re.split(r"%arg\d+: ", line)[1:]


def main_results(lowered):
    """The attributes of each of its results."""
    (line,) = re.findall(
        r"func\.func public @main\(.*?\) -> \((.*?)\) {$", lowered.as_text(), re.M
    )
    return re.split(r"(?<=[>}]), (?=tensor)", line)


def crossing(lowered):
    """How many of a program's pairs are of two kinds of memory."""
    results = main_results(lowered)
    return sum(
        ("pinned_host" in argument) != ("pinned_host" in results[int(found[1])])
        for argument in main_arguments(lowered)
        if (found := re.search(r"tf.aliasing_output = (\d+)", argument))
    )


@pytest.fixture
def unchecked(monkeypatch):
    """Programs of `jax.jit` whose pairs are wrong, for those who only read them."""
    monkeypatch.setattr(lowered_arguments, "_crossing_pair", lambda main, i: "")


def jaxs(order):
    """The step, jitted by `jax.jit`, which keeps programs: so each time another one."""
    return jax.jit(lambda *args: order.step(*args), donate_argnums=order.donate_argnums)


@orders
def test_a_plain_jit_that_pairs_across_memories_is_refused(order):
    """The process would be aborted. The message names the pair and what to do.

    Should JAX itself not pair so any more, `oo.jit` may no longer be needed for it.
    """
    args = [start()[name] for name in order.takes]
    step = jaxs(order)
    message = r"another memory.*\['w'\] \(.*each tensor<512x512xf32>.*optax_offload.jit"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNUSABLE)
        if order.jax_is_wrong:
            with pytest.raises(oo.MemoryKindError, match=f"(?s){message}"):
                step.lower(*args)
        else:
            step.lower(*args)


@pytest.mark.parametrize("fused", [False, True])
def test_names_of_a_pair_that_is_refused(fused):
    """Also where the update is in a backward pass, and nothing of it is left."""
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=0))

    def step(params, state, x):
        def loss(p):
            return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0])

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.ones((2, 8, 8))
    state = tx.init(params)
    jitted = jax.jit(oo.stream(step) if fused else step, donate_argnums=1)
    message = r"- state\[0\].mu \(pinned_host\) and result\[0\] \(device\), each tensor"
    with pytest.raises(oo.MemoryKindError, match=message):
        jitted(params, state, jnp.ones((4, 8)))


def test_of_many_pairs_that_are_refused_some_are_named():
    """What to do is at the end of the message."""
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=0))
    params = [jnp.ones((8, 8)) for _ in range(7)]

    def step(state, params):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.raises(oo.MemoryKindError, match=r"mu\[4\] .*\nand 2 more\nJit"):
        jax.jit(step, donate_argnums=0)(tx.init(params), params)


def test_out_shardings_that_move_new_state():
    """The order is right already: what is missing are memory kinds."""
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=0))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=device)
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((8, 8))}
    message = (
        r"(?s)state\[0\].mu\['w'\] .*stay: its out_shardings .*state_shardings\(tx"
    )
    with pytest.raises(oo.MemoryKindError, match=message):
        step.lower(params, tx.init(params))


@pytest.mark.parametrize("given", [{}, {"donate_argnums": ()}, {"donate_argnums": 1}])
def test_a_step_that_donates_nothing_says_so_once(given):
    """By what to donate; not where nothing is asked for, nor of what only reads."""
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=0))

    def step(x, state, params):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state, jnp.sum(x)

    params = {"w": jnp.ones((8, 8))}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jitted = oo.jit(step, **given)
        params, state, _ = jitted(jnp.ones(3), tx.init(params), params)
        jitted(jnp.ones(3), state, params)
        oo.jit(lambda state: jax.tree.map(jnp.sum, state))(tx.init(params))
    assert len(told) == (not given)
    for each in told:
        text = str(each.message)
        assert "in memory at once, 516 B of the host for each device" in text
        assert "optax_offload.jit(step, donate_argnums=(1, 2))" in text


@orders
def test_same_numbers_where_the_step_left_them(order):
    """Three steps, and what was donated is gone."""
    step = oo.jit(order.step, donate_argnums=order.donate_argnums)
    first = start()
    with warnings.catch_warnings():
        if order.name == "state-dropped":
            warnings.filterwarnings("ignore", UNUSABLE)
        given = run(step, order, first)
    gone = {
        name
        for name in order.takes
        if all(x.is_deleted() for x in jax.tree.leaves(first[name]))
    }
    dropped = {"state"} if order.name == "state-dropped" else set()
    assert gone == {*order.donates} - dropped
    plain = run(jax.jit(order.step), order, start())
    assert kinds(given) == kinds(plain)
    assert kinds(given.get("params")) == ["device"]
    jax.tree.map(np.testing.assert_array_equal, given, plain)


@orders
def test_where_jax_pairs_well_the_program_is_the_same(order, unchecked):
    """Letter for letter; else only who is paired with whom is another."""
    args = [start()[name] for name in order.takes]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNUSABLE)
        step = functools.wraps(order.step)(lambda *args: order.step(*args))
        ours, plain = (
            jit(step, donate_argnums=order.donate_argnums).lower(*args)
            for jit in (oo.jit, jax.jit)
        )
    assert crossing(ours) == 0
    if order.jax_is_wrong:
        assert without_pairs(ours) == without_pairs(plain)
    else:
        assert ours.as_text() == plain.as_text()


def without_pairs(lowered):
    """The program, if nothing were donated."""
    pairs = r"(, )?(tf.aliasing_output = \d+ : i32|jax.buffer_donor = true)(, )?"
    return re.sub(pairs, "", lowered.as_text()).replace(" {}", "")


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("chip", ["h100", "v5e"])
@orders
def test_bytes_of_compiled_programs(chip, order):
    """Results in each memory, and those that are written into what was donated."""
    args = [templates()[name] for name in order.takes]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNUSABLE)
        step = oo.jit(order.step, donate_argnums=order.donate_argnums)
        peak = aot.peak(aot.compile(step, *args, target=aot.Target(chip)))
    device, host = order.aliased
    leaves = 2 if "grads" in order.returns else 1
    assert peak.host_output_bytes == order.host_leaves * LEAF_BYTES
    assert peak.host_aliased_bytes == host * LEAF_BYTES
    assert peak.host_temporary_bytes == order.copied * LEAF_BYTES
    assert leaves * LEAF_BYTES <= peak.output_bytes < leaves * LEAF_BYTES + 2**16
    assert device * LEAF_BYTES <= peak.aliased_bytes < device * LEAF_BYTES + 2**16


def test_a_donated_leaf_that_no_result_of_its_memory_can_use_is_not_donated():
    """It is alive afterwards, and a warning says so, as of `jax.jit`."""
    host = jax.device_put(jnp.ones((256, 256)), HOST)
    double = oo.jit(lambda x: jax.device_put(x, DEVICE) * 2, donate_argnums=0)
    with pytest.warns(
        UserWarning, match=r"not usable: tensor<256x256xf32> in pinned_h"
    ):
        result = double(host)
    assert result.sharding.memory_kind == "device"
    np.testing.assert_array_equal(host, 1.0)
    np.testing.assert_array_equal(result, 2.0)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("with_numbers", ["donated", "kept", "none"])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_donated_random_keys(kind, with_numbers, reuse):
    """They take a buffer of their own memory, or a warning says why they cannot."""

    def step(keys, *numbers):
        new = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        return new, *(x + 1 for x in numbers)

    keys = jax.random.split(jax.random.key(0), 4)
    expected, *_ = step(keys)
    given = [oo.set_memory_kind(keys, "", kind)]
    given += [] if with_numbers == "none" else [jnp.ones(3)]
    donated = range(2 if with_numbers == "donated" else 1)
    jitted = oo.jit(step, donate_argnums=tuple(donated))
    with jax.debug_key_reuse(reuse), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new, *_ = jitted(*given)
    np.testing.assert_array_equal(*map(jax.random.key_data, (new, expected)))
    assert new.sharding.memory_kind == "device"
    assert given[0].is_deleted() == (kind == "device")
    assert [x.is_deleted() for x in given[1:]] == [True] * (len(donated) - 1) + [
        False
    ] * (len(given) - len(donated))
    messages = [str(each.message) for each in caught]
    assert len(messages) == (kind == "pinned_host")
    for message in messages:
        assert re.match(rf"{UNUSABLE}: tensor<4x2xui32> in pinned_host", message)
        assert "keep keys there, optax_offload.set_memory_kind(keys" in message


def test_results_of_another_shape_take_the_buffer_within_a_memory():
    """XLA finds them; it looks at the memory, on CPU too."""

    def step(a, b):
        a, b = jax.device_put((a, b), DEVICE)
        return jnp.ravel(a) * 2, jax.device_put(jnp.ravel(b) * 3, HOST)

    host = jax.device_put(jnp.ones((256, 256)), HOST)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNUSABLE)
        first, second = oo.jit(step, donate_argnums=(0, 1))(host, jnp.ones((256, 256)))
    assert kinds((first, second)) == ["device", "pinned_host"]
    np.testing.assert_array_equal(first, 2.0)
    np.testing.assert_array_equal(second, 3.0)


def test_leaves_that_are_not_read_are_left_alone():
    """As by `jax.jit`: they are no arguments of the program, nor donated."""

    def step(state):
        return {"a": state["a"] + 1}

    state = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    assert len(main_arguments(oo.jit(step, donate_argnums=0).lower(state))) == 1
    oo.jit(step, donate_argnums=0)(state)
    assert state["a"].is_deleted()
    assert not state["b"].is_deleted()
    state = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    kept = oo.jit(step, donate_argnums=0, keep_unused=True)
    with pytest.warns(UserWarning, match=UNUSABLE):
        assert len(main_arguments(kept.lower(state))) == 2


def test_the_same_buffer_donated_twice_is_jaxs_error():
    """It is not made anything else."""
    host = jax.device_put(jnp.ones((256, 256)), HOST)
    step = oo.jit(lambda a, b: (b, a), donate_argnums=(0, 1))
    with pytest.raises(Exception, match="donate the same buffer twice"):
        step(host, host)


@pytest.mark.parametrize("named", ["params", "state", "both"])
def test_on_a_mesh_with_some_shardings_named(named):
    """JAX pairs what is named by shape; nothing crosses here."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, P("x"))
    params = jax.device_put(jnp.ones((64, 64)), rows)
    state = jax.device_put(jnp.ones((64, 64)), rows.with_memory_kind("pinned_host"))

    def step(state, params):
        new = jax.device_put(state, DEVICE) + params
        return params + 1, jax.device_put(new, HOST)

    out = {"params": (rows, None), "state": (None, rows), "both": rows}[named]
    jitted = oo.jit(step, donate_argnums=(0, 1), out_shardings=out)
    for i in range(3):
        assert crossing(jitted.lower(state, params)) == 0
        params, state = jitted(state, params)
        assert kinds((params, state)) == ["device", "pinned_host"]
        np.testing.assert_array_equal(params, i + 2.0)


def buffers(*kinds, size=4, sharding=None):
    """Buffers of one type, of these kinds."""
    return [Buffer(i, size, size, kind, sharding) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("donated", "results", "expected"),
    [
        ("h", "d", Pairs({}, frozenset(), frozenset({0}))),
        ("hd", "d", Pairs({1: 0}, frozenset(), frozenset({0}))),
        ("hd", "dh", Pairs({0: 1, 1: 0}, frozenset(), frozenset())),
        ("hh", "dhdh", Pairs({0: 1, 1: 3}, frozenset(), frozenset())),
        ("dh", "", Pairs({}, frozenset(), frozenset({0, 1}))),
        ("", "dh", Pairs({}, frozenset(), frozenset())),
    ],
)
def test_pairs(donated, results, expected):
    """In their order, within a memory."""
    assert pairs_by_kind(buffers(*donated), buffers(*results), False) == expected


def test_pairs_of_another_shape_are_left_to_xla():
    """Of the same size and memory."""
    argument = Buffer(0, "8x8", 64, "h")
    assert pairs_by_kind([argument], [Buffer(0, "64", 64, "h")], False).donors == {0}
    assert pairs_by_kind([argument], [Buffer(0, "64", 64, "d")], False).unusable == {0}
    assert pairs_by_kind([argument], [Buffer(0, "32", 32, "h")], False).unusable == {0}


def test_pairs_on_several_devices():
    """Of the same sharding where it is given; else XLA decides."""
    rows, columns = buffers("h", sharding="rows"), buffers("h", sharding="columns")
    assert pairs_by_kind(rows, rows, True).aliases == {0: 0}
    assert pairs_by_kind(rows, columns, True).donors == {0}
    assert pairs_by_kind(rows, buffers("h"), True).donors == {0}
    assert pairs_by_kind(rows, buffers("d"), True).unusable == {0}


def uncommitted_step(spec=None):
    """A step, and a call of parameters that JAX may move and state that it may not."""
    tx = oo.offload(optax.sgd(0.1, momentum=0.9))
    params = {"w": jnp.ones((256, 128)), "scale": jnp.float32(1)}
    where = jax.device_put(params, jax.devices()[0] if spec is None else spec)

    def step(params, state, x):
        def loss_fn(params):
            return jnp.mean((x @ params["w"] * params["scale"]) ** 2)

        updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step, params, tx.init(where), jnp.ones((8, 256))


@pytest.mark.parametrize("named", [False, True])
def test_parameters_that_are_on_no_device_for_good(named):
    """Are committed in the first call, so that a step is compiled once (F36)."""
    step, params, state, x = uncommitted_step()
    given = {"params": params, "state": state} if named else {}
    before, values = jax.tree.leaves(params), () if named else (params, state)
    jitted: Any = oo.jit(step, donate_argnums=(0, 1))
    params, state = jitted(*values, x=x, **given) if named else jitted(*values, x)
    assert named or all(x.is_deleted() for x in before)
    for _ in range(2):
        given = {"params": params, "state": state, "x": x}
        params, state = jitted(**given) if named else jitted(params, state, x)
    assert jitted._cache_size() == 1


def test_what_is_not_donated_is_not_committed():
    """Nor what has nothing beside it that is, nor anything on a mesh but numbers."""
    step, params, state, x = uncommitted_step()
    jitted = oo.jit(step)
    for _ in range(2):
        params, state = jitted(params, state, x)
    assert jitted._cache_size() == 2
    double = oo.jit(lambda x: 2 * x, donate_argnums=0)
    assert not double(jnp.ones(3)).committed
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step, params, state, x = uncommitted_step(NamedSharding(mesh, P()))
    params, state = oo.jit(step, donate_argnums=(0, 1))(params, state, x)
    assert params["w"].sharding.num_devices == 2


def results_in_place(step, *args, donated=0):
    """For each result that has the place of a donated argument, that, by position."""
    return places(jax.jit(step, donate_argnums=donated).trace(*args))


def test_results_in_the_place_of_donated_arguments():
    """Trees of the same paths and types: at the same position, or the first of them."""
    p, q, x = {"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.ones(2)}, jnp.ones(2)
    assert results_in_place(lambda p: p, p) == {0: 0, 1: 1}
    assert results_in_place(lambda p, x: (x, p), p, x) == {1: 0, 2: 1}
    assert results_in_place(lambda p, x: (p, p), p, x) == {0: 0, 1: 1}
    assert results_in_place(lambda x, p: (p, p), x, p, donated=1) == {2: 1, 3: 2}
    both = (0, 1)
    assert results_in_place(lambda p, r: (p, r), p, p, donated=both) == {
        i: i for i in range(4)
    }
    assert results_in_place(lambda p, r: r, p, p, donated=both) == {0: 0, 1: 1}
    assert results_in_place(lambda p, x: (p, x), p, x, donated=()) == {}
    assert results_in_place(lambda p, x: (x, (x, p)), p, x) == {2: 0, 3: 1}
    assert results_in_place(lambda p, x: ((p, x), p), p, x) == {3: 0, 4: 1}
    assert results_in_place(lambda p, x: (x, {"new": p}), p, x) == {}
    assert results_in_place(lambda p: {"a": p["a"]}, p) == {}
    assert results_in_place(lambda p: q, p) == {}


@pytest.mark.parametrize("fn", [jnp.tanh, lambda w: jnp.roll(w, 1, 0)])
def test_a_result_in_the_place_of_what_rests_returns_there(fn):
    """A queue or a buffer, which is no sum of what it was."""
    params = oo.set_memory_kind(
        {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, "w", HOST_KIND
    )
    step = oo.jit(lambda p, x: (jax.tree.map(fn, p), x), donate_argnums=0)
    for _ in range(2):
        params, _ = step(params, jnp.ones(2))
        assert kinds(params) == ["device", HOST_KIND]
    step = oo.jit(lambda p: (0, [jax.tree.map(fn, p)]), donate_argnums=0)
    assert kinds(step(params)[1]) == ["device", HOST_KIND]

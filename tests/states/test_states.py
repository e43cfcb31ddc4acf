"""Whole states between steps: there and back."""

import functools
import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from state_trees import kinds, make_tree, on_device, steps, there_and_back

import optax_offload as oo
from optax_offload._states import records, states

KINDS = ["pinned_host", "unpinned_host"]


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, donate, block):
    """Every leaf, bit for bit, in its sharding; and sources are freed if asked."""
    tree = make_tree()
    there = there_and_back(tree, donate, block, memory_kind=kind)
    assert there["numpy"] is tree["numpy"]
    assert there["sharded"].is_deleted() == donate


def test_leaves_in_place_are_not_touched():
    """The same objects and buffers; not one transfer of those."""
    tree = {"w": oo.set_memory_kind(jnp.ones(8), "", "pinned_host"), "x": jnp.ones(8)}
    pointer = tree["w"].unsafe_buffer_pointer()
    with jax.transfer_guard("disallow_explicit"):
        again = oo.offload_states(tree, "w")
        back = oo.reload_states(tree, "x")
        with pytest.raises(oo.OffloadError, match="Disallowed"):
            oo.offload_states(tree)  # The guard does see a leaf that moves.
    assert again["w"] is back["w"] is tree["w"]
    assert back["x"] is tree["x"]
    assert tree["w"].unsafe_buffer_pointer() == pointer


def test_what_offload_put_on_the_host_stays():
    """Only what `offload_states` moved comes back."""
    tx = oo.offload(optax.adam(1e-3), ".*/mu/.*")
    params = {"w": on_device(jnp.ones((256, 128)))}
    state = tx.init(params)
    train = {"params": params, "opt": state}
    at_home = kinds(train)
    assert set(at_home.values()) == {"device", "pinned_host"}
    there = oo.offload_states(train)
    assert set(kinds(there).values()) == {"pinned_host"}
    assert there["opt"][0].mu["w"] is state[0].mu["w"]
    back = oo.reload_states(there)
    assert kinds(back) == at_home
    assert kinds(oo.reload_states(back)) == at_home, "also if there is nothing to do"


def test_through_other_kinds_it_comes_back_to_where_it_was():
    """From the device by way of two kinds; from the host by way of another."""
    tree = {"d": jnp.ones(3), "h": oo.set_memory_kind(jnp.ones(3), "", "pinned_host")}
    there = oo.offload_states(oo.offload_states(tree), memory_kind="unpinned_host")
    assert set(kinds(there).values()) == {"unpinned_host"}
    assert kinds(oo.reload_states(there)) == {"d": "device", "h": "pinned_host"}


def test_structure_may_change_meanwhile():
    """The arrays are remembered, not the tree."""
    there = oo.offload_states({"a": jnp.ones(3), "b": jnp.zeros(3)})
    other = jax.tree.map(lambda x: x, {"c": [there["b"]], "d": there["a"]})
    assert set(kinds(oo.reload_states(other)).values()) == {"device"}


def test_include_and_reload_in_parts():
    """By regex, the rest where it is."""
    tree = {"mu": jnp.ones(3), "nu": jnp.ones(3), "w": jnp.ones(3)}
    there = oo.offload_states(tree, "mu|nu")
    assert there["w"] is tree["w"]
    assert kinds(there) == {"mu": "pinned_host", "nu": "pinned_host", "w": "device"}
    assert kinds(oo.reload_states(there, "nu"))["mu"] == "pinned_host"


def test_rules_choose_leaves():
    """Rules of kind device keep, ``min_bytes`` count; a regex takes scalars too."""
    tree = {
        "big": jnp.ones(2**15),
        "embed": jnp.ones(2**15),
        "small": jnp.ones(3),
    }
    rules = [oo.Rule("embed", "device"), oo.Rule(".*")]
    for include in (rules, oo.OffloadConfig(rules)):
        there = oo.offload_states(tree, include, donate=False)
        expected = {"big": "pinned_host", "embed": "device", "small": "device"}
        assert kinds(there) == expected
        assert set(kinds(oo.reload_states(there, include)).values()) == {"device"}
    there = oo.offload_states(tree, oo.Rule("small", min_bytes=0))
    assert kinds(there)["small"] == "pinned_host"


def test_the_same_array_twice():
    """Moved once, and still the same array; freed once."""
    x = jnp.ones(3)
    there = oo.offload_states({"a": x, "b": x}, block=True)
    assert there["a"] is there["b"]
    assert x.is_deleted()
    back = oo.reload_states(there)
    assert back["a"] is back["b"]


@pytest.mark.parametrize("alias", [lambda x: x, lambda x: jax.device_put(x, x.device)])
def test_shared_with_a_leaf_that_stays(alias):
    """Freeing it would free the other, which may be another array of one buffer."""
    x = jnp.ones(3)
    tree = {"a": x, "b": alias(x)}
    with pytest.warns(oo.OffloadWarning, match=r"'a': the same array is also a leaf"):
        there = oo.offload_states(tree, "a", block=True)
    np.testing.assert_array_equal(there["b"], np.ones(3))
    # Both chosen: both arrive, and then the buffer goes.
    there = oo.offload_states(tree, block=True)
    np.testing.assert_array_equal(there["a"], np.ones(3))
    np.testing.assert_array_equal(there["b"], np.ones(3))
    assert x.is_deleted()


def test_what_is_remembered_goes_with_the_array():
    """No list grows with the cycles."""
    gc.collect()
    before = len(records._records)
    tree = {"a": jnp.ones(3)}
    for _ in range(5):
        tree = oo.reload_states(oo.offload_states(tree))
    records.settle()
    del tree
    gc.collect()
    assert len(records._records) == before


def test_sources_are_let_go_of():
    """Kept by the caller or not at all, once copies are good."""
    tree = {"w": jnp.ones(3)}
    source = weakref.ref(tree["w"])
    there = oo.offload_states(tree, donate=False)
    records.settle()
    assert source() is not None
    del tree
    gc.collect()
    assert source() is None
    assert kinds(there) == {"w": "pinned_host"}


@pytest.mark.accelerator
@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("donate", [True, False])
def test_cycles_between_steps_change_no_bit(donate, block, caplog):
    """Also when a step takes, and donates, what is still on its way."""

    def cycle(state):
        state = oo.offload_states(state, donate=donate, block=block)
        return oo.reload_states(state, donate=donate, block=block)

    plain, compiled = steps(lambda state: state)
    cycled, compiled_too = steps(cycle)
    records.settle()
    assert cycled == plain
    assert compiled_too <= compiled + 1, "the counter comes back committed"
    assert not caplog.records


@pytest.mark.parametrize("inside", [True, False])
def test_linen_train_state(inside):
    """Functions in the state stay what they are, with `offload` inside and without."""
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    model = nn.Sequential([nn.Dense(16), nn.LayerNorm(), nn.gelu, nn.Dense(1)])
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    tx = optax.adam(1e-2)
    if inside:
        tx = oo.offload(tx, oo.Rule(".*/(mu|nu)/.*kernel", min_bytes=0))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state):
        loss, grads = jax.value_and_grad(
            lambda params: jnp.mean((state.apply_fn({"params": params}, x) - 1) ** 2)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    def losses(cycle):
        state = train_state.TrainState.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(0), x)["params"],
            tx=tx,
        )
        found = []
        for _ in range(5):
            state, loss = train_step(cycle(state))
            found.append(np.asarray(loss).tobytes())
        return found

    def cycle(state):
        there = oo.offload_states(state)
        assert "device" not in kinds(there).values()
        back = oo.reload_states(there)
        assert ("pinned_host" in kinds(back).values()) == inside
        return back

    assert losses(cycle) == losses(lambda state: state)


def test_nnx_model_and_optimizer():
    """Variables keep their type; so does what is in them."""
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*/mu/.*kernel.*", min_bytes=0))

    @nnx.jit
    def train_step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def losses(cycle):
        model = nnx.Sequential(
            nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(16, rngs=nnx.Rngs(0)),
            nnx.Linear(16, 1, rngs=nnx.Rngs(1)),
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        found = []
        for _ in range(5):
            graph, state = nnx.split((model, optimizer))
            model, optimizer = nnx.merge(graph, cycle(state))
            found.append(np.asarray(train_step(model, optimizer)).tobytes())
        return found

    def cycle(state):
        there = oo.offload_states(state)
        assert "device" not in kinds(there).values()
        back = oo.reload_states(there)
        assert "pinned_host" in kinds(back).values()
        return back

    assert losses(cycle) == losses(lambda state: state)


def test_frozen_dict():
    """Of Flax."""
    flax = pytest.importorskip("flax")
    tree = flax.core.freeze({"params": {"w": jnp.ones(3)}})
    there = oo.offload_states(tree)
    assert isinstance(there, flax.core.FrozenDict)
    assert kinds(oo.reload_states(there)) == {"params/w": "device"}


def counted(monkeypatch, tree):
    """Counts, whenever a copy begins, the arrays that are not deleted."""
    arrays, alive = list(tree.values()), []
    put = jax.device_put

    def counting(x, sharding):
        arrays.append(put(x, sharding))
        alive.append(sum(not x.is_deleted() for x in arrays))
        return arrays[-1]

    monkeypatch.setattr(jax, "device_put", counting)
    return alive


@pytest.mark.parametrize("block", [True, False])
def test_few_are_in_both_places(monkeypatch, block):
    """Each source is freed before there are more than the window."""
    monkeypatch.setattr(states, "COPY_WINDOW_BYTES", 2 * 4096)
    tree = {f"w{i}": on_device(jnp.full(1024, float(i))) for i in range(8)}
    alive = counted(monkeypatch, tree)
    there = oo.offload_states(tree, block=block)
    assert len(alive) == 8
    assert max(alive) <= 8 + 2, "sources and copies together"
    np.testing.assert_array_equal(there["w7"], np.full(1024, 7.0))


def test_calls_do_not_run_ahead(monkeypatch):
    """However small a state is beside the window: one is in both places, not many."""
    tree = {f"w{i}": on_device(jnp.full(1024, float(i))) for i in range(8)}
    alive = counted(monkeypatch, tree)
    wait = jax.block_until_ready
    monkeypatch.setattr(
        jax, "block_until_ready", lambda x: (time.sleep(0.002), wait(x))[1]
    )
    for _ in range(4):
        tree = oo.reload_states(oo.offload_states(tree))
    assert len(alive) == 8 * 8
    assert max(alive) <= 2 * 8
    np.testing.assert_array_equal(tree["w7"], np.full(1024, 7.0))


def test_kept_sources_are_not_waited_for(monkeypatch):
    """Nothing is freed by it."""
    monkeypatch.setattr(states, "COPY_WINDOW_BYTES", 2 * 4096)
    records.settle()  # Nothing of other tests waits at the gate.
    gate = threading.Event()
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (gate.wait(), wait(x))[1])
    tree = {f"w{i}": on_device(jnp.full(1024, float(i))) for i in range(8)}
    there = oo.offload_states(tree, donate=False)
    gate.set()
    records.settle()
    assert kinds(there) == dict.fromkeys(tree, "pinned_host")
    np.testing.assert_array_equal(there["w7"], tree["w7"])


def test_without_block_it_returns_at_once(monkeypatch):
    """Before the copies are there; sources are freed when they are, and not before."""
    records.settle()  # Nothing of other tests waits at the gate.
    gate = threading.Event()
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (gate.wait(), wait(x))[1])
    tree = {"w": jnp.ones(3)}
    there = oo.offload_states(tree)
    assert there["w"].sharding.memory_kind == "pinned_host"
    assert not tree["w"].is_deleted()
    gate.set()
    records.settle()
    assert tree["w"].is_deleted()

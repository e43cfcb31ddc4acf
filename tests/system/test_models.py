"""The models of the examples: as large as published, and they learn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_offload as oo
from examples import models
from optax_offload import aot

# As published: https://arxiv.org/abs/2407.21783 (8B, 70B), the checkpoints' own counts
# for Gemma 2B and GPT-2 XL, and timm's of ViT-H/14 with 1000 classes.
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_8b_loop": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "gemma_2b": 2_506_172_416,
    "gpt2_xl": 1_557_611_200,
    "vit_h": 632_045_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    """To the last one; and the factory moves what it is told to."""
    target = aot.Target("v5e:4x4")
    step = getattr(models, name)(lambda tx: tx, target)
    params, state, batch = step.args
    assert sum(x.size for x in jax.tree.leaves(params)) == PUBLISHED[name]
    copies = 3 if name.startswith(("llama3", "gemma_2b")) else 2
    floats = [x for x in jax.tree.leaves(state) if x.ndim]
    assert sum(x.size for x in floats) == copies * PUBLISHED[name]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    assert all(x.shape[0] % 16 == 0 for x in jax.tree.leaves(batch))
    sizes = [
        (x.size, np.prod(x.sharding.shard_shape(x.shape)))
        for x in jax.tree.leaves(params)
    ]
    sharded = sum(whole for whole, shard in sizes if whole == 16 * shard)
    assert sharded > 0.99 * PUBLISHED[name]


# https://arxiv.org/abs/2407.21783; the third is Llama 3.1's.
BASES = {
    "llama3_8b_lora": PUBLISHED["llama3_8b"],
    "llama3_70b_lora": PUBLISHED["llama3_70b"],
    "llama3_405b_lora": 405_853_388_800,
}


@pytest.mark.parametrize("name", BASES)
def test_the_base_of_adapters_is_as_published(name):
    """All of it is in bfloat16; state is of the adapters alone, two of each matrix."""
    step = getattr(models, name)(lambda tx: tx, aot.Target("h100"), rank=8)
    adapters, state, base, _ = step.args
    assert sum(x.size for x in jax.tree.leaves(base)) == BASES[name]
    assert {x.dtype for x in jax.tree.leaves(base)} == {jnp.dtype("bfloat16")}
    count = sum(x.size for x in jax.tree.leaves(adapters))
    kernels = [x for x in jax.tree.leaves(base["layers"]) if x.ndim == 3]
    assert count == sum(8 * len(x) * sum(x.shape[1:]) for x in kernels)
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 2 * count


def test_adapters_are_added_to_their_matrices():
    """The loss is that of a decoder whose matrices have their products added."""
    shape = dataclasses.replace(LLAMA, rank=4)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 61)
    module = models.Decoder(shape, jnp.float32)
    variables: Any = module.init(jax.random.key(1), tokens)
    tables = {name: 20 * variables["params"][name] for name in ("embedding", "lm_head")}
    variables = variables | {"params": variables["params"] | tables}
    adapters = jax.tree.map(
        lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
        variables["adapters"],
    )
    given = {"params": variables["params"], "adapters": adapters}
    loss: Any = module.apply(given, tokens)
    merged = dict(variables["params"])
    merged["layers"] = {
        name: {"kernel": x["base"]["kernel"] + low["down"] @ low["up"]}
        if (low := adapters["layers"].get(name))
        else x
        for name, x in merged["layers"].items()
    }
    merged = {"params": merged}
    expected: Any = models.Decoder(LLAMA, jnp.float32).apply(merged, tokens)
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    without = jax.tree.map(jnp.zeros_like, adapters)
    plain: Any = module.apply(given | {"adapters": without}, tokens)
    assert abs(plain - expected) > 10 * abs(loss - expected)


def test_offload_goes_around_adam():
    """Its state is what goes to the host."""
    step = models.gemma_2b(oo.offload, aot.Target("h100"))
    kinds = {
        x.sharding.memory_kind for x in jax.tree.leaves(step.args[1]) if x.ndim > 2
    }
    assert kinds == {"pinned_host"}


def test_parameters_have_a_known_dtype():
    """Others are refused."""
    with pytest.raises(ValueError, match="params is 'int8'; it must be 'bfloat16' or"):
        models.gemma_2b(lambda tx: tx, aot.Target("h100"), params="int8")


def test_a_context_is_no_longer_than_what_was_learned():
    """Rotary positions have no end."""
    with pytest.raises(ValueError, match="is 4096, more than the 2048 positions"):
        models.gpt3_175b(lambda tx: tx, aot.Target("h100"), context=4096)
    step = models.gemma_2b(lambda tx: tx, aot.Target("h100"), context=16384)
    assert jax.tree.leaves(step.args[2])[0].shape == (1, 16385)


LLAMA = models.Shape(2, 32, 4, 2, 8, 64, 61)
GPT = models.Shape(2, 32, 4, 4, 8, 64, 61, None, tied=True, learned_positions=16)


def gradients(fn, *args):
    """Of the sum of squares of what a function returns, and that."""

    def loss(*args):
        return jnp.sum(fn(*args).astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args)))))(*args)


@pytest.mark.slow
def test_chunks_change_nothing(monkeypatch):
    """Attention and the loss in chunks are those that are computed whole."""
    keys = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(keys[0], (2, 16, 4, 8))
    key, value = (jax.random.normal(k, (2, 16, 2, 8)) for k in keys[1:3])
    x = jax.random.normal(keys[3], (2, 16, 8))
    head = jax.random.normal(keys[4], (8, 61))
    targets = jnp.arange(32).reshape(2, 16)

    def attention(*args):
        return models._attention(*args, causal=True)

    def cross_entropy(x, head):
        return models._cross_entropy(x, head, targets)

    def both():
        return gradients(attention, query, key, value), gradients(
            cross_entropy, x, head
        )

    whole = both()
    monkeypatch.setattr(models, "CHUNK", 4)
    for a, b in zip(*map(jax.tree.leaves, (whole, both())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    expected = optax.softmax_cross_entropy_with_integer_labels(x @ head, targets)
    np.testing.assert_allclose(cross_entropy(x, head), expected.mean(), rtol=1e-5)


@pytest.mark.parametrize("chunk", [4, 512])
def test_no_query_sees_a_later_key(chunk, monkeypatch):
    """In chunks and whole."""
    monkeypatch.setattr(models, "CHUNK", chunk)
    query = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
    key, value = query[:, :, :1] + 1, query[:, :, :1] - 1

    def outputs(value):
        return models._attention(query, key, value, causal=True).sum(axis=(0, 2, 3))

    seen = np.abs(jax.jit(jax.jacobian(outputs))(value)).sum(axis=(1, 3, 4))
    np.testing.assert_array_equal(seen > 0, np.tri(8, dtype=bool))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [LLAMA, GPT])
def test_it_trains(shape):
    """A tiny decoder of the same code, offloaded, on the CPU."""
    tokens = jnp.tile(jnp.arange(17), (4, 1))
    module = models.Decoder(shape, jnp.bfloat16)
    params = jax.jit(module.init)(jax.random.key(0), tokens)["params"]
    rule = oo.Rule(".*", min_bytes=8)
    tx = oo.offload(oo.master_weights(optax.adam(1e-2)), rule)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: module.apply({"params": p}, tokens))(
            params
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.device_put(params, jax.devices()[0])
    state, losses = tx.init(params), []
    for _ in range(8):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_a_vit_has_a_loss(monkeypatch):
    """Of images and classes, and gradients of all of its parameters."""
    monkeypatch.setattr(models, "IMAGE", 28)
    shape = models.Shape(1, 16, 2, 2, 8, 32, 10, gated=None, learned_positions=5)
    images, labels = jnp.ones((2, 28, 28, 3)), jnp.array([1, 2])
    module = models.VisionTransformer(shape, jnp.float32)
    params = jax.jit(module.init)(jax.random.key(0), images, labels)["params"]
    value_and_grad = jax.value_and_grad(
        lambda p: module.apply({"params": p}, images, labels)
    )
    loss, grads = jax.jit(value_and_grad)(params)
    assert np.isclose(loss, np.log(10), atol=1.0)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))

"""`fit` of models that are not in the repository, written as libraries' guides do.

A module with a factory for each library is written into a folder, and the command is
run there.
"""

import importlib
import json
import sys

import jax
import pytest
from typer.testing import CliRunner

import optax_offload as oo
from optax_offload import aot
from optax_offload.cli import command

H100 = aot.Target("h100")
MIB = 2**20

MODELS = """
import equinox as eqx
import jax, jax.numpy as jnp, optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import optax_offload as oo

LAYERS, WIDTH, WORDS, TOKENS = 12, 256, 4096, (4, 128)


def tokens():
    return jax.ShapeDtypeStruct(TOKENS, jnp.int32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        heads = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)
        x = x + heads(x, mask=mask)
        y = nn.Dense(4 * WIDTH, use_bias=False)(x)
        return x + nn.Dense(WIDTH, use_bias=False)(nn.gelu(y)), None


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, WIDTH)
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = blocks()(embed(tokens), nn.make_causal_mask(tokens))
        return embed.attend(x)


def linen(offload, target):
    model = LanguageModel()
    tx = optax.chain(optax.clip_by_global_norm(1.0), offload(optax.adamw(1e-3)))

    def create(key):
        params = model.init(key, jnp.zeros(TOKENS, jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, tokens):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            )
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = oo.eval_shape(create, jax.random.key(0))
    return oo.Step(train_step, (state, tokens()), donate_argnums=0)


class Mixer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Classifier(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Mixer(rngs)

        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = create(rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(layer, x):
            return layer(x)

        return self.head(forward(self.layers, self.embed(tokens)).mean(axis=1))


def in_nnx(offload, target):
    tx = offload(optax.lamb(1e-3))

    def create():
        model = Classifier(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(create))

    def train_step(state, tokens, labels):
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(tokens), labels
            )
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    state = oo.eval_shape(lambda: nnx.state(create()))
    labels = jax.ShapeDtypeStruct(TOKENS[:1], jnp.int32)
    return oo.Step(train_step, (state, tokens(), labels), donate_argnums=0)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(WIDTH, WIDTH, use_bias=False, key=key)

    def __call__(self, xs):
        def cell(h, x):
            h = self.cell(x, h)
            return h, h

        _, ys = jax.lax.scan(cell, jnp.zeros(WIDTH), xs)
        return xs + ys


class Tagger(eqx.Module):
    embed: eqx.nn.Embedding
    layers: Recurrent
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=first)
        keys = jax.random.split(second, LAYERS)
        self.layers = eqx.filter_vmap(Recurrent)(keys)
        self.head = eqx.nn.Linear(WIDTH, 17, key=third)

    def __call__(self, tokens):
        rows, static = eqx.partition(self.layers, eqx.is_array)

        @jax.checkpoint
        def layer(x, row):
            return eqx.combine(row, static)(x), None

        x, _ = jax.lax.scan(layer, jax.vmap(self.embed)(tokens), rows)
        return jax.vmap(self.head)(x)


def in_equinox(offload, target):
    tx = offload(optax.adamw(1e-3))
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = eqx.filter_eval_shape(Tagger, key)
    is_struct = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    params, static = eqx.partition(model, is_struct)

    def train_step(params, state, tokens, labels):
        @eqx.filter_value_and_grad
        def loss_fn(params):
            logits = jax.vmap(eqx.combine(params, static))(tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        loss, grads = loss_fn(params)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, loss

    state = oo.eval_shape(tx.init, params)
    args = (params, state, tokens(), tokens())
    return oo.Step(train_step, args, donate_argnums=(0, 1))
"""


@pytest.fixture
def others(tmp_path, monkeypatch):
    """The module of the models, in the current directory."""
    pytest.importorskip("equinox")
    (tmp_path / "other_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_models", raising=False)
    return importlib.import_module("other_models")


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget"),
    [("linen", 70 * MIB), ("in_nnx", 64 * MIB), ("in_equinox", 64 * MIB)],
)
def test_fit(others, name, budget, tmp_path):
    """The step is not changed for it, and the file fits when compiled by hand."""
    make_step = getattr(others, name)
    ran = CliRunner(env={"COLUMNS": "160"}).invoke(
        command.app,
        [
            *("fit", f"other_models:{name}", "--target", "h100"),
            *("--budget", f"{budget}B", "--out", "rules.toml", "--no-cache", "--json"),
        ],
    )
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["before"]["used_bytes"] > budget
    config = oo.load_config(tmp_path / "rules.toml")
    step = make_step(lambda inner: oo.offload(inner, config), H100)
    args = step.args
    if config.parameters:
        pattern = "|".join(rule.regex for rule in config.parameters)
        paths = rf"(?!.*(mu|nu)/)(.*/)?({pattern})"
        args = oo.set_memory_kind(args, paths, "pinned_host")
    jitted = oo.jit(step.fn, donate_argnums=step.donate_argnums, **config.step)
    compiled = aot.compile(jitted, *args, target=H100)
    assert aot.peak(compiled).peak_bytes == found["after"]["used_bytes"] <= budget
    assert aot.step_time(compiled, H100).seconds == found["after"]["time"]["seconds"]
    assert jax.tree.structure(args) == jax.tree.structure(step.args)

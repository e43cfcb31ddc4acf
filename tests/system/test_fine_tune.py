"""A base that other libraries quantize, or hold, rests on the host in a whole step.

The programs are those of examples/lora, at toy size; what a step takes of a device is
read from programs that are compiled for one.
"""

import functools
import pathlib
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import optax_offload as oo
from optax_offload import aot

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples" / "lora"
# Both use names of Flax and JAX that are to go.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tunix"),
    pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning"),
]

LAYERS, WIDTH, INNER, RANK = 12, 2048, 8192, 8
# All matrices, decoded, in float32.
DECODED_BYTES = LAYERS * 2 * WIDTH * INNER * 4
MOMENTS = oo.Rule(".*/(mu|nu)/.*", min_bytes=0)


class LinenBlock(nn.Module):
    """A residual block whose layers are scanned."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.Dense(INNER, use_bias=False)(nn.RMSNorm()(x))
        return x + nn.Dense(WIDTH, use_bias=False)(nn.gelu(y)), None


class LinenModel(nn.Module):
    """The blocks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return layers(name="layers")(x, None)[0]


class Block(nnx.Module):
    """A residual block, with adapters of NNX or without."""

    def __init__(self, rngs: nnx.Rngs, adapted: bool):
        linear = nnx.Linear
        if adapted:
            linear = functools.partial(nnx.LoRALinear, lora_rank=RANK)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = linear(WIDTH, INNER, use_bias=False, rngs=rngs)
        self.down = linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """The blocks, in a list."""

    def __init__(self, rngs: nnx.Rngs, adapted: bool = False):
        self.layers = nnx.List([Block(rngs, adapted) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def with_adapters(model: Any, *args: Any, **kwargs: Any) -> Any:
    """A model with its matrices in NF4 and adapters beside each, by qwix."""
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(
        module_path=".*", weight_qtype="nf4", tile_size=64, rank=RANK, alpha=8.0
    )
    return qwix.apply_lora_to_model(model, provider, *args, **kwargs)


def linen_of_qwix(x: jax.Array) -> Any:
    """Adapters, the base at rest, and the model as a function of both."""
    model = with_adapters(LinenModel())
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), x)["params"])
    flat = flatten_dict(params)
    adapters = {path: v for path, v in flat.items() if "lora" in path[-1]}
    base = {path: v for path, v in flat.items() if path not in adapters}
    base = oo.set_memory_kind(base, ".*(qvalue|array/scale)", "pinned_host")
    return (
        adapters,
        base,
        lambda a, b, x: model.apply({"params": unflatten_dict(b | a)}, x),
    )


def of_nnx(model: Any, at_rest: Any) -> Any:
    """As `linen_of_qwix`, of an object."""
    graph, adapters, base = nnx.split(model, nnx.LoRAParam, ...)

    def apply(adapters: Any, base: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, adapters, base)(x)

    return adapters, at_rest(base), apply


def nnx_of_qwix(x: jax.Array) -> Any:
    """As `linen_of_qwix`, of a list of layers."""

    def make() -> Any:
        return with_adapters(Model(nnx.Rngs(0)), x, rngs=nnx.Rngs(1))

    return of_nnx(
        nnx.eval_shape(make),
        lambda base: oo.set_memory_kind(
            base, ".*(qvalue|array/scale).*", "pinned_host"
        ),
    )


def adapters_of_nnx(x: jax.Array) -> Any:
    """`nnx.LoRALinear` over a base in our codec."""
    del x
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0), adapted=True))
    return of_nnx(model, lambda base: oo.place(base, oo.Rule(".*kernel", codec="nf4")))


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("make", [linen_of_qwix, nnx_of_qwix, adapters_of_nnx])
def test_a_step_has_few_layers_of_the_base_on_the_device(make):
    """Of twelve, decoded, the memory of three; the codes are all on the host."""
    x = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)
    adapters, base, apply = make(jnp.ones(x.shape))
    tx = oo.offload(optax.adamw(1e-3), MOMENTS)

    def step(adapters: Any, state: Any, base: Any, x: Any) -> Any:
        def loss_of(adapters: Any) -> jax.Array:
            return jnp.mean(jnp.square(apply(adapters, base, x) - 1))

        loss, gradients = jax.value_and_grad(loss_of)(adapters)
        updates, state = tx.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, loss

    state = oo.eval_shape(tx.init, adapters)
    jitted = oo.jit(step, donate_argnums=(0, 1))
    target = aot.Target("rtx4090")
    peak = aot.peak(aot.compile(jitted, adapters, state, base, x, target=target))
    assert peak.peak_bytes < DECODED_BYTES / 4
    assert DECODED_BYTES / 8 <= peak.host_argument_bytes < DECODED_BYTES / 3
    assert peak.host_temporary_bytes == 0


PROGRAMS = {
    "nnx_lora": (),
    "qwix_linen": ("qwix",),
    "qwix_nnx": ("qwix",),
    "tunix_peft": ("qwix", "tunix"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_adapters_alone(name, tmp_path, monkeypatch):
    """Its loss falls, and the matrices of the base rest on the host in few bits."""
    for package in PROGRAMS[name]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    first, *_, last = found["losses"]
    assert last < 0.8 * first
    at_rest = 0
    for row in oo.memory_report(found["base"]).rows:
        is_norm = row.path.endswith(("norm/scale", "'scale')"))
        assert row.actual == ("device" if is_norm else "pinned_host"), row
        at_rest += 0 if is_norm else row.nbytes
    # Of 4 bits, which are 8 on a host where qwix has them, and scales.
    assert at_rest <= 4 * 2 * 128 * 512 * (1 + 4 / 64)

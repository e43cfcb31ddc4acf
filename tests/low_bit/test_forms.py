"""State in another form than its rule names: told, converted, and seen by reports."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from low_bit_cases import MOMENTS, distance, encoded_leaves
from small_steps import train_step

import optax_offload as oo

PARAMS = {"w": jnp.linspace(-1, 1, 4096).reshape(16, 256), "b": jnp.ones(8)}
LR = 1e-2
changes = pytest.mark.parametrize(
    ("was", "now"), [(None, "int8"), ("int8", "bfloat16"), ("int8", None)]
)


def rule(codec, **options):
    """Both moments in a format, or in none."""
    return oo.Rule(MOMENTS, min_bytes=8, codec=codec, **options)


def offloaded(codec, on_misplaced="raise"):
    """Adam with such a rule."""
    return oo.offload(optax.adam(LR), rule(codec), on_misplaced=on_misplaced)


def state_of(codec, params=PARAMS):
    """The state after a step."""
    tx = offloaded(codec)
    return tx.update(params, tx.init(params), params)[1]


def name(codec):
    """As messages have it."""
    return "no codec" if codec is None else codec


def forms(state):
    """The codec of each encoded leaf."""
    return {path: x.codec.name for path, x in encoded_leaves(state).items()}


@changes
def test_another_form_is_an_error(was, now):
    """From update and from a report, with the leaves and the line that converts."""
    state = state_of(was)
    said = f"'0/mu/w'.* in {was or 'float32'}.*, where the rules say {name(now)}"
    with pytest.raises(oo.CodecError, match=said) as error:
        offloaded(now).update(PARAMS, state, PARAMS)
    for remedy in (
        "0/nu/w",
        "optax_offload.place(state, rules)",
        'on_misplaced="move"',
    ):
        assert remedy in str(error.value)
    said = f"another form .*\n  0/mu/w.*: {was or 'float32'}, where the rules say "
    with pytest.raises(oo.CodecError, match=said + name(now)):
        oo.memory_report(state, rule(now)).check()


@changes
def test_another_form_may_be_converted_in_a_step(was, now):
    """With a warning, and one compilation more; the update is that of either form."""
    tx, state = offloaded(now, "move"), state_of(was)
    update = jax.jit(tx.update)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", oo.OffloadWarning)
        updates, state = update(PARAMS, state, PARAMS)
    (told,) = told
    assert told.category is oo.OffloadWarning
    assert "This step converts it, and the next one is compiled" in str(told.message)
    want, _ = offloaded(was).update(PARAMS, state_of(was), PARAMS)
    assert distance(updates, want) < 1e-6
    for _ in range(2):
        _, state = update(PARAMS, state, PARAMS)
    assert update._cache_size() == 2
    oo.memory_report(state, rule(now)).check()
    assert forms(state) == dict.fromkeys(["0/mu/w", "0/nu/w"], now) if now else True


@pytest.mark.slow
def test_a_fused_step_converts():
    """Layer by layer in the backward scan, and the second call finds codes."""
    weights = jax.random.normal(jax.random.key(0), (4, 64, 64)) / 8
    tx = offloaded("int8", "move")
    state = state_of(None, {"layers": weights})

    def loss(params, x):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(body, x, params["layers"])[0] ** 2)

    step = oo.jit(train_step(tx, loss))
    x, params = jnp.ones((8, 64)), {"layers": weights}
    with pytest.raises(oo.CodecError, match="'0/mu/layers', '0/nu/layers' in float32"):
        jax.eval_shape(offloaded("int8").update, params, state)
    with pytest.warns(oo.OffloadWarning, match="This step converts it"):
        params, state = step(params, state, x)
    assert forms(state) == dict.fromkeys(["0/mu/layers", "0/nu/layers"], "int8")
    params, state = step(params, state, x)
    oo.memory_report(state, rule("int8")).check()
    assert np.all(np.isfinite(np.asarray(params["layers"])))


@pytest.mark.parametrize("loaded", [False, True])
@changes
def test_place_converts(was, now, loaded):
    """To each form from each, also of what a loader gave as NumPy, and under a path."""
    plain = oo.low_bit_decode(state_of(was))
    state = {"step": jnp.zeros((), jnp.int32), "opt": state_of(was)}
    state = jax.device_get(state) if loaded else state
    placed = oo.place(state, rule(now), under="opt")
    assert isinstance(placed["step"], np.ndarray if loaded else jax.Array)
    got = placed["opt"]
    oo.memory_report(placed, rule(now), under="opt").check()
    like = oo.eval_shape(offloaded(now).init, PARAMS)
    assert jax.tree.structure(got) == jax.tree.structure(like)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(got)] == [
        x.sharding.memory_kind for x in jax.tree.leaves(like)
    ]
    assert distance(oo.low_bit_decode(got), plain) < 0.02
    # The same objects where nothing is to be done.
    again = oo.place(got, rule(now))
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(got), strict=True):
        assert x is y


def test_codes_are_sharded_as_their_values():
    """Of a state on four devices, and of NumPy beside its parameters."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(PARAMS, NamedSharding(mesh, P("x")))
    state = state_of(None, params)
    for given in (state, jax.device_get(state)):
        tree = {"params": params, "opt": given}
        codes = oo.place(tree, rule("int8"), under="opt")["opt"][0].nu["w"].codes
        assert codes.sharding.spec[0] == "x"
        assert codes.sharding.memory_kind == "pinned_host"


def test_place_says_what_codes_cannot_hold():
    """A moment that is not finite is not encoded."""
    state = state_of(None)
    mu = {**state[0].mu, "w": state[0].mu["w"].at[3, 5].set(jnp.nan)}
    with pytest.raises(ValueError, match=r"^'0/mu/w': values that are infinite or NaN"):
        oo.place((state[0]._replace(mu=mu), *state[1:]), rule("int8"))


def test_another_sign_is_another_form():
    """It changes what codes stand for."""
    state, signed = state_of("int8"), rule("int8", signed=True)
    with pytest.raises(oo.CodecError, match="'0/nu/w' in int8 without a sign, where"):
        oo.offload(optax.adam(LR), signed).update(PARAMS, state, PARAMS)
    assert oo.place(state, signed)[0].nu["w"].codec.signed


def test_low_bit_alone():
    """Its message has its own line, which is right."""
    tx, plain = oo.low_bit(optax.adam(LR), MOMENTS), optax.adam(LR).init(PARAMS)
    with pytest.raises(oo.CodecError, match=r"state = optax_offload\.low_bit_encode\("):
        tx.update(PARAMS, plain, PARAMS)
    like = oo.eval_shape(tx.init, PARAMS)
    state = oo.low_bit_encode(oo.low_bit_decode(plain, PARAMS), like)
    tx.update(PARAMS, state, PARAMS)


def test_what_low_bit_inside_encodes_is_its_own():
    """Rules around it need not name its codecs, and must not."""
    inner = oo.low_bit(optax.adam(LR), ".*/mu/.*")
    for rules in (rule(None), oo.Rule(".*/nu/.*", codec="float8", min_bytes=8)):
        tx = oo.offload(inner, rules)
        state = tx.init(PARAMS)
        _, new = tx.update(PARAMS, state, PARAMS)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert forms(new)["0/mu/w"] == "int8"
    with pytest.raises(ValueError, match=r"^'0/mu/w': encoded already, by a low_b"):
        oo.offload(inner, rule("int8")).init(PARAMS)


def test_a_leaf_that_widens_is_encoded():
    """Bfloat16 moments that hyperparameters make float32, in a rule with bfloat16."""
    inner = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)
    tx = oo.offload(inner(LR, b1=0.9), rule("bfloat16"))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state = tx.init(params)
    assert forms(state) == {}
    for _ in range(2):
        _, state = jax.jit(tx.update)(params, state, params)
        assert forms(state)["inner_state/0/mu/w"] == "bfloat16"

"""`offload` itself: sharding, trees of every form, warnings, and every error."""

import functools
import typing
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import program
import pytest
from flax import nnx
from harness import EVERYTHING, assert_close, bits
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

PARAMS = {"w": jnp.ones((256, 128)), "b": jnp.ones(128)}


def test_every_public_name_says_what_it_is():
    """In words of its own, as `help` shows them."""
    for name in oo.__all__:
        assert getattr(oo, name).__module__.startswith("optax_offload"), name
        assert getattr(oo, name).__doc__, name


def test_step_counter_stays_on_the_device():
    """By the default rule too."""
    state = oo.offload(optax.adam(1e-3)).init(PARAMS)
    assert state[0].count.sharding.memory_kind == "device"
    assert state[0].mu["w"].sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("window_bytes", [2**16, None])
def test_a_cpu_does_not_make_one_function_of_a_loop(window_bytes):
    """In which it would round otherwise, and which takes it several times as long."""
    tx = oo.offload(optax.trace(0.9), window_bytes=window_bytes)
    compiled = jax.jit(tx.update).lower(PARAMS, tx.init(PARAMS)).compile().as_text()
    assert compiled
    assert "while(" in compiled
    assert "xla_cpu_small_call" not in compiled


def bodies_of_loops(jaxpr):
    """Those in nested jits and custom rules too, but not those in loops."""
    for e in jaxpr.eqns:
        if e.primitive.name == "while":
            yield e.params["body_jaxpr"]
            continue
        for parameter in e.params.values():
            if isinstance(parameter, jex.ClosedJaxpr):
                yield from bodies_of_loops(parameter.jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("window_bytes", [2**14, None])
def test_like_loops_are_traced_once(window_bytes):
    """And unlike ones, by a number of an update or by a shape alone, are not."""
    labels = {f"{kind}_{i}": kind for kind in "abc" for i in range(64)}
    params = {
        name: jnp.full((16, 128 if kind in "ab" else 64), 1 + i / 64)
        for i, (name, kind) in enumerate(labels.items())
    }
    rates = {"a": 1e-2, "b": 2e-2, "c": 2e-2}
    plain = optax.partition({k: optax.adamw(r) for k, r in rates.items()}, labels)
    tx = oo.offload(plain, EVERYTHING, window_bytes=window_bytes)
    state = tx.init(params)
    jaxpr = program.emitted(jax.make_jaxpr(tx.update)(params, state, params))
    bodies = list(bodies_of_loops(jaxpr))
    (update,) = tx.schedule(params).straights()
    loops = len(update.loops)
    assert len(bodies) == loops
    assert len({id(body) for body in bodies}) == 3 < loops
    expected = jax.jit(plain.update)(params, plain.init(params), params)
    assert bits(jax.jit(tx.update)(params, state, params)) == bits(expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("context", [True, False])
def test_sharded_state_keeps_its_sharding_and_kind(axis_type, context):
    """As with FSDP: moments are sharded like their parameters.

    Through init and two steps, eagerly and under jit, and nothing is compiled twice.
    """
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, P(None, "x"))
    params = {"w": jax.device_put(jnp.ones((64, 512)), sharding)}
    tx = oo.offload(optax.adamw(1e-3))

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def check(state):
        oo.memory_report(state, ".*").check()
        for x in (state[0].mu["w"], state[0].nu["w"]):
            assert x.sharding.is_equivalent_to(
                sharding.with_memory_kind("pinned_host"), 2
            )
            assert x.addressable_shards[0].data.shape == (64, 128)

    def train():
        state = tx.init(params)
        check(state)
        trained, state = step(params, state)
        check(state)
        trained, state = step(trained, state)
        check(state)
        assert step._cache_size() == 1
        return tx.update(params, state, trained)

    if context:
        with jax.set_mesh(mesh):
            updates, state = train()
    else:
        updates, state = train()
    check(state)
    assert updates["w"].sharding.is_equivalent_to(sharding, 2)


def test_sharded_state_has_the_bits_of_plain_state():
    """On four devices as on one."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    params = jax.device_put(
        {"w": jnp.linspace(0, 1, 64 * 512).reshape(64, 512)},
        NamedSharding(mesh, P(None, "x")),
    )
    inner = optax.adamw(1e-3)
    tx = oo.offload(inner)
    got = tx.update(params, tx.init(params), params)
    want = jax.jit(inner.update)(params, inner.init(params), params)
    assert bits(got) == bits(want)


def test_flax_partitioning_metadata_survives():
    """`nn.with_partitioning` boxes parameters; the moments are boxed alike."""
    dense = nn.Dense(
        256, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "x"))
    )
    params = dense.init(jax.random.key(0), jnp.ones((1, 128)))["params"]
    tx = oo.offload(optax.adam(1e-3))
    state = tx.init(params)
    box = state[0].mu["kernel"]
    assert isinstance(box, nn.Partitioned)
    assert box.names == (None, "x")
    assert box.value.sharding.memory_kind == "pinned_host"
    assert nn.get_partition_spec(state)[0].mu["kernel"] == P(None, "x")


def test_nnx_optimizer_and_its_metadata():
    """`nnx.Optimizer` keeps kinds from step to step, and the variables' metadata."""
    model = nnx.Linear(
        128,
        256,
        kernel_init=nnx.with_metadata(nnx.initializers.ones, note="kept"),
        rngs=nnx.Rngs(0),
    )
    optimizer = nnx.Optimizer(model, oo.offload(optax.adam(1e-3)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.mean(m(jnp.ones((2, 128))) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(2):
        step(model, optimizer)
        state = nnx.state(optimizer.opt_state)
        report = oo.memory_report(state)
        kinds = {row.path: row.actual for row in report.rows if row.nbytes >= 65536}
        assert len(kinds) == 2
        assert set(kinds.values()) == {"pinned_host"}
    assert optimizer.opt_state[0].mu["kernel"].get_metadata()["note"] == "kept"


def test_paths_of_nnx_optimizers(tmp_path):
    """The same wherever there are rules; an old rule says what it is to be."""
    rule = "0/mu/kernel"

    def make(tx):
        model = nnx.Linear(128, 256, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def state_of(model, optimizer):
        return nnx.state((model, optimizer))

    tx = oo.offload(optax.adam(1e-3), rule)
    model, optimizer = make(tx)
    grads = nnx.grad(lambda m: jnp.mean(m(jnp.ones((2, 128))) ** 2))(model)
    optimizer.update(model, grads)
    state = state_of(model, optimizer)
    report = oo.memory_report(state, rule, under="1/opt_state").check()
    assert report.totals["pinned_host"] == 128 * 256 * 4
    template = oo.eval_shape(lambda: state_of(*make(tx)))
    on_device = oo.set_memory_kind(state, "1/opt_state/" + rule, "device")
    for like in ({"like": template}, {"like": rule, "under": "1/opt_state"}):
        placed = oo.place(on_device, **like)
        oo.memory_report(placed, rule, under="1/opt_state").check()
    parked = oo.offload_states(state, "0/kernel", donate=False, block=True)
    assert oo.memory_report(parked).totals["pinned_host"] == 2 * 128 * 256 * 4
    old = oo.offload(optax.adam(1e-3), rule + "/value")
    with pytest.raises(ValueError, match="Write '0/mu/kernel', which matches"):
        make(old)


class Point(typing.NamedTuple):
    x: typing.Any
    y: typing.Any


LEAVES = st.tuples(
    st.sampled_from([(), (0,), (3,), (2, 5), (4, 0, 2)]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
TREES = st.recursive(
    LEAVES.map(lambda leaf: np.ones(leaf[0], leaf[1])) | st.none() | st.just({}),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b_1", "b_10"]), children, max_size=3)
        | st.tuples(children, children).map(lambda xy: Point(*xy))
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(TREES, st.sampled_from([".*", ".*mu.*", ".*nu.*", ".*/0.*", "none"]))
def test_any_tree_of_parameters(params, pattern):
    """Structure, bits and placement, for random trees and rules."""
    rule = oo.Rule(pattern, min_bytes=0, optional=True)
    inner = optax.adam(1e-2)
    tx = oo.offload(inner, rule)
    state, want = tx.init(params), inner.init(params)
    grads = jax.tree.map(lambda p: (p * 0.3).astype(p.dtype), params)
    for _ in range(2):
        assert jax.tree.structure(state) == jax.tree.structure(want)
        assert bits(state) == bits(want)
        oo.memory_report(state, rule).check()
        updates, state = tx.update(grads, state, params)
        want_updates, want = jax.jit(inner.update)(grads, want, params)
        assert bits(updates) == bits(want_updates)


def test_extra_arguments_reach_the_optimizer():
    """Numbers are traced, functions and flags are not."""
    seen = []

    def update(updates, state, params=None, *, scale, flag, fn):
        seen.append(flag)
        return jax.tree.map(lambda u: fn(u) * scale, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda p: p, update)
    tx = oo.offload(inner)
    state = tx.init(PARAMS)
    for scale in (2.0, 3.0):
        updates, _ = tx.update(PARAMS, state, scale=scale, flag=True, fn=jnp.negative)
        np.testing.assert_array_equal(updates["b"], jnp.full(128, -scale))
    assert seen == [True], "another number must not compile again"
    traced = jax.jit(functools.partial(tx.update, flag=False, fn=jnp.exp, scale=1.0))
    traced(PARAMS, state)
    assert seen == [True, False]


@pytest.mark.parametrize(
    "inner",
    [optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.1), optax.adam(1e-2)],
    ids=["a norm", "norms", "state on the device"],
)
def test_an_update_without_state_on_the_host_is_the_plain_one(inner):
    """Equation for equation."""
    tx = oo.offload(inner, oo.Rule(".*", "device", optional=True))
    args = PARAMS, inner.init(PARAMS), PARAMS
    got, want = (str(jax.make_jaxpr(x.update)(*args)) for x in (tx, inner))
    assert got == want


def test_state_that_does_not_change_does_not_move():
    """A leaf that comes back as it came is neither loaded nor stored."""
    inner = optax.GradientTransformation(
        lambda p: p, lambda updates, state, params=None: (updates, state)
    )
    tx = oo.offload(inner)
    closed = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS))
    assert "device_put" not in str(program.emitted(closed))


def test_host_state_that_rules_keep_on_the_device_comes_back():
    """Rules may change between runs: state goes where they now want it."""
    state = oo.offload(optax.adam(1e-3)).init(PARAMS)
    rules = oo.Rule(".*/nu/.*")
    _, state = oo.offload(optax.adam(1e-3), rules).update(PARAMS, state)
    oo.memory_report(state, rules).check()


def test_random_keys_stay_on_the_device():
    """JAX would trace a key that is on the host as one that is not."""
    tx = oo.offload(optax.noisy_sgd(0.1, key=0), oo.Rule(".*", min_bytes=0))
    state = tx.init(PARAMS)
    row = oo.memory_report(state, oo.Rule(".*", min_bytes=0)).check().rows[1]
    if jnp.issubdtype(state[0].rng_key.dtype, jax.dtypes.prng_key):
        assert (row.path, row.actual) == ("0/rng_key", "device")
        assert "random keys cannot move" in row.why
    tx.update(PARAMS, state, PARAMS)


MISPLACED = "planned for pinned_host came to update on the device: '0/mu/w', '0/nu/w'"


@pytest.mark.parametrize("jitted", [False, True])
def test_state_that_came_on_the_device_is_an_error(jitted):
    """As from a template that lost its memory kinds; it says what mends that."""
    tx = oo.offload(optax.adam(1e-3))
    update = jax.jit(tx.update) if jitted else tx.update
    with pytest.raises(oo.MemoryKindError, match=MISPLACED) as error:
        update(PARAMS, optax.adam(1e-3).init(PARAMS), PARAMS)
    first, second, *_ = str(error.value).splitlines()[1:]
    assert "- a checkpoint restored without memory kinds, or NumPy arrays: st" in first
    assert "- state that the init of another optimizer made: make it with th" in second
    assert str(error.value).endswith('on_misplaced="move")')


def test_state_that_came_on_the_device_may_be_moved():
    """In a first step after a plain restore: with a warning, and one compilation."""
    tx = oo.offload(optax.adam(1e-3), on_misplaced="move")
    update = jax.jit(tx.update)
    with pytest.warns(oo.OffloadWarning, match=MISPLACED):
        _, state = update(PARAMS, optax.adam(1e-3).init(PARAMS), PARAMS)
    oo.memory_report(state, ".*").check()
    for _ in range(2):
        _, state = update(PARAMS, state, PARAMS)
    assert update._cache_size() == 2


def test_misplaced_state_in_a_branch_is_named():
    """Where JAX would say no more than that the branches differ."""
    tx = oo.offload(optax.adam(1e-3))
    state = optax.adam(1e-3).init(PARAMS)

    @jax.jit
    def step(state, go):
        return jax.lax.cond(go, lambda: tx.update(PARAMS, state)[1], lambda: state)

    with pytest.raises(oo.MemoryKindError, match=MISPLACED):
        step(state, True)


def test_state_may_grow_beyond_the_least_bytes():
    """As of bfloat16 parameters, when hyperparameters of float32 widen the moments."""
    inner = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)
    tx = oo.offload(inner(b1=0.9, learning_rate=1e-3))
    # 48 KiB before the first update, and 96 after it; the rule's least is 64.
    params = {"w": jnp.ones(24576, jnp.bfloat16), "v": jnp.ones(65536, jnp.bfloat16)}
    state = tx.init(params)
    assert state.inner_state[0].mu["w"].sharding.memory_kind == "device"
    for _ in range(2):
        _, state = jax.jit(tx.update)(params, state, params)
        mu = state.inner_state[0].mu["w"]
        assert (mu.dtype, mu.sharding.memory_kind) == (jnp.float32, "pinned_host")


def test_on_misplaced_is_one_of_two():
    """A typing mistake is found at once."""
    with pytest.raises(ValueError, match="on_misplaced is 'mvoe'; it must be"):
        oo.offload(optax.adam(1e-3), on_misplaced="mvoe")


def test_extra_arguments_go_through_multi_steps():
    """Optax types its gradient_transformation() as one that takes none."""

    def update(updates, state, params=None, *, scale=1.0, **extra_args):
        return jax.tree.map(lambda u: u * scale, updates), state

    scaled = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = oo.offload(optax.MultiSteps(optax.chain(scaled, optax.trace(0.9)), 1))
    updates, _ = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, scale=3.0)
    np.testing.assert_array_equal(updates["w"], 3.0 * PARAMS["w"])


def test_optax_maps_over_what_is_like_parameters():
    """It calls ``init`` with a placeholder, in which no rule finds a leaf."""
    tx = oo.offload(optax.adam(1e-3), r".*/(mu|nu)/.*")
    specs = optax.tree.map_params(
        tx,
        lambda _, spec: spec,
        tx.init(PARAMS),
        dict.fromkeys(PARAMS, "spec"),
        transform_non_params=lambda _: "replicated",
    )
    assert jax.tree.leaves(specs) == ["replicated", *["spec"] * 4]


@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_may_be_types(sharded):
    """As in optax ``init`` then makes the state, unless it reads what they are."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "x")) if sharded else None
    types = {"w": jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=sharding)}
    params = {"w": jax.device_put(jnp.ones((64, 512)), sharding)}
    tx = oo.offload(optax.adam(1e-3))
    got, want = tx.init(types), tx.init(params)
    assert bits(got) == bits(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
    copies = optax.GradientTransformation(jnp.asarray, lambda *args: args[:2])
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        oo.offload(copies, EVERYTHING).init(types["w"])


def test_keys_are_used_once():
    """In a loop that runs once a key is used once, and JAX's check agrees."""
    noisy = optax.chain(optax.add_noise(0.1, 0.9, 0), optax.adam(1e-3))
    tx = oo.offload(noisy)
    update = jax.jit(tx.update)
    with jax.debug_key_reuse(True):
        state = jax.jit(tx.init)(PARAMS)
        for _ in range(2):
            _, state = update(PARAMS, state, PARAMS)


def test_a_replaced_init_keeps_the_schedule():
    """And a replaced update is said to be unknown."""
    tx = oo.offload(optax.adam(1e-3))
    assert str(tx._replace(init=tx.init).schedule(PARAMS)) == str(tx.schedule(PARAMS))
    with pytest.raises(
        TypeError, match=r"was replaced by .* Call schedule of the one that"
    ):
        tx._replace(update=optax.adam(1e-3).update).schedule(PARAMS)


def test_warns_of_a_group_larger_than_the_window():
    """Asked for less than can be had."""
    whole = oo.Rule(".*", slice_axis=None)
    tx = oo.offload(optax.adam(1e-3), whole, window_bytes=1000)
    message = (
        "262144 bytes of state are on the device at once, over the window of 1000: .* "
        "it cannot be updated in slices .no axis to slice a leaf of shape .*128"
    )
    with pytest.warns(oo.OffloadWarning, match=message):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_warns_of_slices_larger_than_the_window():
    """They come in whole tiles: 8 rows of two moments."""
    tx = oo.offload(optax.adam(1e-3), window_bytes=1000)
    message = "over the window of 1000: 'w', '0/mu/w', '0/nu/w': there are no smaller"
    with pytest.warns(oo.OffloadWarning, match=message):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


class AxLearns(typing.NamedTuple):
    """AXLearn's `PartitionedGradientTransformation`."""

    init: typing.Any
    update: typing.Any
    partition: typing.Any


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (3, "offload wraps an optax.GradientTransformation or optax.MultiSteps, got 3"),
        (optax.adam, r"got <function adam .*Call it first, as in offload\(optax.adamw"),
        ("adam", r"got 'adam'. Pass the transformation, as in offload\(optax.adamw"),
        (AxLearns(*optax.adam(1.0), None), r"with_partition_fn\(offload\(optax.adam"),
        (oo.offload(optax.adam(1.0)), "the optimizer is offloaded already. Give all"),
    ],
)
def test_what_is_no_plain_transformation(inner, message):
    """Refused by the factory."""
    with pytest.raises(TypeError, match=message):
        oo.offload(inner)


def test_multi_steps_around_warns():
    """At the line of the user's own; inside it does not."""
    around = optax.MultiSteps(oo.offload(optax.adam(1e-3)), 2)
    with pytest.warns(oo.OffloadWarning, match="MultiSteps is around") as told:
        around.init(PARAMS)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oo.offload(optax.MultiSteps(optax.adam(1e-3), 2)).init(PARAMS)


def test_leaves_that_are_no_arrays():
    """Named by path, in place of JAX's words about our own functions."""
    tx = oo.offload(optax.adam(1e-3))
    model = {"activation": jnp.tanh, "name": "a", "w": jnp.ones((256, 256))}
    message = r"init .* given 'params/activation \(\w+\)', 'params/name \(str\)'. If"
    with pytest.raises(TypeError, match=message) as error:
        tx.init(model)
    assert "_Offloading" not in str(error.value)
    with pytest.raises(TypeError, match=r"update .* given 'updates/w \(str\)'"):
        tx.update(PARAMS | {"w": ""}, tx.init(PARAMS), PARAMS)


def test_offloaded_twice_further_inside():
    """Found when the state is made; all leaves concerned are named."""
    part = oo.offload(optax.adam(1e-3), ".*/mu/.*")
    tx = oo.offload(optax.chain(optax.clip(1.0), part))
    with pytest.raises(TypeError, match=r"offloaded already: it puts '1/0/mu/w' into"):
        tx.init(PARAMS)


def test_kind_that_a_compiled_update_cannot_use():
    """`unpinned_host` is for moves between steps."""
    with pytest.raises(ValueError, match=r"rule 1 \('b'\) has memory_kind 'unpinned_h"):
        oo.offload(optax.adam(1.0), [oo.Rule("a"), oo.Rule("b", "unpinned_host")])


OTHER = {
    "of_another_chain": (
        optax.adam(1e-3),
        PARAMS,
        r"expected: \(ScaleByAdamState, EmptyState, EmptyState\)\n"
        r"  given: \(ScaleByAdamState, EmptyState\)\nMake it .* state = tx\.init\(par",
    ),
    "of_fewer_moments": (
        optax.lion(1e-3),
        PARAMS,
        r"\n  expected: .*\n  given: \(ScaleByLion.*\n  only expected: '0/nu/b', '0/nu",
    ),
    "of_other_shapes": (
        optax.adamw(1e-3),
        {"w": jnp.ones((250, 128)), "b": jnp.ones(128)},
        r":\n  '0/mu/w': expected \(256, 128\), given \(250, 128\)\n  '0/nu/w': ",
    ),
    "of_other_names": (
        optax.adamw(1e-3),
        {"v": jnp.ones((256, 128)), "b": jnp.ones(128)},
        r":\n  only expected: '0/mu/w', '0/nu/w'\n  only given: '0/mu/v', '0/nu/v'\n",
    ),
    "none": (None, None, r"given: None\n"),
}


@pytest.mark.parametrize("with_params", [True, False])
@pytest.mark.parametrize("name", OTHER)
def test_state_of_another_optimizer(name, with_params):
    """Named by path in place of optax's and JAX's words, which stay its cause."""
    maker, made_of, message = OTHER[name]
    state = None if maker is None else oo.offload(maker).init(made_of)
    tx = oo.offload(optax.adamw(1e-3) if with_params else _ADAM_OF_THREE)
    params = PARAMS if with_params else None
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(tx.update, PARAMS, state, params)
    assert str(error.value).startswith("update was given a state that is not of this")
    cause = error.value.__cause__
    assert f"own error is {type(cause).__name__}: " in str(error.value)


# As many transformations as `optax.adamw` has; none of them needs parameters.
_ADAM_OF_THREE = optax.chain(
    optax.scale_by_adam(), optax.clip(1.0), optax.scale_by_learning_rate(1e-3)
)


@pytest.mark.parametrize("cast", [jnp.bfloat16, None])
def test_error_that_is_not_of_the_state(cast):
    """It is the optimizer's own, also where dtypes of the state are others."""

    def update(updates, state, params=None):
        raise KeyError("mine")

    def init(params):
        # A state that only values tell is not compared.
        return jax.tree.map(jnp.zeros_like if cast else jnp.flatnonzero, params)

    tx = oo.offload(optax.GradientTransformation(init, update))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, cast), PARAMS)
    with pytest.raises(KeyError, match="mine"):
        jax.eval_shape(tx.update, PARAMS, state, PARAMS)


def test_rule_that_matches_nothing():
    """At init, with near paths; optional rules may."""
    tx = oo.offload(optax.adam(1e-3), ".*/moo/.*")
    with pytest.raises(ValueError, match=r"matches no leaf\. Nearest paths: '0/mu/b'"):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match="matches no leaf"):
        jax.eval_shape(tx.init, PARAMS)
    oo.offload(optax.adam(1e-3), oo.Rule("x", optional=True)).init(PARAMS)


def test_scalars_that_state_on_the_host_decides():
    """Those of a line search, which depend on gradients that are in the state."""
    params = {"w": jnp.linspace(0, 1, 1024)}

    def value_fn(params):
        return jnp.sum((params["w"] - 0.3) ** 2)

    value, grads = jax.value_and_grad(value_fn)(params)
    inner = optax.lbfgs()
    tx = oo.offload(inner, oo.Rule(".*", min_bytes=0))

    def step(tx):
        update = jax.jit(functools.partial(tx.update, value_fn=value_fn))
        state = tx.init(params)
        return update(grads, state, params, value=value, grad=grads)

    got, want = step(tx), step(inner)
    assert oo.memory_report(got[1]).totals.keys() == {"pinned_host"}
    assert_close(got, want, rtol=1e-5, atol=0)


def test_numbers_as_arguments_of_an_update_in_a_step():
    """What stands for the gradient of a frozen leaf may be a number."""
    trained = {"base": False, "a": True}
    params = {name: jnp.ones((4, 128, 128)) for name in trained}

    def results(tx, jitted):
        def step(params, state, x):
            def loss(a):
                def layer(h, w):
                    return jnp.tanh(h @ w), None

                return jnp.sum(jax.lax.scan(layer, x, params["base"] + a)[0])

            gradients = {"base": jnp.zeros(()), "a": jax.grad(loss)(params["a"])}
            updates, _ = tx.update(gradients, state, params)
            return params["a"] + updates["a"]

        return jitted(step)(params, tx.init(params), jnp.ones((8, 128)))

    plain = optax.masked(optax.adam(0.1), trained)
    np.testing.assert_allclose(
        results(oo.offload(plain), oo.jit), results(plain, jax.jit), rtol=1e-6
    )


def test_state_that_a_norm_of_parameters_scales():
    """It is made where it rests, of parameters that are computed themselves."""

    def init(params):
        return (jnp.full((2**15, 2), jnp.mean(params**2)),)

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    params = jax.random.normal(jax.random.key(0), (256, 256))
    state = oo.offload(inner, oo.Rule(".*", min_bytes=0)).init(params)
    assert_close(state, init(params), rtol=1e-6, atol=0)
    assert {x.sharding.memory_kind for x in state} == {"pinned_host"}


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_state_that_is_parameters_of_the_step_before(kind):
    """It hands an argument on, beside what is computed of it."""

    def update(updates, state, params):
        before, change = state
        updates = jax.tree.map(lambda g, c: 0.01 * c - 0.1 * g, updates, change)
        return updates, (params, jax.tree.map(jnp.subtract, params, before))

    inner = optax.GradientTransformation(
        lambda p: (jax.tree.map(jnp.copy, p), jax.tree.map(jnp.zeros_like, p)), update
    )
    tx = oo.offload(inner, [oo.Rule("1/.*"), oo.Rule(".*", "device")])

    def step(tx, params, state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    want = {"w": jax.random.normal(jax.random.key(0), (256, 256)) / 16}
    got = oo.set_memory_kind(jax.tree.map(jnp.copy, want), ".*", kind)
    state, ours, x = inner.init(want), tx.init(got), jnp.ones((8, 256))
    plain = jax.jit(functools.partial(step, inner))
    jitted = oo.jit(functools.partial(step, tx), donate_argnums=(0, 1))
    for _ in range(3):
        want, state = plain(want, state, x)
        got, ours = jitted(got, ours, x)
    np.testing.assert_allclose(np.asarray(got["w"]), np.asarray(want["w"]), rtol=1e-5)
    assert got["w"].sharding.memory_kind == kind
    kinds = [y.sharding.memory_kind for y in jax.tree.leaves(ours)]
    assert kinds == ["device", "pinned_host"]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_state_that_is_all_too_small_warns(transform):
    """Where nothing moves though rules ask for it, and where something does not."""
    told = (
        r"nothing moves to host memory\. 3 leaves: under 64.00 KiB .*min_bytes=\.\.\."
    )
    params = {"w": jnp.ones((8, 8))}
    with pytest.warns(oo.OffloadWarning, match=told):
        transform(oo.offload(optax.adam(1e-3)).init)(params)
    for rules in (EVERYTHING, oo.Rule(".*", "device"), oo.Rule("no", optional=True)):
        transform(oo.offload(optax.adam(1e-3), rules).init)(params)
    large = params | {"v": jnp.ones((256, 128))}
    transform(oo.offload(optax.adam(1e-3)).init)(large)

"""What a way is compiled as, and what is said to fill the device."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from limited import limited
from small_steps import train_step
from step_factories import HEAD, STACK, adam_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground import compat
from optax_offload._places.step_options import Options
from optax_offload._plan.budget import Budget, PlanRequest
from optax_offload._plan.candidates import prepared, traced
from optax_offload._plan.planner import Planner
from optax_offload._plan.state import movable_state
from optax_offload._plan.step import StepFactory, record
from optax_offload._plan.variants import Variant

TARGET = aot.Target("h100")
PARAMETERS = STACK + HEAD
LAYER_BYTES = 128 * 128 * 4
EVERY = frozenset(range(4))
MOST = Options(late_gradients="recompute", residuals="host")


def state_of(factory, given=None):
    """What of its state can move."""
    return movable_state(record(factory), given, 1)


@pytest.fixture
def refused(monkeypatch):
    """The arguments of what was to be compiled, by a compiler that refuses all."""
    asked = []

    def refuse(fn, *args, **options):
        asked.append(args)
        return aot.Measured(9 * PARAMETERS + 7, None, None)

    monkeypatch.setattr(aot, "measure", refuse)
    return asked


def stepped(tx, loss, params, x):
    """A step of structs, as factories return it."""
    return oo.Step(train_step(tx, loss), (params, oo.eval_shape(tx.init, params), x))


def compiler_of(make_step=adam_step, budget=3 * PARAMETERS, said=lambda _: None):
    """Compiles ways of a step, whose sizes are known."""
    factory = StepFactory(make_step, TARGET)
    planner = Planner(factory, PlanRequest(Budget(budget)), progress=said)
    planner._trace()
    return planner._compile


def test_what_tracing_tells():
    """Of a scan of layers, whose gradients a norm needs first."""
    factory = StepFactory(adam_step, TARGET)
    found = traced(factory, state_of(factory), Variant(EVERY, (), "all", MOST))
    assert found.gradient_bytes == found.late_bytes == STACK
    assert "0/layers" in found.row_arguments
    assert "0/head" not in found.row_arguments
    assert found.residual_bytes > 0
    # Forward twice (remat), and its two products of the backward pass.
    assert 0 < found.flops_again < found.flops
    assert found.can_stream


@pytest.mark.parametrize("clipped", [False, True])
def test_layers_of_a_python_loop_are_taken_in_turns(clipped, monkeypatch):
    """Each by its own; what fills more than a turn is none of them."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(
        monkeypatch, segment_bytes=LAYER_BYTES, least_part=1, least_residual_bytes=1
    )

    def make_step(offload, target):
        shapes = {f"layer_{i}": (128, 128) for i in range(10)} | {"head": (128, 256)}
        params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        clip = [optax.clip_by_global_norm(1.0)] if clipped else []
        tx = optax.chain(*clip, offload(optax.adam(1e-3)))

        def loss(params, x):
            for i in range(10):
                x = jnp.tanh(x @ params[f"layer_{i}"])
            return jnp.sum((x @ params["head"]) ** 2)

        x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return stepped(tx, loss, params, x)

    factory = StepFactory(make_step, TARGET)
    found = traced(factory, state_of(factory), Variant(EVERY, (), "all", MOST))
    layers = {f"0/layer_{i}" for i in range(10)}
    parameters = {x for x in found.row_arguments if x.startswith("0/")}
    assert parameters == layers
    # Of those that wait for a norm some may do so on the device.
    assert 0 < found.gradient_bytes <= 12 * LAYER_BYTES
    assert clipped or found.gradient_bytes == 12 * LAYER_BYTES
    assert found.late_bytes == 0
    assert found.residual_bytes >= 8 * LAYER_BYTES


def test_late_gradients_are_those_of_which_a_norm_is_taken():
    """Others are updated in their turn, and never wait."""

    def make_step(offload, target):
        shapes = {"clipped": (8, 64, 64), "free": (16, 64, 64)}
        params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        clip = optax.masked(
            optax.clip_by_global_norm(1.0), {"clipped": True, "free": False}
        )
        tx = optax.chain(clip, offload(optax.adam(1e-3)))

        def loss(params, x):
            def layer(x, w):
                return jnp.tanh(x @ w), None

            x, _ = jax.lax.scan(layer, x, params["clipped"])
            return jnp.sum(jax.lax.scan(layer, x, params["free"])[0])

        x = jax.ShapeDtypeStruct((2, 64), jnp.float32)
        return stepped(tx, loss, params, x)

    factory = StepFactory(make_step, TARGET)
    found = traced(factory, state_of(factory), Variant(EVERY, (), "all", MOST))
    clipped, free = 8 * 64 * 64 * 4, 16 * 64 * 64 * 4
    assert (found.gradient_bytes, found.late_bytes) == (clipped + free, clipped)


@pytest.mark.parametrize("jitted", [True, False])
def test_a_jitted_step_has_only_its_state_moved(jitted):
    """One of `oo.jit` is jitted anew, with the options that are looked for."""
    jit = jax.jit if jitted else oo.jit

    def make_step(offload, target):
        step = adam_step(offload, target)
        fn = jit(step.fn, donate_argnums=(0, 1), out_shardings=step.out_shardings)
        return oo.Step(fn, step.args)

    factory = StepFactory(make_step, TARGET)
    state = state_of(factory)
    found = traced(factory, state, Variant(EVERY, (), "all", MOST))
    assert found.can_stream is not jitted
    if jitted:
        assert "jit it with oo.jit" in found.outside[0]
        return
    step, jitted = prepared(factory, state, Variant(EVERY, options=MOST))
    assert step.donate_argnums == (0, 1)
    assert step.out_shardings is not None
    assert isinstance(jitted, functools.partial)
    assert jitted.keywords == dict(**MOST)


def test_parameters_are_found_among_the_arguments(refused):
    """Not the state that has the same paths, whatever comes first."""

    def state_first(offload, target):
        step = adam_step(offload, target)
        params, state, x = step.args

        def fn(state, params, x):
            return step.fn(params, state, x)

        return oo.Step(fn, (state, params, x), donate_argnums=(0, 1))

    compile_way = compiler_of(state_first)
    compile_way(Variant(EVERY, parameters="rows", options=MOST))
    compile_way(Variant(EVERY, parameters="all", options=MOST))
    rows, everything = refused
    for state, params, _ in (rows, everything):
        assert params["layers"].sharding.memory_kind == "pinned_host"
        assert state[1][0].mu["layers"].sharding.memory_kind == "pinned_host"
    assert rows[1]["head"].sharding.memory_kind != "pinned_host"
    assert everything[1]["head"].sharding.memory_kind == "pinned_host"


def test_given_rules_of_parameters_decide():
    """What must go goes always, what must stay never."""
    given = oo.OffloadConfig(
        [oo.Rule(".*", "device")],
        parameters=[oo.Rule("layers", "device"), oo.Rule("head")],
    )
    state = state_of(StepFactory(adam_step, TARGET), given)
    state = state.with_rows({"0/layers"})
    for which in ("device", "rows", "all"):
        assert [x.leaf.path for x in state.resting(which)] == ["head"]
        assert state.parameter_rules(which) == given.parameters
    wrong = oo.OffloadConfig([".*"], parameters=["lay"])
    with pytest.raises(ValueError, match=r"'lay', matches no leaf.*layers"):
        state_of(StepFactory(adam_step, TARGET), wrong)


def test_rules_of_parameters():
    """One for each pattern; exact where a pattern is of others that stay."""

    def numbered(offload, target):
        params = {
            f"block_{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32)
            for i in range(3)
        }
        tx = offload(optax.adam(1e-3))
        state = oo.eval_shape(tx.init, params)
        return oo.Step(lambda p, s: (p, s), (params, state))

    state = state_of(StepFactory(numbered, TARGET))
    assert state.parameter_rules("device") == ()
    (rule,) = state.parameter_rules("all")
    assert rule.regex == r"block_\d+"
    some = state.with_rows({"0/block_0", "0/block_2"})
    assert [r.regex for r in some.parameter_rules("rows")] == ["(block_0|block_2)"]


def test_what_is_selected_is_moved(refused):
    """The step is made with `offload`, or with the optimizer as it is."""
    said = []
    compile_way = compiler_of(said=said.append)
    selections = (frozenset(), frozenset([0]), EVERY)
    found = [compile_way(Variant(selection)) for selection in selections]
    states = [args[1][1][0] for args in refused]
    kinds = [state.mu["layers"].sharding.memory_kind for state in states]
    assert kinds == ["device", "pinned_host", "pinned_host"]
    assert [c.moved_bytes for c in found] == [0, STACK, 2 * PARAMETERS]
    assert said[0].startswith("compiling: as given (0 compiled, ")
    assert said[1] is found[0]


def test_parts_of_a_refused_step(refused):
    """The compiler's own number, of which what is known by name is taken off."""
    compile_way = compiler_of()
    found = compile_way(Variant())
    assert (found.used_bytes, found.fits, found.peak) == (
        9 * PARAMETERS + 7,
        False,
        None,
    )
    assert sum(found.parts.values()) == found.used_bytes
    assert found.parts["parameters"] == found.parts["gradients"] == PARAMETERS
    assert found.parts["state"] == 2 * PARAMETERS + 4
    assert found.parts["residuals"] > 0
    moved = compile_way(Variant(EVERY, parameters="all", options=MOST))
    assert moved.parts["parameters"] == moved.parts.get("residuals", 0) == 0
    assert moved.parts["gradients"] == HEAD
    assert moved.parts["state"] == 4
    assert moved.host_bytes >= 3 * PARAMETERS
    assert moved.step_seconds == float("inf")
    assert "peak 720.00 MiB" in str(moved)


def test_state_that_is_loaded_at_once(refused):
    """It has a name of its own, with what joins it: as for a median of gradients."""

    def by_median(updates, state, params=None):
        leaves = map(jnp.ravel, jax.tree.leaves(updates))
        middle = jnp.median(jnp.concatenate([*leaves]))
        return jax.tree.map(lambda u: u / middle, updates), state

    divided = optax.GradientTransformation(lambda p: optax.EmptyState(), by_median)
    inner = optax.chain(divided, optax.adam(1e-3))
    accumulated = functools.partial(adam_step, optimizer=optax.MultiSteps(inner, 4))
    compile_way = compiler_of(accumulated)
    plain, moved = (compile_way(Variant(x)) for x in (frozenset(), EVERY | {4, 5}))
    (name,) = (n for n in moved.parts if n.startswith("state loaded at once"))
    assert name == (
        "state loaded at once (by 'concatenate' in test_state_that_is_loaded_at_once, "
        "'add' in scale_by_adam)"
    )
    assert moved.parts[name] == 3 * PARAMETERS
    assert name not in plain.parts
    assert sum(moved.parts.values()) == moved.used_bytes

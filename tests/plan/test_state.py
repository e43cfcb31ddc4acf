"""Leaves under patterns, the state that a step has, and what rules decide of it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_factories import HEAD, MIB, STACK, adam_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._plan import state as states
from optax_offload._plan import step as steps
from optax_offload._plan.state import Leaf, RecordedOptimizer, movable_state
from optax_offload._plan.step import StepFactory, record

H100 = aot.Target("h100")


def test_state_is_recorded_from_init():
    """Its paths are those that rules see, without the chain around it."""
    (found,) = record(StepFactory(adam_step, H100))
    assert [(x.path, x.nbytes) for x in found.state] == [
        ("0/count", 4),
        ("0/mu/head", HEAD),
        ("0/mu/layers", STACK),
        ("0/nu/head", HEAD),
        ("0/nu/layers", STACK),
    ]
    assert found.parameter_bytes == STACK + HEAD
    assert [x.stacked for x in found.state] == [False, False, True, False, True]


def test_state_of_an_nnx_optimizer_is_found_among_the_arguments():
    """By paths without boxes, which are those that rules see in its updates."""

    def make_step(offload, target):
        def make():
            model = nnx.Linear(256, 256, use_bias=False, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, offload(optax.adam(1.0)), wrt=nnx.Param)

        rows = NamedSharding(target.mesh(("x",)), P("x"))
        state = jax.tree.map(
            lambda x: x.update(sharding=rows) if x.ndim else x,
            oo.eval_shape(lambda: nnx.state(make())),
        )
        return oo.Step(lambda state: state, (state,))

    (found,) = record(StepFactory(make_step, aot.Target("h100:4")))
    nbytes = 256 * 256 * 4
    sizes = {x.path: (x.nbytes, x.nbytes_per_device) for x in found.state}
    assert sizes["0/mu/kernel"] == sizes["0/nu/kernel"] == (nbytes, nbytes // 4)


def test_leaves_are_counted_as_the_arguments_are_sharded():
    """Each device's share, and the first axis that it has whole."""
    (found,) = record(StepFactory(adam_step, aot.Target("h100:4")))
    sizes = {x.path: (x.nbytes_per_device, x.slice_axis) for x in found.state}
    assert sizes["0/mu/layers"] == (STACK // 4, 0)
    assert sizes["0/mu/head"] == (HEAD // 4, 0)
    assert sizes["0/count"] == (4, None)


def test_an_axis_that_is_sharded_is_not_sliced():
    """Rows that are sharded are not sliced along; of what is sharded whole nothing."""
    target = aot.Target("h100:4")

    def make_step(offload, target):
        mesh = target.mesh(("x", "y"), shape=(2, 2))
        specs = {"rows": P("x"), "both": P("x", "y"), "columns": P(None, "y")}
        params = {
            name: jax.ShapeDtypeStruct(
                (512, 512), jnp.float32, sharding=NamedSharding(mesh, spec)
            )
            for name, spec in specs.items()
        }
        tx = offload(optax.sgd(1.0, momentum=0.9))
        return oo.Step(lambda *x: x, (params, oo.eval_shape(tx.init, params)))

    (found,) = record(StepFactory(make_step, target))
    axes = {x.path.split("/")[-1]: x.slice_axis for x in found.state}
    assert axes == {"rows": 1, "both": None, "columns": 0}


def test_arguments_without_shardings_are_on_every_device():
    """As `aot.compile` takes them."""

    def make_step(offload, target):
        params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
        tx = offload(optax.adam(1.0))
        return oo.Step(lambda *x: x, (params, jax.eval_shape(tx.init, params)))

    (found,) = record(StepFactory(make_step, aot.Target("h100:4")))
    assert {x.nbytes_per_device for x in found.state} == {4, MIB}


def plain(offload, target):
    """Uses no optimizer."""
    return oo.Step(lambda x: x, (jnp.ones(3),))


def never_initialised(offload, target):
    """Wraps an optimizer, and makes no state."""
    offload(optax.adam(1.0))
    return plain(offload, target)


def no_step(offload, target):
    """Returns a tuple."""
    return (lambda x: x), (jnp.ones(3),)


@pytest.mark.parametrize(
    ("make_step", "error", "message"),
    [
        (plain, ValueError, "does not call offload, its first argument"),
        (never_initialised, ValueError, r"does not call init .*oo\.eval_shape"),
        (
            no_step,
            TypeError,
            r"must return an optax_offload\.Step\(fn, args, \.\.\.\)",
        ),
    ],
)
def test_factories_that_are_none(make_step, error, message):
    """What is missing, and what to write."""
    with pytest.raises(error, match=message):
        record(StepFactory(make_step, H100))


def optimizer(*paths, axis: int | None = 0, stacked=False):
    """An optimizer with a leaf of 1 MiB for each path, and parameters of 2."""
    leaves = [Leaf(path, MIB, MIB, axis, stacked) for path in paths]
    return RecordedOptimizer(tuple(leaves), 2 * MIB)


ADAM = optimizer("0/mu/w", "0/nu/w")


def test_without_rules_everything_may():
    """In one rule for each pattern; nothing selected is one that keeps all."""
    state = movable_state((ADAM,), None, 1)
    assert [p.pattern for p in state.patterns] == [r"\d+/mu/w", r"\d+/nu/w"]
    assert (state.state_bytes, state.parameter_bytes) == (2 * MIB, 2 * MIB)
    assert state.everything == {0, 1}
    assert not state.changes_any(frozenset())
    assert state.config(frozenset()).rules == (oo.Rule(".*", "device"),)
    assert state.config(frozenset([1])).rules == (oo.Rule(r"\d+/nu/w"),)
    assert state.moved_bytes(frozenset([1])) == MIB


def test_given_rules_decide_first():
    """What they move counts as moved, what they keep is no pattern; they come first."""
    stays = optimizer("0/mu/w", "0/nu/w", "0/ema/w")
    rules = [oo.Rule("0/mu/.*"), oo.Rule("0/ema/.*", "device")]
    state = movable_state((stays,), oo.OffloadConfig(rules, 2**25), 1)
    assert [p.pattern for p in state.patterns] == [r"\d+/nu/w"]
    assert [x.path for x in state.moved_by_given] == ["0/mu/w"]
    assert state.changes_any(frozenset())
    assert state.moved_bytes(frozenset()) == MIB
    assert state.moved_bytes(state.everything) == 2 * MIB
    config = state.config(state.everything)
    assert config.rules == (*rules, oo.Rule(r"\d+/nu/w"))
    assert config.window_bytes == 2**25


def test_a_share_is_of_the_state_of_each_optimizer():
    """As each is given the rules by itself; so is what the file says."""
    sizes = {"0/mu/a": 1, "0/mu/b": 1, "0/nu/a": 4, "0/nu/b": 8}
    first, second = (
        RecordedOptimizer(
            tuple(leaf(p, n * MIB) for p, n in sizes.items() if part in p), MIB
        )
        for part in ("mu", "nu")
    )
    rules = oo.OffloadConfig([oo.Rule("0/.*", fraction=0.5)])
    state = movable_state((first, second), rules, 1)
    assert [x.path for x in state.moved_by_given] == ["0/mu/a", "0/nu/b"]
    assert state.patterns == ()
    assert state.config(frozenset()).rules == tuple(rules.rules)
    rules = oo.OffloadConfig([oo.Rule("0/mu/.*"), oo.Rule("x")])
    with pytest.raises(ValueError, match="rule 1, pattern 'x', matches no leaf"):
        movable_state((first, second), rules, 1)


def test_a_rule_of_one_of_several_optimizers_is_optional():
    """All optimizers are given the same rules."""
    state = movable_state((ADAM, optimizer("0/trace", "0/nu/w")), None, 1)
    optional = {r.regex: r.optional for r in state.config(state.everything).rules}
    assert optional == {
        r"\d+/(mu|nu)/w": False,
        r"\d+/trace": True,
    }


def test_an_axis_is_written_where_the_library_would_not_find_it():
    """On several devices it slices stacked leaves alone, along their first axis."""
    for devices, stacked, axis, written in [
        (1, False, 0, "auto"),
        (1, False, 1, 1),
        (4, False, 0, 0),
        (4, False, None, "auto"),
        (4, True, 0, "auto"),
        (4, True, None, None),
    ]:
        one = optimizer("mu", axis=axis, stacked=stacked)
        (rule,) = movable_state((one,), None, devices).config(frozenset([0])).rules
        assert rule.slice_axis == written, (devices, stacked, axis)


def leaf(path, nbytes, *, axis: int | None = 0, stacked=False, devices=1):
    """A leaf of so many bytes."""
    return states.Leaf(path, nbytes, (nbytes or 0) // devices, axis, stacked)


def test_a_pattern_is_a_path_but_for_numbers():
    """Layers in a list have one pattern; mu and nu have two."""
    leaves = [leaf(f"0/{m}/layers_{i}/w", MIB) for m in ("mu", "nu") for i in range(12)]
    found = states.leaf_patterns(leaves)
    assert [f.pattern for f in found] == [
        r"\d+/mu/layers_\d+/w",
        r"\d+/nu/layers_\d+/w",
    ]
    assert [f.nbytes_per_device for f in found] == [12 * MIB] * 2
    assert all(re.fullmatch(f.pattern, x.path) for f in found for x in f.leaves)


@pytest.mark.parametrize("path", ["0/mu/a.b+c", "0/mu/['x']", "0/mu/w 1", "0/µ/w"])
def test_patterns_match_their_own_path(path):
    """Whatever a path has in it."""
    assert re.fullmatch(states.pattern_of(path), path)
    assert not re.fullmatch(states.pattern_of("0/mu/a.b"), "0/mu/axb")


def test_order():
    """Sliceable before whole, stacked before matrices, large before small."""
    found = states.leaf_patterns(
        [
            leaf("whole", 9 * MIB, axis=None),
            leaf("small", MIB),
            leaf("large", 4 * MIB),
            leaf("stacked", 2 * MIB, stacked=True),
        ]
    )
    assert [f.pattern for f in found] == ["stacked", "large", "small", "whole"]


def test_what_cannot_move_or_is_small_is_left_out():
    """As the rules would leave it."""
    leaves = [leaf("key", None), leaf("count", 4), leaf("w", 65536), leaf("b", 65535)]
    assert [f.pattern for f in states.leaf_patterns(leaves)] == ["w"]
    assert len(states.leaf_patterns(leaves, min_bytes=4)) == 3


def test_bytes_of_whole_leaves_decide_what_is_small():
    """As rules count them, over all devices."""
    for nbytes, moves in ((65536, True), (65535, False)):
        shared = leaf("w", nbytes, devices=8)
        assert bool(states.leaf_patterns([shared])) is moves
        assert states.Parameter(shared, "0/w").rests("all") is moves
        assert oo.Rule("w").min_bytes == 65536


def test_an_axis_is_of_all_leaves():
    """One that is sharded elsewhere keeps the others from an axis in common."""
    (pattern,) = states.leaf_patterns([leaf("w0", MIB), leaf("w1", MIB, axis=1)])
    assert pattern.slice_axis is None


def test_a_pattern_is_stacked_if_all_of_its_leaves_are():
    """Of one that is not, slices have no axis that the library finds by itself."""
    for stacked in (False, True):
        both = [leaf("w0", MIB, stacked=True), leaf("w1", MIB, stacked=stacked)]
        (pattern,) = states.leaf_patterns(both)
        assert pattern.stacked is stacked


def test_what_is_encoded_and_stays_has_a_rule_of_its_own():
    """After those of what moves, which say how it is encoded too."""
    encoded = (
        dataclasses.replace(leaf(path, MIB), codec="int8") for path in ("mu", "nu")
    )
    one = RecordedOptimizer((*encoded, leaf("ema", MIB)), MIB)
    state = movable_state((one,), None, 1)
    assert [p.pattern for p in state.patterns] == ["ema", "mu", "nu"]
    moves = oo.Rule("mu", codec="int8")
    stays = oo.Rule("nu", "device", codec="int8")
    assert state.config(frozenset([0, 1])).rules == (oo.Rule("ema"), moves, stays)
    assert state.config(state.everything).rules == (
        oo.Rule("ema"),
        oo.Rule("(mu|nu)", codec="int8"),
    )
    assert state.changes_any(frozenset()), "what is encoded has changed"


def test_codes_and_scales_are_one_leaf():
    """Of the bytes of both, on each device too; the others are left as they are."""
    parts = [
        states.Leaf("mu/w/codes_int8", 800, 100, 0, True),
        states.Leaf("count", 4, 4, None, False),
        states.Leaf("mu/w/scales", 32, 4, 0, True),
    ]
    formats = dict.fromkeys(("mu/w/codes_int8", "mu/w/scales"), "int8 of float32")
    assert steps._joined(parts, formats) == [
        states.Leaf("mu/w", 832, 104, 0, True, codec="int8"),
        parts[1],
    ]
    assert steps._joined(parts, {}) == parts

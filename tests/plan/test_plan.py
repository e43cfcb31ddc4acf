"""Plans: what a factory is asked, what is found, written and told.

The tests marked `aot` compile with the real compilers (the extra `aot`).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload import aot
from optax_offload._plan import patterns, plan_file
from optax_offload._plan import planner as _plan

MIB = 2**20
H100 = aot.Target("h100")
LAYERS, WIDTH = 16, 1024
STACK, HEAD = 64 * MIB, 16 * MIB


def loss(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params["layers"])
    return jnp.sum((x @ params["head"]) ** 2)


def adam_step(offload, target, batch=8, layers=LAYERS, optimizer=None, spec=None):
    """Stacked layers of 64 MiB and a head of 16; Adam's state is twice that."""
    mesh = target.mesh()
    shapes = {"layers": (layers, WIDTH, WIDTH), "head": (WIDTH, 4 * WIDTH)}
    sharding = NamedSharding(mesh, spec or P())
    params = {
        name: jax.ShapeDtypeStruct(
            shape,
            jnp.float32,
            sharding=NamedSharding(mesh, P(*[None] * (len(shape) - 1), "x")),
        )
        for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32, sharding=sharding)
    inner = optax.adam(1e-3) if optimizer is None else optimizer
    tx = optax.chain(optax.clip_by_global_norm(1.0), offload(inner))
    state = oo.eval_shape(tx.init, params)

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return oo.Step(
        step,
        (params, state, x),
        donate_argnums=(0, 1),
        out_shardings=jax.tree.map(lambda s: s.sharding, (params, state)),
        tokens=batch,
    )


# What a factory is asked.


def test_state_is_recorded_from_init():
    """Its paths are those that rules see, without the chain around it."""
    (found,) = _plan.record(adam_step, H100)
    assert [(x.path, x.nbytes) for x in found.state] == [
        ("0/count", 4),
        ("0/mu/head", HEAD),
        ("0/mu/layers", STACK),
        ("0/nu/head", HEAD),
        ("0/nu/layers", STACK),
    ]
    assert found.parameter_bytes == STACK + HEAD
    assert [x.stacked for x in found.state] == [False, False, True, False, True]


def test_leaves_are_counted_as_the_arguments_are_sharded():
    """Each device's share, and the first axis that it has whole."""
    (found,) = _plan.record(adam_step, aot.Target("h100:4"))
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

    (found,) = _plan.record(make_step, target)
    axes = {x.path.split("/")[-1]: x.slice_axis for x in found.state}
    assert axes == {"rows": 1, "both": None, "columns": 0}


def test_arguments_without_shardings_are_on_every_device():
    """As `aot.compile` takes them."""

    def make_step(offload, target):
        params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
        tx = offload(optax.adam(1.0))
        return oo.Step(lambda *x: x, (params, jax.eval_shape(tx.init, params)))

    (found,) = _plan.record(make_step, aot.Target("h100:4"))
    assert {x.nbytes_per_device for x in found.state} == {4, MIB}


def plain(offload, target):
    return oo.Step(lambda x: x, (jnp.ones(3),))


def never_initialised(offload, target):
    offload(optax.adam(1.0))
    return plain(offload, target)


def no_step(offload, target):
    return (lambda x: x), (jnp.ones(3),)


@pytest.mark.parametrize(
    ("make_step", "options", "error", "message"),
    [
        (plain, {}, ValueError, "does not call its first argument"),
        (never_initialised, {}, ValueError, r"does not call init .*oo\.eval_shape"),
        (no_step, {}, TypeError, r"returns an optax_offload\.Step\(fn, args, \.\.\.\)"),
        (adam_step, {"budget_bytes": 0}, ValueError, "budget_bytes is 0; .* at most"),
        (
            adam_step,
            {"budget_bytes": 2**40},
            ValueError,
            r"at most what 'h100' has, 84942979072 \(79\.11 GiB\)",
        ),
        (adam_step, {"rules": "0/mou/.*"}, ValueError, "matches no leaf.*'0/mu/"),
    ],
)
def test_errors(make_step, options, error, message):
    """Each says what is wrong, before anything is compiled."""
    with pytest.raises(error, match=message):
        oo.plan(make_step, target=H100, **options)


def test_an_optimizer_that_is_none():
    """The factory's own mistake is that of `offload`."""
    with pytest.raises(TypeError, match="Call it first"):
        oo.plan(functools.partial(adam_step, optimizer=optax.adam), target=H100)


def test_default_budget():
    """The memory less the reserve that the docstring names."""
    assert _plan.default_budget_bytes(H100) == int(84942979072 * 0.9)
    v5e = aot.Target("v5e:2x2")
    assert _plan.default_budget_bytes(v5e) == int(v5e.memory_bytes * 0.98)


# What is told.


def compiled(used, moved=0):
    return _plan.Compiled(moved, used, None, True, 1.0, {})


@pytest.mark.parametrize(
    ("target", "used", "moved", "expected"),
    [
        ("h100", 0.5, 0, {}),
        ("h100", 0.74, 0, {"XLA_CLIENT_MEM_FRACTION": "0.76"}),
        ("h100", 0.895, 0, {"XLA_CLIENT_MEM_FRACTION": "0.92"}),
        ("h100", 0.5, 90, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "99"}),
        ("h100:8", 0.5, 10, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "88"}),
        ("h100:16", 0.5, 10, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "88"}),
        ("v5e:2x2", 0.9, 90, {}),
    ],
)
def test_environment(target, used, moved, expected):
    """What JAX does not give by itself has to be asked for."""
    target = aot.Target(target)
    after = compiled(round(used * target.memory_bytes), moved * 2**30)
    assert _plan._environment(target, after) == expected


TEXT = st.text(st.characters(codec="utf-8"), min_size=1).map(re.escape)
RULES = st.builds(
    oo.Rule,
    TEXT,
    st.sampled_from(["device", "pinned_host"]),
    min_bytes=st.integers(0, 2**40),
    slice_axis=st.sampled_from(["auto", None, 0, 3]),
    optional=st.booleans(),
)


@given(st.lists(RULES, min_size=1, max_size=4), st.none() | st.integers(1, 2**40), TEXT)
def test_rule_files_are_read_as_written(tmp_path_factory, rules, window_bytes, text):
    """Whatever the rules, and whatever is said about them."""
    config = oo.OffloadConfig(rules, window_bytes)
    file = tmp_path_factory.mktemp("rules") / "rules.toml"
    summary = [" ".join(text.split())]
    file.write_text(plan_file.text(config, (), summary), encoding="utf-8")
    assert oo.load_config(file) == config


def test_each_rule_has_a_comment():
    """What it moves, why and what it saves."""
    leaves = [patterns.Leaf(f"0/mu/w{i}", MIB, MIB // 4, None, False) for i in (0, 1)]
    (family,) = patterns.families(leaves)
    config = oo.OffloadConfig([oo.Rule("0/nu/.*", "device"), oo.Rule(family.pattern)])
    text = plan_file.text(config, [family], ["for h100"])
    assert text == (
        "# Rules for optax_offload.offload, found by `optax-offload fit`:\n"
        "# for h100\n\n"
        "# Given.\n"
        "[[rules]]\n"
        "pattern = '0/nu/.*'\n"
        'memory_kind = "device"\n\n'
        "# Moves 2 leaves, the first 0/mu/w0: 512.00 KiB off each device.\n"
        "# Why: updated whole: the largest leaf comes back for that.\n"
        "[[rules]]\n"
        r"pattern = '\d+/mu/w\d+'" + "\n"
    )


# What is found, by the real compilers.


@pytest.fixture
def compilers():
    pytest.importorskip("jax_plugins")
    pytest.importorskip("libtpu")


def aot_mark(test):
    return pytest.mark.aot(pytest.mark.usefixtures("compilers")(test))


def compile_with(offload, make_step=adam_step, target=H100):
    return _plan.compile_step(make_step(offload, target), target)


def program(compiled):
    """The text of a compiled program, but for where its lines come from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    first = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    assert first is not None
    return text[first.start() :]


@aot_mark
def test_what_fits_is_left_alone(tmp_path):
    """The plan is empty, and the step is the plain one: equations and program."""
    found = oo.plan(adam_step, target=H100)
    assert found.empty
    assert not found.moved
    assert found.before is found.after
    assert len(found.compiled) == 1
    tx = optax.adam(1e-3)
    assert found.offload(tx) is tx
    plain, planned = (adam_step(f, H100) for f in (lambda x: x, found.offload))
    assert str(jax.make_jaxpr(plain.fn)(*plain.args)) == str(
        jax.make_jaxpr(planned.fn)(*planned.args)
    )
    plain_program = program(compile_with(lambda x: x))
    assert "fusion" in plain_program
    assert program(compile_with(found.offload)) == plain_program
    found.save(tmp_path / "rules.toml")
    config = oo.load_config(tmp_path / "rules.toml")
    assert config == found.config
    assert program(compile_with(lambda x: oo.offload(x, config))) == plain_program


@aot_mark
@pytest.mark.parametrize(
    "name",
    ["h100", *(pytest.param(n, marks=pytest.mark.slow) for n in ("h100:4", "v5e:2x2"))],
)
def test_the_rules_fit_the_budget(name, tmp_path):
    """The peak of the program compiled with the file is what the plan says."""
    target = aot.Target(name)
    everything = compile_with(oo.offload, target=target)
    plain = compile_with(lambda x: x, target=target)
    high, low = (aot.peak(c).peak_bytes for c in (plain, everything))
    budget = (high + low) // 2
    said = []
    found = oo.plan(adam_step, target=target, budget_bytes=budget, progress=said.append)
    assert 0 < len(found.moved) < 4
    assert found.before.used_bytes == high
    assert found.after.used_bytes <= budget < found.before.used_bytes
    assert found.after.moved_bytes == sum(f.nbytes_per_device for f in found.moved)
    assert [x for x in said if isinstance(x, _plan.Compiled)] == list(found.compiled)
    assert len(said) == 2 * len(found.compiled)
    found.save(tmp_path / "rules.toml")
    config = oo.load_config(tmp_path / "rules.toml")
    assert config == found.config
    after = compile_with(lambda x: oo.offload(x, config), target=target)
    assert aot.peak(after).peak_bytes == found.after.used_bytes
    assert aot.peak(after).host_argument_bytes >= found.after.moved_bytes
    assert sum(found.after.parts.values()) == found.after.used_bytes
    for family in found.moved:
        assert family.pattern in str(found)


@aot_mark
def test_what_must_go_and_what_must_stay():
    """Rules that are given decide, and the plan decides about the rest."""
    peak = aot.peak(compile_with(lambda x: x)).peak_bytes
    rules = [oo.Rule(".*/mu/layers", "device"), oo.Rule(".*/nu/head")]
    found = oo.plan(adam_step, target=H100, budget_bytes=peak - 20 * MIB, rules=rules)
    assert [x.moved_bytes for x in found.compiled][:2] == [HEAD, 2 * HEAD + STACK]
    assert found.config.rules[:2] == tuple(rules)
    moved = {leaf.path for family in found.moved for leaf in family.leaves}
    assert moved
    assert moved <= {"0/mu/head", "0/nu/layers"}
    unmoved = oo.plan(adam_step, target=H100, rules=rules)
    assert not unmoved.moved
    assert not unmoved.empty
    assert unmoved.config.rules == tuple(rules)


@aot_mark
def test_does_not_fit():
    """By how much, what takes the memory, and what would help."""
    everything = aot.peak(compile_with(oo.offload)).peak_bytes
    budget = everything - MIB
    message = (
        r"does not fit on 'h100' even with all state moved: short by 1\.00 MiB of .*"
        r"parameters 80\.00 MiB, gradients 80\.00 .*What would help:\n(.*\n)*"
        r"- bfloat16 parameters.*\n- more devices"
    )
    with pytest.raises(aot.DoesNotFitError, match=message) as error:
        oo.plan(adam_step, target=H100, budget_bytes=budget)
    assert error.value.used_bytes - error.value.limit_bytes == MIB


@aot_mark
def test_does_not_fit_for_rules():
    """State that has to stay may be what is in the way."""
    budget = aot.peak(compile_with(oo.offload)).peak_bytes
    with pytest.raises(
        aot.DoesNotFitError, match=r"rules that let go of the 160\.00 MiB"
    ):
        oo.plan(
            adam_step,
            target=H100,
            budget_bytes=budget,
            rules=[oo.Rule(".*", "device")],
        )


@aot_mark
@pytest.mark.slow
def test_two_optimizers():
    """Rules of one need not match in the other."""

    def make_step(offload, target):
        def both(_):
            labels = {"layers": "adam", "head": "sgd"}
            sgd = optax.sgd(1e-3, momentum=0.9)
            return optax.partition(
                {"adam": offload(optax.adam(1e-3)), "sgd": offload(sgd)}, labels
            )

        return adam_step(both, target)

    peak = aot.peak(compile_with(lambda x: x, make_step)).peak_bytes
    found = oo.plan(make_step, target=H100, budget_bytes=peak - 50 * MIB)
    assert found.moved
    assert all(rule.optional for rule in found.config.rules)
    step = make_step(found.offload, H100)
    used = aot.peak(_plan.compile_step(step, H100)).peak_bytes
    assert used == found.after.used_bytes <= found.budget_bytes


def test_plans_are_values():
    """A plan can be made without a compiler, compared and shown."""
    found = _plan.Plan(
        target=H100,
        budget_bytes=MIB,
        config=oo.OffloadConfig([oo.Rule(".*", "device")]),
        moved=(),
        before=compiled(5),
        after=compiled(5),
        compiled=(compiled(5),),
        cost=_plan._cost_of(adam_step, (), H100, compiled(5), None),
        environment={},
    )
    assert dataclasses.replace(found) == found
    assert "nothing is moved" in str(found)
    assert found.as_dict()["empty"] is True
    assert np.isclose(found.cost.slowdown(), 1.0)

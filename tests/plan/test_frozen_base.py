"""Plans of steps that train adapters over a frozen base."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from step_factories import adam_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._plan.allowed import forms, of_parameters, worth_allowing
from optax_offload._plan.budget import Budget, PlanRequest
from optax_offload._plan.candidates import prepared
from optax_offload._plan.frozen import names_of, parameters_of
from optax_offload._plan.planner import Planner
from optax_offload._plan.step import StepFactory, record
from optax_offload._plan.variants import Outlook, Variant, variants

H100 = aot.Target("h100")
MIB = 2**20
LAYERS, WIDTH, RANK = 16, 1024, 8


def loss(adapters, base, x):
    """Products of all layers, each beside its adapters'."""

    def layer(x, w):
        w, low = w
        return jnp.tanh(x @ w["w"] * w["norm"][None] + x @ low["a"] @ low["b"]), None

    layer = jax.checkpoint(layer, prevent_cse=False)
    x, _ = lax.scan(layer, x, (base["layers"], adapters["layers"]))
    return jnp.sum((x @ base["head"]).astype(jnp.float32) ** 2)


def adapter_step(offload, target, replaces=(), layers=LAYERS, passes=False):
    """Adapters of a base of 32 MiB in bfloat16, a head of 8 and norms.

    The step may also replace leaves of the base, or return the base as it came.
    """
    del target
    struct = jax.ShapeDtypeStruct
    base = {
        "layers": {
            "w": struct((layers, WIDTH, WIDTH), jnp.bfloat16),
            "norm": struct((layers, WIDTH), jnp.bfloat16),
        },
        "head": struct((WIDTH, 4 * WIDTH), jnp.bfloat16),
    }
    adapters = {
        "layers": {
            "a": struct((layers, WIDTH, RANK), jnp.bfloat16),
            "b": struct((layers, RANK, WIDTH), jnp.bfloat16),
        }
    }
    x = struct((8, WIDTH), jnp.bfloat16)
    tx = optax.chain(optax.clip_by_global_norm(1.0), offload(optax.adam(1e-3)))
    state = oo.eval_shape(tx.init, adapters)

    def step(adapters, state, base, batch):
        grads = jax.grad(loss)(adapters, base, batch["x"])
        updates, state = tx.update(grads, state, adapters)
        new = {name: base[name] * 2 for name in replaces}
        rest = [base | new] * (passes or bool(replaces))
        return optax.apply_updates(adapters, updates), state, *rest

    batch = {"x": x, "step": struct((), jnp.int32)}
    return oo.Step(step, (adapters, state, base, batch), donate_argnums=(0, 1))


FACTORY = StepFactory(adapter_step, H100)


def planner_of(make_step=adapter_step, given=None, **asked):
    """A planner, which has compiled nothing yet."""
    return Planner(
        StepFactory(make_step, H100), PlanRequest(Budget(2**30), **asked), given
    )


def test_forms_with_codecs_of_parameters():
    """One of them at a time, beside those of state."""
    assert forms(("nf4", "int8-linear")) == [("nf4",), ("int8-linear",)]
    found = forms(("int8", "bfloat16-remainder", "nf4"))
    assert len(found) == 3 + 4
    assert [c for c in found if not of_parameters(c)] == forms(
        ("int8", "bfloat16-remainder")
    )
    assert ("int8", "bfloat16-remainder", "nf4") in found


def test_frozen_parameters_are_found_in_arguments():
    """With the path in their argument, and neither state nor what is trained."""
    state = planner_of(frozen="layers/(w|norm)|head")._states[()]
    assert {x.leaf.path: x.argument for x in state.frozen} == {
        "layers/w": "2/layers/w",
        "layers/norm": "2/layers/norm",
        "head": "2/head",
    }
    assert {x.leaf.path for x in state.trained} == {"layers/a", "layers/b"}
    assert state.parameter_bytes == 2 * 2 * LAYERS * WIDTH * RANK
    assert state.frozen_bytes == 40 * MIB + 2 * LAYERS * WIDTH
    assert planner_of()._states[()].frozen == ()


def test_bytes_of_frozen_parameters_in_a_codec():
    """Matrices take what codes and scales do; norms keep their dtype."""
    planner = planner_of(frozen="layers/(w|norm)|head", allow=("nf4",))
    kept = {x.leaf.path: x.leaf for x in planner._movable(("nf4",)).frozen}
    assert {p: x.codec for p, x in kept.items()} == {
        "layers/w": "nf4",
        "head": "nf4",
        "layers/norm": None,
    }
    for path, values in (("layers/w", 16 * MIB), ("head", 4 * MIB)):
        assert kept[path].nbytes == kept[path].nbytes_per_device == values * 17 // 32


def test_given_rules_decide_about_frozen_parameters():
    """What they name no codec for is not encoded; what they encode is frozen."""
    given = oo.OffloadConfig(
        ["0/.*"],
        parameters=[oo.Rule("head"), oo.Rule("layers/w", codec="int8-linear")],
    )
    planner = planner_of(given=given, frozen="head", allow=("nf4",))
    kept = {x.leaf.path: x for x in planner._movable(("nf4",)).frozen}
    assert {p: (x.given, x.leaf.codec) for p, x in kept.items()} == {
        "head": ("pinned_host", None),
        "layers/w": ("pinned_host", "int8-linear"),
    }


@pytest.mark.parametrize(
    ("make_step", "frozen", "message"),
    [
        (
            adapter_step,
            "layer",
            "matches no parameter. Write 'layers/.*', which matches 2 leaves. Nearest",
        ),
        (
            adapter_step,
            "layers/.*",
            r"replaces: 'layers/a', 'layers/b'.* as of 'layers/norm', 'layers/w'",
        ),
        (
            functools.partial(adapter_step, replaces=("head",)),
            "head|layers/w",
            "replaces: 'head'.* as of 'layers/w'",
        ),
        (adapter_step, "(", "not a valid regex"),
        (adam_step, "base", "which matches no parameter. The step replaces all of its"),
    ],
)
def test_what_cannot_be_frozen(make_step, frozen, message):
    """What is trained or replaced, and what is not there."""
    with pytest.raises(ValueError, match=message):
        planner_of(make_step, frozen=frozen)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tokens: tokens, "too many positional arguments"),
        (lambda model, optimizer, tokens: tokens, "required argument: 'tokens'"),
        (oo.Step, "Step is a class"),
    ],
    ids=["a step", "a step of three", "class"],
)
def test_what_is_no_factory(function, message):
    """It is told before it is called."""
    message += ". A step factory is a function that takes offload and target, and"
    with pytest.raises(ValueError, match=message):
        oo.plan(function, target="h100")


def test_what_is_passed_on_is_frozen():
    """A step may return its base."""
    make_step = functools.partial(adapter_step, passes=True)
    assert len(planner_of(make_step, frozen="head|.*/w")._states[()].frozen) == 2


def test_a_step_that_is_jitted_already():
    """Its base stays where it is, and the reason is told."""

    def make_step(offload, target):
        step = adapter_step(offload, target)
        return step._replace(fn=jax.jit(step.fn))

    planner = planner_of(make_step, frozen="head", allow=("nf4",))
    planner._trace()
    assert {v.frozen for v in variants(planner._facts)} == {"device"}
    assert "Give oo.Step the function itself" in planner._facts.outside[0]


def test_a_codec_where_nothing_is_frozen():
    """The option that is missing is named, and so are the codecs of state."""
    with pytest.raises(ValueError, match=r"'nf4', which is .*--frozen REGEX.*'int8'"):
        planner_of(allow=("nf4",))
    # Frozen by a given rule.
    given = oo.OffloadConfig(["0/.*"], parameters=[oo.Rule("head", codec="nf4")])
    assert planner_of(given=given, allow=("nf4",))._states[()].frozen


def test_a_codec_that_no_frozen_parameter_can_have():
    """The largest of them is named, and why."""
    with pytest.raises(ValueError, match=r"can be kept so, as 'layers/norm': under 12"):
        planner_of(frozen="layers/norm", allow=("nf4",))


def test_a_given_codec_of_what_is_trained():
    """As if the pattern had matched it."""
    given = oo.OffloadConfig(["0/.*"], parameters=[oo.Rule("layers/.*", codec="nf4")])
    with pytest.raises(ValueError, match="rule of parameters has a codec, and matches"):
        planner_of(given=given)
    rules = [oo.Rule("layers/[ab]", "device"), *given.parameters]
    given = dataclasses.replace(given, parameters=rules)
    frozen = planner_of(given=given)._states[()].frozen
    assert {x.leaf.path for x in frozen} == {"layers/w", "layers/norm"}


def test_adapters_beside_the_base_in_one_argument():
    """Paths begin in the argument, as in the tree that is placed."""

    def make_step(offload, target):
        step = adapter_step(offload, target)
        adapters, state, base, batch = step.args

        def one(params, state, batch):
            new, state = step.fn(params["low"], state, params["base"], batch)
            return params | {"low": new}, state

        return oo.Step(one, ({"low": adapters, "base": base}, state, batch))

    state = planner_of(make_step, frozen="base/.*")._states[()]
    assert {x.leaf.path for x in state.frozen} == {
        *("base/layers/w", "base/layers/norm", "base/head")
    }
    assert {x.leaf.path for x in state.trained} == {"low/layers/a", "low/layers/b"}
    assert {x.root for x in state.parameters} == {"0/"}
    rules = state.parameter_rules("all", "all")
    assert not any(rule.optional for rule in rules)


def test_rules_of_several_arguments():
    """Each is given all rules, so one that does not match in some is optional."""
    planner = planner_of(frozen="layers/w|head", allow=("nf4",))
    state = planner._movable(("nf4",))
    rules = {r.regex: r for r in state.parameter_rules("all", "all")}
    assert {p: (r.codec, r.optional) for p, r in rules.items()} == {
        "layers/(a|b)": (None, True),
        "layers/w": ("nf4", True),
        "head": ("nf4", True),
    }
    assert not any(r.optional for r in state.parameter_rules("device", "all"))
    placed = state.placed("all", "all")
    step = FACTORY.plain_step()
    assert names_of(step, placed) == ("adapters", "base")
    assert names_of(step, state.placed("all", "device")) == ("params",)
    unnamed = step._replace(fn=lambda *args: step.fn(*args))
    assert names_of(unnamed, placed) == ("params", "base")


def test_ways_of_frozen_parameters():
    """They move before trained ones; on the device codes are of what scans take."""
    planner = planner_of(frozen="layers/w|head", allow=("nf4",))
    planner._trace()
    found = variants(planner._facts)
    moved = {(v.codecs, v.parameters, v.frozen) for v in found}
    assert moved == {
        *(((), "device", w) for w in ("device", "rows", "all")),
        *(((), "rows", w) for w in ("rows", "all")),
        *((("nf4",), "device", w) for w in ("device", "rows", "all")),
        *((("nf4",), "rows", w) for w in ("rows", "all")),
    }
    sizes = planner._facts.sizes
    assert sizes.frozen[()] == {"device": 0, "rows": 32 * MIB, "all": 40 * MIB}
    assert sizes.frozen[("nf4",)]["all"] == 20 * MIB * 17 // 32
    way = Variant(codecs=("nf4",), frozen="rows")
    assert sizes.device_frozen(way) == 8 * MIB
    kept = sizes.frozen[("nf4",)]["rows"]
    assert way.host_bytes(planner._facts) == kept
    assert way.link_bytes(planner._facts) == (2 * kept, 0)
    outlook = Outlook(planner._facts, 100 * MIB, 1.0, 1e9)
    assert outlook(way).device_bytes == (100 - 32) * MIB
    assert way.text(sizes) == "frozen parameters on the host; nf4 parameters"
    stays = Variant(codecs=("nf4",))
    assert sizes.device_frozen(stays) == 8 * MIB + kept
    assert stays.link_bytes(planner._facts) == (0, 0)
    assert outlook(stays).device_bytes == (100 - 32) * MIB + kept
    assert stays.text(sizes) == "nothing moved; nf4 parameters"


def test_the_step_of_a_way_has_encoded_arguments():
    """What scans take rows of is encoded; the rest, and all else, is as it was."""
    planner = planner_of(frozen="layers/w|head", allow=("nf4",))
    planner._trace()
    for frozen, kind in ("rows", "pinned_host"), ("device", "device"):
        way = Variant(codecs=("nf4",), frozen=frozen)
        step, jitted = prepared(FACTORY, planner._states[("nf4",)], way)
        base = step.args[2]
        assert repr(base["layers"]["w"]) == "Encoded(nf4, bfloat16[16, 1024, 1024])"
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(base["layers"]["w"])}
        assert kinds == {kind}
    assert base["head"] == FACTORY.plain_step().args[2]["head"]
    assert jitted is not None


def test_an_output_file_given_again():
    """Its rules say what is frozen, also where they name no codec."""
    rules = [oo.Rule("layers/w", codec="nf4"), oo.Rule("head")]
    given = oo.OffloadConfig(["0/.*"], parameters=rules)
    planner = planner_of(given=given)
    frozen = {x.leaf.path: x.given for x in planner._states[()].frozen}
    assert frozen == {"layers/w": "pinned_host", "head": "pinned_host"}
    step, _ = prepared(FACTORY, planner._states[()], Variant())
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(step.args[2]["head"])}
    assert kinds == {"pinned_host"}
    assert "nf4" in repr(step.args[2]["layers"]["w"])


def test_parameters_that_rules_are_explained_for():
    """Trained ones, and those of the base that a rule matches."""
    rules = [oo.Rule("layers/w", codec="nf4"), oo.Rule("head")]
    given = oo.OffloadConfig(["0/.*"], parameters=rules)
    assert parameters_of(FACTORY, record(FACTORY), given) == [
        ("layers/a", 2 * LAYERS * WIDTH * RANK),
        ("layers/b", 2 * LAYERS * WIDTH * RANK),
        ("head", 8 * MIB),
        ("layers/w/codes_nf4_512", 8 * MIB),
        ("layers/w/scales", MIB // 2),
    ]


def test_what_is_worth_allowing_for_a_frozen_base():
    """NF4, if no codec of parameters is allowed."""
    optimizers = record(FACTORY)
    assert worth_allowing((), optimizers, True) == ("int8", "nf4")
    assert worth_allowing(("int8", "int8-linear"), optimizers, True) == ()


def compile_by_hand(found, tmp_path):
    """The step, as a script that reads the file of a plan makes it."""
    found.save(tmp_path / "rules.toml")
    config = oo.load_config(tmp_path / "rules.toml")
    assert config == found.config
    step = FACTORY.step(lambda inner: oo.offload(inner, config))
    adapters, state, base, batch = step.args
    base = oo.place(base, config.parameters)
    fn = oo.jit(step.fn, donate_argnums=(0, 1), **config.step)
    return aot.compile(fn, adapters, state, base, batch, target=found.target)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.newest
def test_a_plan_with_a_frozen_base(tmp_path, folder):
    """Within both budgets, of which the host's has no room without a codec."""
    options = {
        "target": H100,
        "budget_bytes": 24 * MIB,
        "host_memory_bytes": 30 * MIB,
        "folder": folder,
    }
    frozen = "layers/w|head"
    with pytest.raises(aot.DoesNotFitError, match="int8; frozen parameters as nf4"):
        oo.plan(adapter_step, **options, frozen=frozen)
    found = oo.plan(adapter_step, **options, frozen=frozen, allow="nf4")
    assert found.after.used_bytes <= 24 * MIB
    assert found.after.host_bytes <= 30 * MIB
    assert {r.codec for r in found.config.parameters} == {"nf4"}
    assert sum(found.after.parts.values()) == found.after.used_bytes
    assert found.training()[-2] == "base = oo.place(base, config.parameters)"
    assert "kept as nf4: 1 leaf of frozen parameters" in str(found)
    # Where the device has room for codes, they stay there.
    options |= {"budget_bytes": 36 * MIB}
    stays = oo.plan(adapter_step, **options, frozen=frozen, allow="nf4")
    (rule,) = stays.config.parameters
    assert (rule.memory_kind, rule.codec) == ("device", "nf4")
    assert stays.after.used_bytes <= 36 * MIB
    assert stays.after.host_bytes < MIB
    compiled = compile_by_hand(stays, tmp_path)
    assert aot.peak(compiled).peak_bytes == stays.after.used_bytes
    compiled = compile_by_hand(found, tmp_path)
    assert aot.peak(compiled).peak_bytes == found.after.used_bytes
    assert aot.peak(compiled).host_peak_bytes == found.after.host_bytes
    assert aot.step_time(compiled, H100) == found.after.time

"""Plans: what is found, and told, by the real compilers.

The tests marked `aot` compile with the real compilers (the extra `aot`).
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from step_factories import HEAD, MIB, STACK, adam_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._plan.cost import cost_of_step
from optax_offload._plan.result import Plan
from optax_offload._plan.search import CompiledCandidate
from optax_offload._plan.step import StepFactory, compile_step
from optax_offload._units import size_text

H100 = aot.Target("h100")


@pytest.mark.parametrize(
    ("make_step", "options", "error", "message"),
    [
        (lambda offload, target: 3, {}, TypeError, r"returns an .*Step.*, got 3"),
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


def test_target_by_name():
    """As the command takes it."""
    with pytest.raises(ValueError, match=r"Target\('h1000'\) names no chip"):
        oo.plan(adam_step, target="h1000")
    with pytest.raises(ValueError, match=r"budget_bytes is 0; .*'h100'"):
        oo.plan(adam_step, target="h100", budget_bytes=0)


def test_an_optimizer_that_is_none():
    """The factory's own mistake is that of `offload`."""
    with pytest.raises(TypeError, match="Call it first"):
        oo.plan(functools.partial(adam_step, optimizer=optax.adam), target=H100)


def compiled(used, moved=0):
    """A candidate with such a peak."""
    return CompiledCandidate(moved, used, None, True, 1.0, {})


@pytest.fixture
def compilers():
    """The wheels of the real compilers."""
    pytest.importorskip("jax_plugins")
    pytest.importorskip("libtpu")


def aot_mark(test):
    """Marks a test that compiles with them."""
    return pytest.mark.aot(pytest.mark.usefixtures("compilers")(test))


def compile_with(offload, make_step=adam_step, target=H100, fuse=False):
    """The step, with its optimizer wrapped."""
    step = make_step(offload, target)
    if fuse:
        step = step._replace(fn=oo.stream(step.fn))
    return compile_step(step, target)


unclipped_step = functools.partial(adam_step, clip=None)
logging_step = functools.partial(unclipped_step, logged=True)


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
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["h100", "h100:4", "v5e:2x2"],
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
    assert found.after.moved_bytes == sum(p.nbytes_per_device for p in found.moved)
    assert [x for x in said if isinstance(x, CompiledCandidate)] == list(found.compiled)
    assert len(said) == 2 * len(found.compiled)
    found.save(tmp_path / "rules.toml")
    config = oo.load_config(tmp_path / "rules.toml")
    assert config == found.config
    # The gradients wait for the norm, but not on the device.
    assert found.fused is None
    assert found.after.fused
    after = compile_with(lambda x: oo.offload(x, config), target=target, fuse=True)
    assert aot.peak(after).peak_bytes == found.after.used_bytes
    assert aot.peak(after).host_argument_bytes >= found.after.moved_bytes
    assert sum(found.after.parts.values()) == found.after.used_bytes
    for pattern in found.moved:
        assert pattern.pattern in str(found)


@aot_mark
@pytest.mark.slow
def test_fusing_alone_may_do():
    """Then nothing moves; with less memory the fused step's state does."""
    plain = aot.peak(compile_with(lambda x: x, unclipped_step)).peak_bytes
    fused = aot.peak(compile_with(lambda x: x, unclipped_step, fuse=True)).peak_bytes
    assert plain - fused > STACK // 2
    found = oo.plan(unclipped_step, target=H100, budget_bytes=fused)
    assert found.empty
    assert found.after is found.fused
    assert [c.used_bytes for c in found.compiled] == [plain, fused]
    assert found.after.parts["gradients"] <= HEAD
    peaks = f"{size_text(plain)} -> {size_text(fused)}"
    for text in (str(found), found.rule_file()):
        assert f"in the backward pass, before anything is moved: {peaks}" in text
        assert "fits: nothing is moved" in text
        assert "oo.stream(step)" in text
    less = oo.plan(unclipped_step, target=H100, budget_bytes=fused - MIB)
    assert less.fused is not None
    assert not less.fused.fits
    assert less.moved
    assert less.after.fused
    peak = aot.peak(compile_with(less.offload, unclipped_step, fuse=True))
    assert peak.peak_bytes == less.after.used_bytes <= fused - MIB


@aot_mark
@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, oo.jit])
def test_a_jitted_step_is_compiled_as_it_is(jit):
    """It cannot be fused from outside; one of `oo.jit` is fused already."""

    def make_step(offload, target):
        step = unclipped_step(offload, target)
        jitted = jit(step.fn, donate_argnums=(0, 1), out_shardings=step.out_shardings)
        return oo.Step(jitted, step.args)

    plain = aot.peak(compile_with(lambda x: x, make_step)).peak_bytes
    found = oo.plan(make_step, target=H100, budget_bytes=plain - MIB)
    assert found.before.used_bytes == plain
    assert found.fused is None
    assert not any(c.fused for c in found.compiled)
    assert found.moved


@aot_mark
@pytest.mark.slow
def test_what_must_go_and_what_must_stay():
    """Rules that are given decide, and the plan decides about the rest."""
    peak = aot.peak(compile_with(lambda x: x)).peak_bytes
    rules = [oo.Rule(".*/mu/layers", "device"), oo.Rule(".*/nu/head")]
    found = oo.plan(adam_step, target=H100, budget_bytes=peak - 20 * MIB, rules=rules)
    assert [x.moved_bytes for x in found.compiled][:2] == [HEAD, 2 * HEAD + STACK]
    assert found.config.rules[:2] == tuple(rules)
    moved = {leaf.path for pattern in found.moved for leaf in pattern.leaves}
    assert moved
    assert moved <= {"0/mu/head", "0/nu/layers"}
    unmoved = oo.plan(adam_step, target=H100, rules=rules)
    assert not unmoved.moved
    assert not unmoved.empty
    assert unmoved.config.rules == tuple(rules)


@aot_mark
@pytest.mark.slow
def test_what_cannot_be_fused_is_said():
    """In the plan, and where nothing fits; with the reason."""
    why = r"1 gradient of .* left outside: the step returns it"
    plain = aot.peak(compile_with(lambda x: x, logging_step)).peak_bytes
    found = oo.plan(logging_step, target=H100, budget_bytes=plain - MIB)
    assert found.fused is None
    assert not found.after.fused
    assert found.moved
    (line,) = found.outside
    assert re.fullmatch(why, line)
    assert line in str(found)
    with pytest.raises(aot.DoesNotFitError, match=why):
        oo.plan(logging_step, target=H100, budget_bytes=MIB)


@aot_mark
@pytest.mark.slow
def test_does_not_fit():
    """By how much, what takes the memory, and what would help."""
    everything = aot.peak(compile_with(oo.offload, fuse=True)).peak_bytes
    budget = everything - MIB
    message = (
        r"does not fit on 'h100' even with all state moved and updates in the "
        r"backward pass: short by 1\.00 MiB of .*"
        r"parameters 80\.00 MiB, gradients 16\.00 .*What would help:\n(.*\n)*"
        r"- bfloat16 parameters.*\n- more devices"
    )
    with pytest.raises(aot.DoesNotFitError, match=message) as error:
        oo.plan(adam_step, target=H100, budget_bytes=budget)
    assert error.value.used_bytes - error.value.limit_bytes == MIB


@aot_mark
@pytest.mark.slow
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
    used = aot.peak(compile_with(found.offload, make_step, fuse=True)).peak_bytes
    assert used == found.after.used_bytes <= found.budget_bytes


@aot_mark
@pytest.mark.slow
def test_codecs_before_moves(tmp_path):
    """Moments are encoded before any moves, if that may be, and the file says so."""
    budget = 240 * MIB
    found = oo.plan(unclipped_step, target=H100, budget_bytes=budget, codec="int8")
    assert found.encoded
    assert not found.moved
    assert found.after.moved_bytes == 0
    assert "kept as int8" in str(found)
    compiled_step = compile_with(found.offload, unclipped_step, fuse=True)
    used = aot.peak(compiled_step).peak_bytes
    assert used == found.after.used_bytes <= budget
    found.save(tmp_path / "rules.toml")
    assert oo.load_config(tmp_path / "rules.toml") == found.config
    assert {rule.codec for rule in found.config.rules} == {"int8"}
    with pytest.raises(ValueError, match="codec is 'int3'; it must be one of"):
        oo.plan(adam_step, target=H100, codec="int3")


def test_plans_are_values():
    """A plan can be made without a compiler, compared and shown."""
    found = Plan(
        target=H100,
        budget_bytes=MIB,
        config=oo.OffloadConfig([oo.Rule(".*", "device")]),
        moved=(),
        before=compiled(5),
        after=compiled(5),
        compiled=(compiled(5),),
        cost=cost_of_step(StepFactory(adam_step, H100), compiled(5), None),
        environment={},
    )
    assert dataclasses.replace(found) == found
    assert "nothing is moved" in str(found)
    assert found.as_dict()["empty"] is True
    assert np.isclose(found.cost.slowdown(), 1.0)

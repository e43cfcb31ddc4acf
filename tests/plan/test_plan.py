"""Plans: what is found, and told, by the real compilers.

The tests marked `aot` compile with the real compilers (the extra `aot`).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from step_factories import HEAD, MIB, STACK, adam_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._plan.alternatives import Alternatives, NothingFitsError
from optax_offload._plan.candidates import CompiledCandidate
from optax_offload._plan.result import Plan
from optax_offload._plan.variants import Variant

H100 = aot.Target("h100")


@pytest.mark.parametrize(
    ("make_step", "options", "error", "message"),
    [
        (lambda offload, target: 3, {}, TypeError, r"must return an .*Step.*, got 3"),
        (adam_step, {"budget_bytes": 0}, ValueError, "budget_bytes is 0; .* at most"),
        (
            adam_step,
            {"budget_bytes": 2**40},
            ValueError,
            r"at most what 'h100' has, 84942979072 \(79\.11 GiB\)",
        ),
        (adam_step, {"host_memory_bytes": -1}, ValueError, "host_memory_bytes is -1"),
        (
            adam_step,
            {"allow": "int8,int3"},
            ValueError,
            "allow has 'int3'; each must be one",
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
    return CompiledCandidate(Variant(), moved, used, None, True, 1.0, {})


def compile_with(offload, make_step=adam_step, target=H100, fuse=False):
    """The step, with its optimizer wrapped."""
    step = make_step(offload, target)
    if fuse:
        step = step._replace(fn=oo.stream(step.fn))
    return aot.compile(
        step.fn,
        *step.args,
        target=target,
        donate_argnums=step.donate_argnums,
        out_shardings=step.out_shardings,
    )


def plain_bytes(make_step, folder, target=H100):
    """The peak of a step as it is, which its plan need not compile again."""
    step = make_step(lambda inner: inner, target)
    options = {
        "donate_argnums": step.donate_argnums,
        "out_shardings": step.out_shardings,
    }
    return aot.measure(
        step.fn, *step.args, target=target, folder=folder, **options
    ).used_bytes


def compile_by_hand(config, make_step=adam_step, target=H100):
    """The step as a training script has it, from a rule file."""
    step = make_step(lambda inner: oo.offload(inner, config), target)
    params, *rest = step.args
    for rule in config.parameters:
        params = oo.set_memory_kind(params, rule.regex, "pinned_host")
    jitted = oo.jit(
        step.fn,
        donate_argnums=step.donate_argnums,
        out_shardings=step.out_shardings,
        **config.step,
    )
    return aot.compile(jitted, params, *rest, target=target)


unclipped_step = functools.partial(adam_step, clip=None)
logging_step = functools.partial(unclipped_step, logged=True)


def program(compiled):
    """The text of a compiled program, but for where its lines come from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    first = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    assert first is not None
    return text[first.start() :]


@pytest.mark.aot
@pytest.mark.slow
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


def check_by_hand(found, tmp_path, make_step=adam_step):
    """What is written, compiled by hand, has the peak and the time that are told."""
    found.save(tmp_path / "rules.toml")
    config = oo.load_config(tmp_path / "rules.toml")
    assert config == found.config
    compiled = compile_by_hand(config, make_step, found.target)
    assert aot.peak(compiled).peak_bytes == found.after.used_bytes
    assert aot.peak(compiled).host_peak_bytes == found.after.host_bytes
    assert aot.step_time(compiled, found.target) == found.after.time


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("h100", marks=pytest.mark.newest), "v5e:2x2"]
)
def test_the_rules_fit_the_budget(name, tmp_path, folder):
    """The peak and time of the program compiled with the file are the plan's."""
    target = aot.Target(name)
    high = plain_bytes(adam_step, folder, target)
    budget = aot.peak(compile_with(oo.offload, target=target)).peak_bytes
    said = []
    found = oo.plan(
        adam_step,
        target=target,
        budget_bytes=budget,
        folder=folder,
        progress=said.append,
    )
    assert 0 < len(found.moved) <= 4
    assert found.before.used_bytes == high
    assert found.after.used_bytes <= budget < found.before.used_bytes
    assert found.after.moved_bytes == sum(p.nbytes_per_device for p in found.moved)
    told = [x for x in said if isinstance(x, CompiledCandidate)]
    assert [c.variant for c in told] == [c.variant for c in found.compiled]
    assert len(said) == 2 * len(found.compiled)
    assert sum(found.after.parts.values()) == found.after.used_bytes
    fitting = [c for c in found.compiled if c.fits]
    assert found.after.step_seconds == min(c.step_seconds for c in fitting)
    for pattern in found.moved:
        assert pattern.pattern in str(found)
    check_by_hand(found, tmp_path)


@pytest.mark.aot
@pytest.mark.slow
def test_fusing_alone_may_do(tmp_path, folder):
    """Then nothing moves; with less memory the fused step's state does."""
    plain = plain_bytes(unclipped_step, folder)
    fused = aot.peak(compile_with(lambda x: x, unclipped_step, fuse=True)).peak_bytes
    assert plain - fused > STACK // 2
    options = {"target": H100, "folder": folder}
    found = oo.plan(unclipped_step, budget_bytes=fused, **options)
    assert found.empty
    assert found.after.what == "nothing moved; fused"
    assert found.after.used_bytes == fused
    assert found.config.step["fuse"] is True
    assert found.after.parts["gradients"] <= HEAD
    check_by_hand(found, tmp_path, unclipped_step)
    less = oo.plan(unclipped_step, budget_bytes=fused - MIB, **options)
    assert less.moved
    assert less.after.used_bytes <= fused - MIB
    check_by_hand(less, tmp_path, unclipped_step)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.newest
def test_parameters_and_residuals_move(tmp_path, folder):
    """In less than the parameters take, of a step that is written as usual."""
    found = oo.plan(adam_step, target=H100, budget_bytes=72 * MIB, folder=folder)
    assert "layers" in [r.regex for r in found.config.parameters]
    assert found.after.parameter_bytes >= STACK
    assert "parameters" in found.after.what
    assert found.alternatives.rows[-1].used_bytes <= found.after.used_bytes
    check_by_hand(found, tmp_path)


@pytest.mark.aot
@pytest.mark.slow
def test_host_memory(folder):
    """What the host has no room for is not taken, and said where it is all."""
    budget = 120 * MIB
    free = oo.plan(adam_step, target=H100, budget_bytes=budget, folder=folder)
    assert free.host_bytes > 80 * MIB
    with pytest.raises(NothingFitsError, match=r"were not tried|host memory is too sm"):
        oo.plan(
            adam_step,
            target=H100,
            budget_bytes=budget,
            host_memory_bytes=80 * MIB,
            folder=folder,
        )
    found = oo.plan(
        adam_step,
        target=H100,
        budget_bytes=200 * MIB,
        host_memory_bytes=120 * MIB,
        folder=folder,
    )
    assert found.after.used_bytes <= 200 * MIB
    assert 0 < found.host_bytes <= 120 * MIB
    assert all(c.host_bytes <= 120 * MIB for c in found.compiled)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, oo.jit])
def test_a_jitted_step(jit, folder):
    """Of one of `jax.jit` only state moves; one of `oo.jit` is jitted anew."""

    def make_step(offload, target):
        step = unclipped_step(offload, target)
        jitted = jit(step.fn, donate_argnums=(0, 1), out_shardings=step.out_shardings)
        return oo.Step(jitted, step.args)

    plain = plain_bytes(unclipped_step, folder)
    found = oo.plan(make_step, target=H100, budget_bytes=plain - MIB, folder=folder)
    assert found.before.used_bytes == plain
    assert any(c.fused for c in found.compiled) is (jit is oo.jit)
    if jit is jax.jit:
        assert found.moved
        assert "jit it with oo.jit" in str(found)


@pytest.mark.aot
@pytest.mark.slow
def test_a_plan_is_quick_the_second_time(tmp_path, caplog):
    """Nothing is compiled that was; what is compiled is logged."""
    caplog.set_level("INFO", "optax_offload.plan")
    options = {"target": "h100", "budget_bytes": 300 * MIB, "folder": tmp_path}
    first, second = (oo.plan(unclipped_step, **options) for _ in range(2))
    assert not any(c.was_kept for c in first.compiled)
    assert all(c.was_kept for c in second.compiled)
    assert second.rule_file().split("compiled")[1:] != []
    assert second.config == first.config
    assert second.after.time == first.after.time
    assert second.after.peak == first.after.peak
    assert "compiling: as given" in caplog.text
    assert "(cached)" in caplog.text
    next(tmp_path.iterdir()).write_text("{}")
    third = oo.plan(unclipped_step, **options)
    kept = [c.was_kept for c in third.compiled]
    assert kept.count(False) == 1, "what is damaged is not read"


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.newest
def test_what_must_go_and_what_must_stay(folder):
    """Rules that are given decide, and the plan decides about the rest."""
    peak = plain_bytes(adam_step, folder)
    rules = [oo.Rule(".*/mu/layers", "device"), oo.Rule(".*/nu/head")]
    options = {"target": H100, "rules": rules, "folder": folder}
    found = oo.plan(adam_step, budget_bytes=peak - 20 * MIB, **options)
    assert found.compiled[0].moved_bytes == HEAD
    assert max(x.moved_bytes for x in found.compiled) <= 2 * HEAD + STACK
    assert found.config.rules[:2] == tuple(rules)
    moved = {leaf.path for pattern in found.moved for leaf in pattern.leaves}
    assert moved <= {"0/mu/head", "0/nu/layers"}
    unmoved = oo.plan(adam_step, **options)
    assert not unmoved.moved
    assert not unmoved.empty
    assert unmoved.config.rules == tuple(rules)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.newest
def test_what_cannot_be_fused_is_said(folder):
    """In the plan, and where nothing fits; with the reason."""
    why = r"1 gradient of .* left outside: the step returns it"
    plain = plain_bytes(logging_step, folder)
    options = {"target": H100, "folder": folder}
    found = oo.plan(logging_step, budget_bytes=plain - MIB, **options)
    assert found.moved
    (line,) = [x for x in found.outside if "the step returns it" in x]
    assert re.fullmatch(why, line)
    assert line in str(found)
    with pytest.raises(aot.DoesNotFitError, match=why):
        oo.plan(logging_step, budget_bytes=MIB, **options)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.newest
def test_does_not_fit(folder):
    """By how much, what takes the memory, what would help, and what was tried."""
    message = (
        r"does not fit on 'h100', whatever is moved\. The smallest way \(state, all "
        r"parameters.*\) needs .* more than the budget of 1\.00 MiB: .*"
        r"What would help:\n(.*\n)*- at least \d+ devices"
    )
    with pytest.raises(NothingFitsError, match=message) as error:
        oo.plan(adam_step, target=H100, budget_bytes=MIB, folder=folder)
    table = error.value.alternatives
    assert error.value.used_bytes == table.rows[-1].used_bytes > error.value.limit_bytes
    assert [r.why.startswith("nearest: ") for r in table.rows].count(True) == 1


@pytest.mark.aot
@pytest.mark.slow
def test_does_not_fit_for_rules(folder):
    """State that has to stay may be what is in the way."""
    rules = oo.OffloadConfig(
        [oo.Rule(".*", "device")], parameters=[oo.Rule(".*", "device")]
    )
    with pytest.raises(
        aot.DoesNotFitError, match=r"rules that also move the 160\.00 MiB"
    ):
        oo.plan(
            adam_step,
            target=H100,
            budget_bytes=200 * MIB,
            rules=rules,
            folder=folder,
        )


@pytest.mark.aot
@pytest.mark.slow
def test_two_optimizers(folder):
    """Rules of one need not match in the other."""

    def make_step(offload, target):
        def both(_):
            labels = {"layers": "adam", "head": "sgd"}
            sgd = optax.sgd(1e-3, momentum=0.9)
            return optax.partition(
                {"adam": offload(optax.adam(1e-3)), "sgd": offload(sgd)}, labels
            )

        return adam_step(both, target)

    peak = plain_bytes(make_step, folder)
    found = oo.plan(make_step, target=H100, budget_bytes=peak - 50 * MIB, folder=folder)
    assert found.after.used_bytes <= found.budget_bytes
    used = aot.peak(compile_by_hand(found.config, make_step)).peak_bytes
    assert used == found.after.used_bytes
    if found.moved:
        assert all(rule.optional for rule in found.config.rules)


@pytest.mark.aot
@pytest.mark.slow
def test_codecs_are_in_the_search(tmp_path, folder):
    """Moments are encoded if that may be and is faster, and the file says so."""
    budget = 240 * MIB
    found = oo.plan(
        unclipped_step, target=H100, budget_bytes=budget, allow="int8", folder=folder
    )
    assert found.after.used_bytes <= budget
    assert found.encoded
    assert "kept as int8" in str(found)
    check_by_hand(found, tmp_path, unclipped_step)
    assert {rule.codec for rule in found.config.rules} == {"int8"}


masters_step = functools.partial(
    adam_step,
    clip=None,
    optimizer=oo.master_weights(optax.adam(1e-3)),
    dtype=jnp.bfloat16,
)


@pytest.mark.aot
@pytest.mark.slow
def test_remainders_where_the_host_is_too_small(tmp_path, folder):
    """The error names the codecs to allow; with these the file says so, and fits."""
    masters = STACK + HEAD
    options = {
        "target": H100,
        "budget_bytes": masters,
        "host_memory_bytes": masters + 4 * MIB,
        "folder": folder,
    }
    # Few ways have so little on the host, so few are compiled.
    with pytest.raises(aot.DoesNotFitError, match="--allow int8,bfloat16-remainder"):
        oo.plan(masters_step, **options | {"host_memory_bytes": MIB}, allow="int8")
    both = ["int8", "bfloat16-remainder"]
    found = oo.plan(masters_step, **options, allow=both)
    assert found.after.host_bytes <= masters + 4 * MIB
    assert found.after.used_bytes <= found.budget_bytes
    assert {rule.codec for rule in found.config.rules} == {*both}
    assert re.search("kept as bfloat16-remainder: .* of master weights", str(found))
    check_by_hand(found, tmp_path, masters_step)


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
        alternatives=Alternatives((), (), ()),
        environment={},
    )
    assert dataclasses.replace(found) == found
    assert "fits as it is: nothing is moved" in str(found)
    given = dataclasses.replace(found, config=oo.OffloadConfig([".*/mu"]))
    assert given.given == given.config.rules
    assert "fits with the given rules: nothing more is moved" in str(given)
    said = "the step donates nothing"
    assert said not in str(found)
    assert said in str(dataclasses.replace(found, donated={}))
    assert said not in str(dataclasses.replace(found, donated={"donate_argnums": ()}))
    assert found.as_dict()["empty"] is True

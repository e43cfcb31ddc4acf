"""Compiling one selection after another, with a compiler that only adds up."""

import dataclasses
import functools

import optax
import pytest
from step_factories import HEAD, STACK, adam_step

from optax_offload import aot
from optax_offload._plan import candidates
from optax_offload._plan.movable import movable_state
from optax_offload._plan.recording import record
from optax_offload._plan.step import StepFactory

TARGET = aot.Target("h100")
PARAMETERS = STACK + HEAD


@pytest.fixture
def said():
    """What the compiler tells of its progress."""
    return []


@pytest.fixture
def compiler(said):
    """Of a step with Adam, that may take all but its state."""
    factory = StepFactory(adam_step, TARGET)
    state = movable_state(record(factory), None, 1)
    return candidates.CandidateCompiler(factory, state, 3 * PARAMETERS, said.append)


def test_a_refusal_counts_as_what_the_compiler_says(compiler, said, monkeypatch):
    """All that is neither parameters nor state (a count: 4 bytes) is temporary."""

    def refuse(step, target):
        raise aot.DoesNotFitError("no", used_bytes=4 * PARAMETERS + 7, limit_bytes=1)

    monkeypatch.setattr(candidates, "compile_step", refuse)
    found = compiler.candidate(frozenset())
    assert found.used_bytes == 4 * PARAMETERS + 7
    assert compiler.compiled == [found]
    assert not found.fits
    assert found.peak is None
    assert sum(found.parts.values()) == found.used_bytes
    assert found.parts["gradients"] == PARAMETERS
    assert found.parts["activations"] == 7 - 4
    assert said[0] == "compiling with 0 B of state moved"
    assert said[1] is found


def test_updates_in_the_backward_pass(compiler, said, monkeypatch):
    """Gradients that wait for a norm are left where no state moves: compiled once."""

    def refuse(step, target):
        raise aot.DoesNotFitError("no", used_bytes=4 * PARAMETERS, limit_bytes=1)

    monkeypatch.setattr(candidates, "compile_step", refuse)
    nothing, everything = frozenset(), frozenset(range(4))
    left = compiler.candidate(nothing, fuse=True)
    assert "needs all gradients first" in " ".join(left.outside)
    assert dataclasses.replace(left, outside=()) == compiler.candidate(nothing)
    assert not compiler.fusing_lowers_the_peak(nothing)
    found = compiler.candidate(everything, fuse=True)
    assert found.fused
    assert found.parts["gradients"] == HEAD
    assert found.flops_again or found.stored_bytes == STACK
    assert not compiler.fusing_lowers_the_peak(everything)
    assert [c.fused for c in compiler.compiled] == [False, True, False]
    assert said[2] == (
        "compiling with 160.00 MiB of state moved, updates in the backward pass"
    )


def test_what_is_selected_is_moved(compiler, monkeypatch):
    """The step is made with `offload`, or with the optimizer as it is."""
    steps = []

    def refuse(step, target):
        steps.append(step)
        raise aot.DoesNotFitError("no", used_bytes=1, limit_bytes=1)

    monkeypatch.setattr(candidates, "compile_step", refuse)
    for selection in (frozenset(), frozenset([0]), frozenset(range(4))):
        compiler.candidate(selection)
    states = [step.args[1][1][0] for step in steps]
    kinds = [state.mu["layers"].sharding.memory_kind for state in states]
    assert kinds == ["device", "pinned_host", "pinned_host"]
    assert [c.moved_bytes for c in compiler.compiled] == [
        0,
        STACK,
        2 * PARAMETERS,
    ]
    assert all(c.fits for c in compiler.compiled)


def test_state_that_is_loaded_at_once_is_no_activation(monkeypatch):
    """As for a norm of accumulated gradients."""

    def refuse(step, target):
        raise aot.DoesNotFitError("no", used_bytes=9 * PARAMETERS, limit_bytes=1)

    monkeypatch.setattr(candidates, "compile_step", refuse)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    accumulated = functools.partial(adam_step, optimizer=optax.MultiSteps(inner, 4))
    for make_step, at_once in ((accumulated, 3 * PARAMETERS), (adam_step, None)):
        factory = StepFactory(make_step, TARGET)
        state = movable_state(record(factory), None, 1)
        compiler = candidates.CandidateCompiler(
            factory, state, 3 * PARAMETERS, lambda said: None
        )
        assert "state loaded at once" not in compiler.candidate(frozenset()).parts
        found = compiler.candidate(state.everything)
        assert found.parts.get("state loaded at once") == at_once
        assert sum(found.parts.values()) == found.used_bytes

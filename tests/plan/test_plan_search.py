"""Which selections are compiled, and what is kept of them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_factories import HEAD, STACK, adam_step

from optax_offload import aot
from optax_offload._plan import search
from optax_offload._plan.state import movable_state, record
from optax_offload._plan.step import StepFactory


class Oracle:
    """A peak from which each position takes a share of its size."""

    def __init__(self, fixed, sizes, saved):
        """Nothing has been asked yet."""
        self.fixed, self.sizes, self.saved = fixed, sizes, saved
        self.asked = []

    def __call__(self, selection):
        """The peak with a selection moved."""
        assert selection not in self.asked, "nothing is compiled twice"
        self.asked.append(selection)
        gone = sum(self.sizes[i] * self.saved[i] // 100 for i in selection)
        return self.fixed + sum(self.sizes) - gone


@given(
    fixed=st.integers(0, 1000),
    budget=st.integers(0, 3000),
    shares=st.lists(st.tuples(st.integers(1, 100), st.integers(50, 150)), max_size=40),
)
def test_smallest_that_fits(fixed, budget, shares):
    """Nothing if it fits; else no more than the shortest prefix, in few compiles."""
    shares.sort(reverse=True)
    sizes = [size for size, _ in shares]
    used = Oracle(fixed, sizes, [saved for _, saved in shares])
    selection = search.smallest_that_fits(sizes, used, budget)

    def peak(positions):
        oracle = Oracle(used.fixed, used.sizes, used.saved)
        return oracle(frozenset(positions))

    n = len(sizes)
    prefixes = [k for k in range(n + 1) if peak(range(k)) <= budget]
    if not prefixes:
        assert selection is None
        assert len(used.asked) <= 2
        return
    shortest = prefixes[0]
    assert selection is not None
    assert selection in used.asked, "what is chosen has been compiled"
    assert peak(selection) <= budget
    assert sum(sizes[i] for i in selection) <= sum(sizes[:shortest])
    assert selection == frozenset(range(shortest)) or selection >= frozenset(
        range(shortest - 1)
    )
    if shortest == 0:
        assert len(used.asked) == 1
    assert len(used.asked) <= 2 + 3 * n.bit_length() + 2


def test_a_straight_line_takes_four():
    """Interpolation hits at once, and the one before it is the proof."""
    sizes = [7] * 9 + [2] * 9
    used = Oracle(31, sizes, [100] * 18)
    selection = search.smallest_that_fits(sizes, used, 31 + sum(sizes) - 42)
    assert selection == frozenset(range(6))
    assert len(used.asked) == 4


def test_smaller_ones_stand_in_for_the_last():
    """Where 3 are missing, two of 2 are moved and not one of 7."""
    sizes = [7] * 9 + [2] * 9
    used = Oracle(31, sizes, [100] * 18)
    selection = search.smallest_that_fits(sizes, used, 31 + sum(sizes) - 45)
    assert selection == frozenset([*range(6), 9, 10])


def test_stand_ins_that_do_not_suffice():
    """What saves less than its size is made up for once, or given up."""
    saved = [100] * 3 + [90] * 6
    sizes = [2000] * 3 + [500, 400, 300, 200, 200, 100]
    used = Oracle(0, sizes, saved)
    found = search.smallest_that_fits(sizes, used, sum(sizes) - 2500)
    assert found == frozenset([0, 3, 8])
    hopeless = Oracle(0, sizes, [100] * 3 + [10] * 6)
    assert search.smallest_that_fits(sizes, hopeless, sum(sizes) - 2500) == frozenset(
        [0, 1]
    )


def test_least_is_exact_among_few():
    """The smallest sum in the range, of up to three."""
    sizes = [50, 11, 7, 5, 3]
    for least, below in itertools.product(range(1, 24), (10, 20, 40)):
        sums = [
            sum(c)
            for n in (1, 2, 3)
            for c in itertools.combinations(sizes[1:], n)
            if least <= sum(c) < below
        ]
        found = search.least_sum(sizes, range(1, 5), least, below)
        assert sum(sizes[i] for i in found or ()) == min(sums, default=0)


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
    return search.CandidateCompiler(factory, state, 3 * PARAMETERS, said.append)


def test_a_refusal_counts_as_what_the_compiler_says(compiler, said, monkeypatch):
    """All that is neither parameters nor state (a count: 4 bytes) is temporary."""

    def refuse(step, target):
        raise aot.DoesNotFitError("no", used_bytes=4 * PARAMETERS + 7, limit_bytes=1)

    monkeypatch.setattr(search, "compile_step", refuse)
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

    monkeypatch.setattr(search, "compile_step", refuse)
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

    monkeypatch.setattr(search, "compile_step", refuse)
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
    """As for a median of accumulated gradients."""

    def refuse(step, target):
        raise aot.DoesNotFitError("no", used_bytes=9 * PARAMETERS, limit_bytes=1)

    monkeypatch.setattr(search, "compile_step", refuse)

    def by_median(updates, state, params=None):
        leaves = map(jnp.ravel, jax.tree.leaves(updates))
        middle = jnp.median(jnp.concatenate([*leaves]))
        return jax.tree.map(lambda u: u / middle, updates), state

    divided = optax.GradientTransformation(lambda p: optax.EmptyState(), by_median)
    inner = optax.chain(divided, optax.adam(1e-3))
    accumulated = functools.partial(adam_step, optimizer=optax.MultiSteps(inner, 4))
    for make_step, at_once in ((accumulated, 3 * PARAMETERS), (adam_step, None)):
        factory = StepFactory(make_step, TARGET)
        state = movable_state(record(factory), None, 1)
        compiler = search.CandidateCompiler(
            factory, state, 3 * PARAMETERS, lambda said: None
        )
        assert "state loaded at once" not in compiler.candidate(frozenset()).parts
        found = compiler.candidate(state.everything)
        assert found.parts.get("state loaded at once") == at_once
        assert sum(found.parts.values()) == found.used_bytes

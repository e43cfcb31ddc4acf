"""What may move, after given rules have decided."""

import optax_offload as oo
from optax_offload._plan.movable import movable_state
from optax_offload._plan.patterns import Leaf
from optax_offload._plan.recording import RecordedOptimizer

MIB = 2**20


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


def test_a_rule_of_one_of_several_optimizers_is_optional():
    """All optimizers are given the same rules."""
    state = movable_state((ADAM, optimizer("0/trace/w", "0/nu/w")), None, 1)
    optional = {r.regex: r.optional for r in state.config(state.everything).rules}
    assert optional == {
        r"\d+/mu/w": True,
        r"\d+/nu/w": False,
        r"\d+/trace/w": True,
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

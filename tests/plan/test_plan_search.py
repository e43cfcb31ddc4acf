"""Which ways are compiled, in which order, and which are passed over."""

import dataclasses

import pytest

from optax_offload import aot
from optax_offload._places.step_options import Options
from optax_offload._plan.budget import Budget
from optax_offload._plan.candidates import CompiledCandidate
from optax_offload._plan.search import Search, _distance, _moves_more
from optax_offload._plan.variants import (
    WITHOUT_HIDING,
    Outlook,
    Sizes,
    StepFacts,
    Variant,
    variants,
)

GIB = 2**30
# 8 GiB of parameters, of which 7 are scanned, 16 of state (4 in a codec), gradients
# that a norm needs first, and 2 GiB of residuals.
SIZES = Sizes(
    state={(): 16 * GIB},
    given_state={(): 0},
    patterns={(): (8 * GIB, 8 * GIB)},
    parameters={"device": 0, "rows": 7 * GIB, "all": 8 * GIB},
    all_parameters=8 * GIB,
)
FACTS = StepFacts(
    sizes=SIZES,
    gradient_bytes=7 * GIB,
    late_bytes=7 * GIB,
    flops=3e12,
    flops_again=2e12,
    residual_bytes=2 * GIB,
)
PLAIN_BYTES = 36 * GIB
# The same, and with moments in eight bits.
ENCODED = dataclasses.replace(
    SIZES,
    state={(): 16 * GIB, ("int8",): 4 * GIB},
    given_state={(): 0, ("int8",): 0},
    patterns={(): (8 * GIB, 8 * GIB), ("int8",): (2 * GIB, 2 * GIB)},
)


class Machine:
    """What compiling would give: what is expected, and half a GiB of rows more."""

    def __init__(self, link=64e9, compute=1.0, rows=GIB // 2, sizes=SIZES, hidden=None):
        """Nothing is compiled yet."""
        self.sizes, self.rows, self.hidden = sizes, rows, hidden
        self.facts = dataclasses.replace(FACTS, sizes=sizes)
        self.outlook = Outlook(self.facts, PLAIN_BYTES, compute, link)
        self.compiled = []

    def search(self, device_bytes, host=None):
        """A search on it, with the plain step compiled."""
        self.budget = Budget(device_bytes, host)
        ways = variants(self.facts)
        search = Search(ways, self.outlook, self, self.budget, {})
        search.ask(Variant())
        return search

    def __call__(self, variant):
        """Compiles a way."""
        assert variant not in self.compiled, "nothing is compiled twice"
        self.compiled.append(variant)
        expected = self.outlook(variant)
        used = expected.device_bytes + self.rows * (not variant.is_plain)
        return CompiledCandidate(
            moved_bytes=self.sizes.moved_state(variant),
            parameter_bytes=self.sizes.parameters[variant.parameters],
            used_bytes=used,
            host_bytes=expected.host_bytes,
            peak=None,
            fits=self.budget.holds(used, expected.host_bytes),
            seconds=1.0,
            parts={},
            variant=variant,
            time=time_of(self.seconds(expected)),
        )

    def seconds(self, expected):
        """The time of a step: near the least, or with so much of the link hidden."""
        if self.hidden is None:
            return 1.05 * expected.seconds
        return (
            self.hidden * expected.seconds + (1 - self.hidden) * expected.serial_seconds
        )


def time_of(seconds):
    """A modeled time."""
    return aot.StepTime(seconds, seconds, 0, 0, 0, 0, 0, 0, ())


def brute_force(machine, device_bytes, host=None):
    """The least time of all ways that fit."""
    other = Machine(rows=machine.rows, sizes=machine.sizes, hidden=machine.hidden)
    other.outlook = machine.outlook
    other.budget = Budget(device_bytes, host)
    found = [other(v) for v in variants(machine.facts)]
    return min((c.step_seconds for c in found if c.fits), default=None)


@pytest.mark.parametrize("sizes", [SIZES, ENCODED], ids=["float32", "int8"])
@pytest.mark.parametrize("hidden", [None, 0.0, 0.5])
@pytest.mark.parametrize("host", [None, 40, 22, 12, 3])
@pytest.mark.parametrize("link", [6.4e9, 64e9])
def test_the_fastest_that_fits_is_found(link, host, hidden, sizes):
    """Within what is not worth a compilation, and without compiling all."""
    host = host and host * GIB
    ways = variants(dataclasses.replace(FACTS, sizes=sizes))
    for device in (35, 28, 20, 12, 6, 2):
        machine = Machine(link, sizes=sizes, hidden=hidden)
        search = machine.search(device * GIB, host)
        search.run()
        expected = brute_force(machine, device * GIB, host)
        if expected is None:
            assert search.best is None
            continue
        assert search.best is not None
        assert search.best.step_seconds <= 1.1 * expected
        assert len(machine.compiled) <= 2 + len(ways) // 2
        assert search.best.host_bytes <= (host or 2**60)


def test_what_is_never_compiled():
    """What the host has no room for, and what moves more than one that fits."""
    machine = Machine()
    search = machine.search(12 * GIB, host=20 * GIB)
    search.run()
    passed = {p.variant: p.reason for p in search.passed_over()}
    for variant in machine.compiled[1:]:
        assert machine.outlook(variant).host_bytes <= 20 * GIB
    for variant, reason in passed.items():
        if machine.outlook(variant).host_bytes > 20 * GIB:
            assert reason == "host"
    assert not set(machine.compiled) & set(passed)
    assert set(machine.compiled) | set(passed) == set(variants(FACTS))


def test_a_way_that_moves_more_is_passed_over():
    """If what moves less fits, and nothing else differs."""
    options = Options(late_gradients="recompute")
    every = frozenset([0, 1])
    machine = Machine()
    search = machine.search(14 * GIB)
    asked = search.ask(Variant(every, options=options))
    assert asked is not None
    assert asked.fits
    reasons = {p.variant: p.reason for p in search.passed_over()}
    more = Variant(every, parameters="rows", options=options)
    assert reasons[more] == "more"
    kept = dataclasses.replace(options, residuals="host")
    assert reasons[Variant(every, options=kept)] == "more"
    assert Variant(options=options) not in reasons or (
        reasons[Variant(options=options)] != "more"
    )


def test_predictions_learn():
    """The difference of one way's peak is added to those that are like it."""
    machine = Machine(rows=3 * GIB)
    search = machine.search(GIB)
    options = Options(late_gradients="recompute")
    every = frozenset([0, 1])
    one = Variant(every, parameters="rows", options=options)
    like = dataclasses.replace(one, options=Options(late_gradients="host"))
    before = search.predicted(like)
    search.ask(one)
    assert search.predicted(like) == before + 3 * GIB
    assert search.predicted(one) == machine.outlook(one).device_bytes + 3 * GIB


def test_where_nothing_fits_what_needs_least_is_compiled():
    """With smaller windows too, before it is given up."""
    machine = Machine()
    search = machine.search(GIB // 4)
    search.run()
    assert search.best is None
    assert any(v.window_bytes for v in machine.compiled)
    assert any(v.parameters == "all" for v in machine.compiled)
    assert len(machine.compiled) <= 5


def test_a_way_that_fails_is_passed_over():
    """With the error; the others are looked at all the same."""
    machine = Machine()

    def never_waiting(variant):
        if variant.options.late_gradients == "host":
            raise ValueError("a row is missing\nand more")
        return machine(variant)

    machine.budget = Budget(12 * GIB)
    ways = variants(FACTS)
    search = Search(ways, machine.outlook, never_waiting, machine.budget, {})
    search.ask(Variant())
    search.run()
    assert search.best is not None
    assert search.best.variant not in search.failed
    failed = [p for p in search.passed_over() if p.reason == "failed"]
    assert failed
    assert {p.error for p in failed} == {"ValueError: a row is missing"}


def test_what_ways_move():
    """By hand: each parameter three times up where the backward pass runs twice."""
    every = frozenset([0, 1])
    twice = Options(late_gradients="recompute", residuals="host")
    way = Variant(every, parameters="rows", options=twice)
    assert way.host_bytes(FACTS) == (16 + 7 + 2) * GIB
    assert way.link_bytes(FACTS) == ((16 + 21 + 2) * GIB, 25 * GIB)
    waits = dataclasses.replace(way, options=Options(late_gradients="host"))
    assert waits.host_bytes(FACTS) == (16 + 7 + 7) * GIB
    assert waits.link_bytes(FACTS) == ((16 + 14 + 7) * GIB, 30 * GIB)
    machine = Machine(link=1e18, compute=3.0)
    assert machine.outlook(way).seconds == pytest.approx(5.0)
    assert machine.outlook(waits).seconds == pytest.approx(3.0)
    assert machine.outlook(Variant()).device_bytes == PLAIN_BYTES
    gone = 16 + 7 + 7 + 2
    assert machine.outlook(way).device_bytes == PLAIN_BYTES - gone * GIB


def test_ways_of_a_step_that_is_jitted():
    """Only its state can move."""
    facts = dataclasses.replace(FACTS, can_stream=False)
    found = variants(facts)
    assert found == [Variant(), Variant(frozenset([0, 1]))]


def test_words():
    """What each does, as a table has it."""
    every = frozenset([0, 1])
    assert Variant().text() == "as given"
    fused = Options(late_gradients="host", residuals="host")
    way = Variant(every, ("int8", "bfloat16-remainder"), "rows", fused, 2**28)
    assert way.text() == (
        "state, parameters, residuals on the host; fused, late gradients on the host; "
        "int8 moments; masters as remainders; window 256.00 MiB"
    )
    assert Variant(frozenset([0])).text(SIZES) == (
        "8.00 GiB of 16.00 GiB of state on the host"
    )
    assert Variant(frozenset([0]), options=Options(residuals="host")).text(SIZES) == (
        "residuals and 8.00 GiB of 16.00 GiB of state on the host; fused"
    )
    assert Variant(options=Options()).text() == "nothing moved; fused"


def test_several_gpus_with_and_without_latency_hiding():
    """A way of its own, for the step as given too, told by ways that are without."""
    every = frozenset([0, 1])
    facts = dataclasses.replace(FACTS, on_gpus=True)
    without = [v for v in variants(facts) if v.options == WITHOUT_HIDING]
    assert Variant(options=WITHOUT_HIDING) in without
    assert Variant(every, options=WITHOUT_HIDING) in without
    assert {v.parameters for v in without} == {"device"}  # Rows have to be hidden.
    assert not [v for v in variants(FACTS) if v in without]
    jitted = dataclasses.replace(facts, can_stream=False)
    assert not [v for v in variants(jitted) if v in without]
    alone, moved = Variant(options=WITHOUT_HIDING), Variant(every)
    assert alone.text() == "nothing moved; without latency hiding"
    assert not _moves_more(dataclasses.replace(moved, options=WITHOUT_HIDING), moved)
    asked = dataclasses.replace(moved, options=WITHOUT_HIDING)
    assert _distance(asked, alone) < _distance(asked, moved)


def test_where_nothing_is_hidden_few_are_compiled():
    """How much of the link is waited for is learnt from the first way that moves."""
    compiled = {}
    for hidden in (None, 0.0):
        machine = Machine(6.4e9, sizes=ENCODED, hidden=hidden)
        search = machine.search(12 * GIB)
        search.run()
        assert search.best is not None
        compiled[hidden] = len(machine.compiled)
    assert compiled[0.0] <= 4


def test_how_gradients_wait_decides_what_is_hidden():
    """A way that waits for all of the link says little of one that waits otherwise."""
    machine = Machine(6.4e9, hidden=0.0)
    search = machine.search(12 * GIB)
    every = frozenset([0, 1])
    stored, twice, again = (
        Variant(every, parameters=which, options=Options(late_gradients=late))
        for which, late in (("device", "host"), ("rows", "recompute"), ("rows", "host"))
    )
    search.ask(stored)
    expected = machine.outlook(again)
    assert search.predicted_seconds(again) == pytest.approx(expected.serial_seconds)
    expected = machine.outlook(twice)
    assert expected.seconds < search.predicted_seconds(twice)
    assert search.predicted_seconds(twice) < 0.9 * expected.serial_seconds

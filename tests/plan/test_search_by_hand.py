"""What a search prefers, by figures of a few ways that are written by hand."""

import dataclasses

import pytest

from optax_offload import aot
from optax_offload._places.step_options import Options
from optax_offload._plan.budget import Budget
from optax_offload._plan.candidates import CompiledCandidate
from optax_offload._plan.search import Search, _distance, _moves_more
from optax_offload._plan.variants import (
    WITHOUT_HIDING,
    Expectation,
    Outlook,
    Sizes,
    StepFacts,
    Variant,
    variants,
)

BUDGET = 100
UNFUSED = Options(fuse=False)
WAITS, TWICE, STAYS = (
    Options(late_gradients=late) for late in ("host", "recompute", "device")
)


def some(count):
    """Ways of which none moves more than another: each has state of its own."""
    return [Variant(frozenset([n]), options=STAYS) for n in range(count)]


def expected(seconds, moved=0, *, used=0, serial=None):
    """A prediction; without ``serial``, nothing of the link can be hidden."""
    serial = seconds if serial is None else serial
    return Expectation(seconds, serial, used, 0, moved)


def compiled(variant, seconds, moved=0, parameters=0, *, used=0):
    """A way that was compiled."""
    return CompiledCandidate(
        moved_bytes=moved,
        parameter_bytes=parameters,
        used_bytes=used,
        peak=None,
        fits=used <= BUDGET,
        seconds=0.0,
        parts={},
        variant=variant,
        time=aot.StepTime(seconds, seconds, 0, 0, 0, 0, 0, 0, ()),
    )


def search_of(predictions, known=(), found=lambda variant: None):
    """A search among ways with these predictions, of which some were compiled."""
    search = Search(
        [*predictions],
        predictions.__getitem__,
        found,
        Budget(BUDGET),
        {c.variant: c for c in known},
    )
    return search


def test_the_best_is_the_fastest_whatever_it_moves():
    """Of ways that take equally long, that which moves less, parameters included."""
    one, two, three, four = some(4)
    slow = compiled(one, 2.0)
    more = compiled(two, 1.0, 100)
    less = compiled(three, 1.0, 50, 40)
    search = search_of({}, [slow, more])
    assert search.best is more
    search.known[three] = less
    assert search.best is less
    search.known[four] = compiled(four, 1.0, 0, 95)
    assert search.best is less
    search.known[four] = compiled(four, 0.5, used=BUDGET + 1)
    assert search.best is less, "what does not fit is not the best"


def test_ways_are_compiled_by_their_time_and_then_by_what_they_move():
    """Not the other way round, or the first that fits might be the slowest."""
    a, b, c, d = some(4)
    predictions = {
        a: expected(3.0, 1),
        b: expected(1.0, 9),
        c: expected(2.0, 7),
        d: expected(2.0, 5),
    }
    order = []

    def found(variant):
        order.append(variant)
        return compiled(variant, 1.0, used=BUDGET + 1)

    search_of(predictions, found=found).run()
    assert order == [b, d, c, a]


@pytest.mark.parametrize(("seconds", "reason"), [(0.97, None), (0.985, "slower")])
def test_a_gain_of_less_than_a_fiftieth_is_not_worth_a_compilation(seconds, reason):
    """What is expected a little faster than the best is passed over."""
    one, two = some(2)
    predictions = {one: expected(1.0), two: expected(seconds)}
    search = search_of(predictions, [compiled(one, 1.0)])
    assert search._reason(two) == reason


def test_only_what_differs_in_nothing_else_moves_more():
    """What has other codecs, another window or other state is another way."""
    every, first, last = frozenset([0, 1, 2]), frozenset([0]), frozenset([1, 2])
    less = Variant(first, options=STAYS)
    more = Variant(every, options=STAYS)
    assert _moves_more(more, less)
    assert not _moves_more(less, more)
    assert not _moves_more(Variant(last, options=STAYS), less), "not of the same state"
    for other in ({"codecs": ("int8",)}, {"window_bytes": 2**23}, {"options": WAITS}):
        assert not _moves_more(dataclasses.replace(more, **other), less)
    rows = dataclasses.replace(less, parameters="rows")
    assert _moves_more(rows, less)
    assert _moves_more(dataclasses.replace(less, parameters="all"), rows)


def test_what_is_hidden_elsewhere():
    """Unfused, as much as on average; fused otherwise, some of the least."""
    one, two = some(2)
    unfused = Variant(options=UNFUSED)
    waits = Variant(frozenset([0]), options=WAITS)
    hides = expected(1.0, serial=2.0)
    predictions = dict.fromkeys((one, two, unfused, waits), hides)
    search = search_of(predictions, [compiled(one, 1.2), compiled(two, 1.6)])
    assert search.predicted_seconds(unfused) == pytest.approx(1.4)
    assert search.predicted_seconds(waits) == pytest.approx(1 + 0.4 * 0.2)


def test_ways_are_near_that_have_the_same_codecs():
    """Of each setting that differs something is added."""
    way = Variant(frozenset([0]), ("int8", "bfloat16-remainder"), "rows", WAITS)
    assert _distance(way, way) == 0
    for other, distance in (
        ({"codecs": ("int8",)}, 2),
        ({"codecs": ()}, 4),
        ({"parameters": "all"}, 4),
        ({"state": frozenset()}, 4),
        ({"state": frozenset([0, 1])}, 0),
        ({"options": TWICE}, 2),
        ({"window_bytes": 2**23}, 2),
        ({"options": dataclasses.replace(WAITS, residuals="host")}, 1),
        ({"options": dataclasses.replace(WAITS, fuse=False)}, 8),
    ):
        assert _distance(way, dataclasses.replace(way, **other)) == distance, other


# Of 16 bytes of state the rules that are given move 4 already; in a codec there are 4.
SIZES = Sizes(
    state={(): 16, ("int8",): 4},
    given_state={(): 4, ("int8",): 0},
    patterns={(): (12,), ("int8",): (4,)},
    parameters={"device": 0, "rows": 7, "all": 8},
    all_parameters=8,
)
FACTS = StepFacts(SIZES, gradient_bytes=8, late_bytes=8, flops=2, flops_again=1)


def test_the_link_that_is_waited_for():
    """Fused, the longer of both directions; unfused, all that updates move, at last."""
    outlook = Outlook(FACTS, 50, compute_seconds=3.0, link_bytes_per_second=1.0)
    way = Variant(frozenset([0]), parameters="rows", options=TWICE)
    # Parameters are loaded for the forward pass and for two backward passes.
    assert outlook(way).seconds == 16 + 3 * 7
    assert outlook(way).serial_seconds == 3.0 * 1.5 + (16 + 3 * 7) + (16 + 7)
    after = dataclasses.replace(way, options=UNFUSED)
    assert outlook(after).seconds == (16 + 2 * 7 - (16 + 7)) + (16 + 7)
    fast = dataclasses.replace(outlook, compute_seconds=100.0)
    assert fast(after).seconds == 100.0 + (16 + 7)


def test_what_is_expected_to_leave_the_device():
    """What given rules move was never there; a codec takes off some of what stays."""
    outlook = Outlook(FACTS, 50, compute_seconds=3.0, link_bytes_per_second=1.0)
    assert outlook(Variant()).device_bytes == 50
    assert outlook(Variant(frozenset([0]))).device_bytes == 50 - 12
    assert outlook(Variant(codecs=("int8",))).device_bytes == 50 - (12 - 4)
    assert outlook(Variant(parameters="all")).device_bytes == 50 - 8
    assert outlook(Variant(options=TWICE)).device_bytes == 50 - 8
    assert outlook(Variant(options=STAYS)).device_bytes == 50


def test_which_ways_there_are():
    """None twice: late gradients, and parameters, are told apart where they differ."""

    def found(facts=FACTS, sizes=SIZES):
        ways = variants(dataclasses.replace(facts, sizes=sizes))
        assert len(ways) == len(set(ways))
        late = {v.options.late_gradients for v in ways if v.options.fuse}
        return late, {v.parameters for v in ways}

    assert found() == ({"recompute", "host"}, {"device", "rows", "all"})
    none = dataclasses.replace(FACTS, late_bytes=0)
    assert found(none)[0] == {"auto"}
    half = dataclasses.replace(FACTS, late_bytes=4)
    assert found(half)[0] == {"recompute", "host", "device"}
    rows = dataclasses.replace(SIZES, parameters={"device": 0, "rows": 8, "all": 8})
    assert found(sizes=rows)[1] == {"device", "rows"}
    whole = dataclasses.replace(SIZES, parameters={"device": 0, "rows": 0, "all": 8})
    assert found(sizes=whole)[1] == {"device", "all"}


def test_what_scans_load_has_to_be_hidden():
    """Parameters that are loaded whole do not: without hiding they may move."""
    facts = dataclasses.replace(FACTS, on_gpus=True)
    whole = dataclasses.replace(SIZES, parameters={"device": 0, "rows": 0, "all": 8})
    for sizes, which in ((SIZES, {"device"}), (whole, {"device", "all"})):
        found = variants(dataclasses.replace(facts, sizes=sizes))
        ways = [v for v in found if v.options == WITHOUT_HIDING]
        assert {v.parameters for v in ways} == which

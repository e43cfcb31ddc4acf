"""A modelled device, by plans of a few transfers: a byte takes a second."""

import dataclasses

from optax_offload._link import Link
from optax_offload.aot._clock import Run
from optax_offload.aot._model import Model
from optax_offload.aot._planner import (
    Compute,
    Done,
    Enter,
    Move,
    Place,
    Start,
    _moves,
    _weight,
    compute_seconds,
)
from optax_offload.aot._spans import length
from optax_offload.aot.transfers import Transfer

MODEL = Model(link=Link(1.0, 0.0))


def move(direction, nbytes, kernel=False):
    """A transfer of so many seconds."""
    return Move("m", direction, "copy", kernel, nbytes, True)


def start(name, *moves):
    """Begins transfers that are known by a name."""
    return Start(("main", name), moves)


def done(name):
    """Waits for them."""
    return Done(("main", name))


def run(*plan, model=MODEL):
    """The clock after a plan."""
    found = Run(model)
    found.carry_out([*plan], Place("entry", "top level", 1))
    found.finish()
    return found


def test_loads_wait_for_loads_and_stores_for_stores():
    """A load and a store do not disturb each other."""
    loads = start("a", move("load", 3)), start("b", move("load", 4))
    found = run(*loads, start("c", move("store", 5)))
    assert found.clock == 7, "also for what no done waits for"
    assert (found.busy_seconds("load"), found.busy_seconds("store")) == (7, 5)
    assert (found.both_seconds, found.link_seconds, found.span_seconds) == (5, 7, 7)
    # Of the second load alone nobody need wait for the first one's sake.
    assert run(*loads, done("a"), Compute(1)).clock == 7
    assert run(*loads, done("a"), Compute(9)).clock == 12


def test_a_copy_within_the_host_takes_both_directions():
    """It waits for what goes on in either, and both wait for it."""
    copy = start("a", move("host copy", 3))
    found = run(copy, start("b", move("load", 2)), start("c", move("store", 4)))
    assert found.clock == 7
    assert (found.both_seconds, found.busy_seconds("host copy")) == (2, 3)
    for direction in ("load", "store"):
        found = run(start("b", move(direction, 5)), copy)
        assert found.clock == 8, direction


def test_what_is_computed_beside_a_transfer():
    """All between its start and its done; beside a kernel nothing is."""
    load = move("load", 4)
    found = run(start("a", load), Compute(1), Compute(2), done("a"), Compute(5))
    assert (found.clock, found.computed_seconds) == (4 + 5, 8)
    assert (load.between, load.between_seconds, load.runs) == (2, 3, 1)
    by_kernel = start("a", move("load", 4, kernel=True)), Compute(3), done("a")
    assert run(*by_kernel).clock == 7
    pretended = dataclasses.replace(MODEL, kernels_occupy_device=False)
    assert run(*by_kernel, model=pretended).clock == 4


def test_a_loop_counts_as_often_as_it_runs():
    """In its time, in what it computes and in what it moves."""
    body = [start("a", move("load", 2)), done("a"), Compute(1)]
    place = Place("loop", "loop", 3)
    loop = Enter(body, place, 3)
    found = run(loop)
    assert (found.clock, found.computed_seconds) == (9, 3)
    assert (place.runs, place.seconds) == (3, 9)
    assert compute_seconds([loop, Compute(1)]) == 4
    assert _weight([loop, Compute(1)]) == (6, 4)


def test_most_in_flight():
    """Loads, stores, and both together, while there are some of both."""
    found = run(
        start("a", move("load", 1)),
        start("b", move("load", 1)),
        start("c", move("load", 1)),
        done("a"),
        done("b"),
        start("d", move("store", 1)),
        done("c"),
        done("d"),
    )
    assert found.most_in_flight == (3, 1, 2)


def test_an_instruction_moves_its_arrays_at_once():
    """Those of one direction are one transfer of all their bytes."""

    def of(direction, nbytes):
        shape, how = ("float32", (1,)), ("fusion", "kernel", False)
        return Transfer("f", "op", direction, *shape, nbytes, 1, True, (), *how)

    load, store = _moves((of("load", 3), of("load", 4), of("store", 5)))
    assert (load.direction, load.nbytes) == ("load", 7)
    assert (store.direction, store.nbytes) == ("store", 5)
    assert load.kernel


def test_spans_that_lie_in_others():
    """Time that is in several of them counts once."""
    assert length([(0, 10), (2, 3), (4, 12), (20, 21)]) == 13
    assert length([(5, 6), (0, 1)]) == 2
    assert length([]) == 0

"""A modeled device, by schedules of a few transfers: a byte takes a second."""

from optax_offload._host.link import Link
from optax_offload.aot._timeline import (
    Done,
    Model,
    Place,
    Start,
    TimedMove,
    Timeline,
    _moves,
    _one_of,
    length,
)
from optax_offload.aot.transfers import Transfer

MODEL = Model(link=Link(1.0, 0.0))


def move(direction, nbytes, kernel=False):
    """A transfer of so many seconds."""
    return TimedMove("m", direction, "copy", kernel, nbytes, True)


def start(*moves):
    """Begins transfers."""
    return Start(moves)


def run(*steps):
    """The device after these steps."""
    return Timeline(Place("entry", "top level", 1, [*steps]), MODEL)


def test_loads_wait_for_loads_and_stores_for_stores():
    """A load and a store do not disturb each other."""
    first, second = start(move("load", 3)), start(move("load", 4))
    found = run(first, second, start(move("store", 5)))
    assert found.seconds == 7, "also for what no done waits for"
    assert (found.load_seconds, found.store_seconds) == (7, 5)
    assert found.link_seconds == 7
    # Of the second load alone nobody need wait for the first one's sake.
    assert run(first, second, Done(first), 1).seconds == 7
    assert run(first, second, Done(first), 9).seconds == 12


def test_a_copy_within_the_host_takes_both_directions():
    """It waits for what goes on in either, and both wait for it."""
    copy = start(move("host copy", 3))
    found = run(copy, start(move("load", 2)), start(move("store", 4)))
    assert found.seconds == 7
    assert found.spans == {"host copy": [(0, 3)], "load": [(3, 5)], "store": [(3, 7)]}
    for direction in ("load", "store"):
        found = run(start(move(direction, 5)), copy)
        assert found.seconds == 8, direction


def test_what_is_computed_beside_a_transfer():
    """All between its start and its done; beside a kernel nothing is."""
    load = start(move("load", 4))
    found = run(load, 1, 2, Done(load), 5)
    assert (found.seconds, found.compute_seconds) == (4 + 5, 8)
    assert [(m.between, m.runs) for m in load.moves] == [(2, 1)]
    kernel = start(move("load", 4, kernel=True))
    assert run(kernel, 3, Done(kernel)).seconds == 7


def test_a_loop_counts_as_often_as_it_runs():
    """In its time, in what it computes and in what it moves."""
    load = start(move("load", 2))
    loop = Place("loop", "loop", 3, [load, Done(load), 1])
    found = run(loop)
    assert (found.seconds, found.compute_seconds) == (9, 3)
    assert (loop.runs, loop.seconds) == (3, 9)
    around = Place("entry", "top level", 1, [loop, 1, start(move("store", 5))])
    assert (around.moved_bytes, around.compute_seconds) == (3 * 2 + 5, 4)
    assert [p.name for p in around.places] == ["entry", "loop"]


def test_the_branch_that_moves_more_is_taken():
    """Then the one that computes longer; one that moves nothing is an operation."""

    def branch(name, *steps):
        return Place(name, "branch", 1, [*steps])

    def taken(*branches):
        steps = [*_one_of(branches)]
        return [p for p in branches if p.taken], steps

    load, more = start(move("load", 1)), start(move("load", 2))
    least, most = branch("a", load, 9), branch("b", more)
    assert taken(least, most) == ([most], [least, most])
    assert run(*_one_of([least, most])).seconds == 2
    short, long = branch("c", 1, 2), branch("d", 4)
    assert taken(short, long) == ([long], [4])
    assert taken(long, most) == ([most], [most])
    assert taken() == ([], [])


def test_most_in_flight():
    """Loads, stores, and both together, while there are some of both."""
    a, b, c = (start(move("load", 1)) for _ in range(3))
    d = start(move("store", 1))
    found = run(a, b, c, Done(a), Done(b), d, Done(c), Done(d))
    assert found.most_in_flight == found.places[0].most_in_flight == (3, 1, 2)


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

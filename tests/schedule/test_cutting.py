"""Where a step without scans is cut, of numbers alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._ground.units import MIB
from optax_offload._places import memory
from optax_offload._schedule.turns import cutting
from optax_offload._schedule.turns.cutting import Alive, Filling, Piece, parted

# The logits, what the loss makes of them, and the gradient of the head.
LOGITS, ERRORS, HEAD = 1600 * MIB, 1599 * MIB, 150 * MIB
END = 100


def pieces(*ends):
    """Segments that end there."""
    begins = (0, *ends)
    return [Piece(b, e, True) for b, e in zip(begins, ends, strict=False)]


def cut(alive, some=None):
    """Where the segments of a step end that takes nothing at rest."""
    found = parted(some or pieces(50, END), Filling([set()] * END, {}), alive)
    return [piece.end for piece in found]


def test_a_gradient_is_not_there_beside_the_logits():
    """The segment ends before it is computed, if that is what is handed on longest."""
    alive = [
        Alive(10, 20, LOGITS, False),
        Alive(20, 31, ERRORS, False),
        Alive(30, END, HEAD, True),
    ]
    assert cut(alive) == [30, 50, END]


def test_what_it_is_computed_of_has_no_buffer_before():
    """None is free, if nothing large is there before it: the peak would only move."""
    others = [Alive(k, k, LOGITS // 4, False) for k in range(2, 9)]
    late = [Alive(28, 31, LOGITS // 2, False), Alive(30, END, HEAD, True)]
    assert cut([*others, *late]) == [50, END]


@pytest.mark.parametrize("size", [2 * MIB, 31 * MIB])
def test_little_is_handed_on(size):
    """It is not worth a loop."""
    alive = [Alive(10, 30, LOGITS, False), Alive(30, END, size, True)]
    assert cut(alive) == [50, END]


@pytest.mark.parametrize(("layers", "ends"), [(11, [30, 50, END]), (13, [50, END])])
def test_what_is_much_less_than_all_that_is_taken_is_little(layers, ends):
    """Each segment more costs the time of a turn."""
    gradients = [jex.Var(jax.typeof(jnp.zeros(1))) for _ in range(layers)]
    taken = [{*gradients[k - 60 : k - 59]} for k in range(END)]
    filling = Filling(taken, dict.fromkeys(gradients, HEAD))
    alive = [
        Alive(10, 20, LOGITS, False),
        Alive(20, 31, ERRORS, False),
        Alive(30, END, HEAD, True),
    ]
    found = parted(pieces(50, END), filling, alive)
    assert [piece.end for piece in found] == ends


def test_only_the_fullest_is_cut():
    """Elsewhere nothing is gained, whatever is handed on."""
    alive = [
        Alive(10, 20, LOGITS, False),
        Alive(70, 80, ERRORS // 2, False),
        Alive(80, END, HEAD, True),
    ]
    assert cut(alive) == [50, END]


def test_what_is_between_segments_is_left():
    """There nothing has a buffer before it is computed."""
    some = [Piece(0, 50, False), Piece(50, END, True)]
    alive = [Alive(10, 30, LOGITS, False), Alive(30, END, HEAD, True)]
    assert cut(alive, some) == [50, END]


def with_parameters(*taken):
    """What fills segments: 60 MiB at rest, taken by some of the equations."""
    of = jax.eval_shape(lambda: jnp.zeros((60 * MIB,), jnp.int8))
    v = jex.Var(memory.host_type(memory.type_of(of)))
    return Filling([{v} if k in taken else set() for k in range(END)], {v: 60 * MIB})


def test_the_logits_are_not_beside_the_last_layers():
    """Nor beside what the backward pass loads: only that turn waits for its loads."""
    alive = [Alive(30, 40, LOGITS, False), Alive(35, 49, ERRORS, False)]
    found = parted(pieces(50, END), with_parameters(10, 20, 60), alive)
    assert [(x.end, x.alone) for x in found] == [(30, False), (50, True), (END, False)]


def test_loads_wait_only_where_the_peak_is_lower():
    """Two turns are as full: it would stay where it is."""
    alive = [Alive(k, k + 5, LOGITS, False) for k in (30, 80)]
    found = parted(pieces(50, END), with_parameters(10, 60), alive)
    assert [(x.end, x.alone) for x in found] == [(50, False), (END, False)]


def test_what_a_loop_takes_is_there_until_its_end():
    """So the turn that uses up the gradient of logits has not a layer's work in it."""
    work = [Alive(k, k + 1, LOGITS, False) for k in (70, 75)]
    alive = [Alive(10, 20, LOGITS, False), Alive(20, 52, ERRORS, False), *work]
    assert cut(alive) == [50, 53, END]
    assert cut([*alive[:-2], Alive(70, 71, LOGITS // 2, False)]) == [50, END]


def test_buffers_that_wait_are_used():
    """By what is smaller, but not by half."""
    waiting = [Alive(0, 0, 8, False), Alive(0, 0, 4, False)]
    assert cutting._left(waiting, []) == 12
    assert cutting._left(waiting, [5, 3]) == 4
    assert cutting._left(waiting, [3, 9]) == 9


def test_what_is_written_over_is_there_in_a_segment_that_only_takes_it():
    """What a loop takes has its place until that ends."""
    taken, made = Alive(10, 60, LOGITS, False, over=True), Alive(60, 61, LOGITS, False)
    assert cutting._peak(Piece(0, 70, True), [taken, made]) == LOGITS
    assert cutting._peak(Piece(50, 70, True), [taken, made]) == 2 * LOGITS


def test_what_is_handed_on_is_written_over_nothing():
    """It has its place from the beginning of the segment."""
    over, made = Alive(10, 20, LOGITS, False, over=True), Alive(20, 90, LOGITS, False)
    assert cutting._peak(Piece(0, 50, True), [over, made]) == 2 * LOGITS
    assert cutting._peak(Piece(0, 95, True), [over, made]) == LOGITS


def test_the_peak_of_segments_has_what_updates_load():
    """And what is loaded for the segment, and for the next one."""
    filling = with_parameters(10, 60)
    room = limits.now.rooms_of_updates * cutting.room(filling)
    alive = [Alive(55, 58, LOGITS, False), Alive(70, 80, HEAD, False)]
    some = [*pieces(50), Piece(50, 60, False), Piece(60, END, True)]
    assert cutting.peak(some, filling, alive) == HEAD + 60 * MIB + room
    assert cutting.peak(pieces(END), filling, alive) == LOGITS + 60 * MIB + room


@pytest.mark.parametrize("inside", [MIB, LOGITS])
def test_turns_do_not_hand_on_what_layers_make_inside(inside):
    """They take more than usual, if that is less than what they would hand on."""
    layers, each = range(0, 80, 8), 12 * MIB
    x = jax.eval_shape(lambda: jnp.zeros((each,), jnp.int8))
    host = memory.host_type(memory.type_of(x))
    some = {k: jex.Var(host) for layer in layers for k in (layer, layer + 4)}
    taken = [{some[k]} if k in some else set() for k in range(80)]
    filling = Filling(taken, dict.fromkeys(some.values(), each))
    alive = [Alive(k, k + 5, inside, False, over=True) for k in layers]
    alive += [Alive(k + 5, k + 6, inside, False) for k in layers]
    passing = [inside if 0 < k % 8 < 7 else 8 * MIB for k in range(81)]
    found, some = cutting.cut(filling, [False] * 80, passing, alive)
    cuts = [x for x in some if x.is_segment]
    assert (found.times, len(cuts)) == ((1, 20) if inside == MIB else (2, 10))


def of_layers(count):
    """What fills segments: layers of 120 MiB, an embedding, and a scale of 1 KiB."""
    some: list[jex.Var] = []
    for size in (*[40 * MIB, 30 * MIB, 50 * MIB] * count, 70 * MIB, 1024):
        x = jax.ShapeDtypeStruct((size,), jnp.int8)
        some.append(jex.Var(memory.host_type(memory.type_of(x))))
    return Filling([{v} for v in some], {v: memory.nbytes(v.aval) for v in some})


@pytest.mark.parametrize("layers", [96, 192, 384])
def test_turns_take_two_layers_at_most(layers):
    """However many there are, so that the peak is that of few."""
    filling = of_layers(layers)
    equations = len(filling.taken)
    some = cutting.pieces(filling, [False] * equations, [0] * equations)
    most = max(filling.size(filling.within(x.begin, x.end)) for x in some)
    assert 120 * MIB <= most <= 240 * MIB


@pytest.mark.parametrize(("count", "size"), [(7, 120 * MIB), (1, float("inf"))])
def test_layers_are_known_by_like_arrays(count, size):
    """Where none are alike, turns grow with the root of all that rests."""
    filling = of_layers(count)
    assert cutting._layer(filling.sizes, filling) == size


def test_what_turns_load():
    """Their own, and what the next one takes, unless they load nothing for it."""
    filling = with_parameters(10, 60)
    there = [*pieces(50), Piece(50, 60, False), Piece(60, END, True)]
    assert cutting.loaded(there, filling) == [60 * MIB, 0, 60 * MIB]
    there = [Piece(0, 10, True), Piece(10, 60, True, True), Piece(60, END, True)]
    assert cutting.loaded(there, with_parameters(60)) == [0, 0, 60 * MIB]
    assert cutting.loaded(there, with_parameters(15)) == [60 * MIB, 60 * MIB, 0]


def test_segments_of_long_sequences_are_longer():
    """By a share of what is alive, up to the layers and the room that they may take."""
    filling = of_layers(70)
    much = limits.now.much_alive_bytes
    usual, *rooms = (
        cutting.room(filling._replace(alive=n)) for n in (0, much, much + 2**30, 2**40)
    )
    assert rooms == [usual, round(2**30 / limits.now.alive_share), 240 * MIB]
    one = of_layers(1)  # No layers are found.
    large = {v: 100 * size for v, size in one.sizes.items()}
    one = one._replace(alive=2**40, sizes=large)
    assert cutting.room(one) == limits.now.most_room * limits.now.segment_bytes


def test_as_many_times_as_much_fills_a_segment():
    """Up to two layers."""
    filling = of_layers(8)
    usual = cutting.room(filling)
    assert cutting.room(filling._replace(times=2)) == 2 * usual < 240 * MIB
    assert cutting.room(filling._replace(times=20)) == 240 * MIB


@pytest.mark.parametrize("layers", [7, 14])
def test_long_segments_are_a_share_of_all(layers):
    """Few layers are not all on the device, however much else is."""
    filling = of_layers(layers)._replace(alive=2**40)
    least = cutting.room(filling._replace(alive=0))
    share = filling.size(filling.sizes) / limits.now.most_share
    assert cutting.room(filling) == round(max(least, share)) < 240 * MIB


@pytest.mark.parametrize(
    ("layers", "part"), [(1, 1 / 4), (8, 15 / 32), (68, 2), (2000, 240 / 64)]
)
def test_segments_of_what_is_little_are_short(layers, part):
    """They take a part of it, down to a quarter of the usual; of much, its root."""
    filling = of_layers(layers)
    assert cutting.room(filling) == pytest.approx(
        part * limits.now.segment_bytes, rel=0.1
    )


def with_residuals(filling, size, count=8):
    """The same with so many residuals."""
    some = [
        jex.Var(jax.core.ShapedArray((size * MIB,), jnp.int8)) for _ in range(count)
    ]
    sizes = {**filling.sizes, **dict.fromkeys(some, size * MIB)}
    return filling._replace(residuals=frozenset(some), sizes=sizes)


def test_segments_have_room_for_each_residual():
    """And a layer's gradients: or every equation that takes it would be one."""
    filling = of_layers(8)._replace(alive=2**40)
    assert cutting.room(with_residuals(filling, 300)) == 120 * MIB + 300 * MIB


def test_few_large_residuals_need_no_room():
    """As logits, and their gradients: layers have none as large."""
    filling = of_layers(8)
    logits = with_residuals(filling, 300, limits.now.least_segments - 1)
    assert cutting.room(logits) == cutting.room(filling)


def test_a_large_residual_shares_its_turn_with_what_makes_it():
    """One that fills a turn would be alone, and its layer two more."""
    filling = of_layers(1)
    usual = cutting.room(filling)
    assert cutting.room(with_residuals(filling, 100)) == 100 * MIB + usual
    assert cutting.room(with_residuals(filling, 64)) == usual

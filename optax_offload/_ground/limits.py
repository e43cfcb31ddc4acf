"""How much of something is worth what it costs: every such size of the engine."""

from __future__ import annotations

import dataclasses

from optax_offload._ground.units import MIB


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes by which a step is cut, and by which something moves or stays.

    Attributes:
      segment_bytes: What a segment takes of what rests, or what one equation takes,
        where ``many_bytes`` rest: a few milliseconds of a link. Of less it is less,
        down to a part of it, 1 / ``least_part``, as some ten times as much is on the
        device. Of more it grows with the square root, and so does the number of
        segments, up to what ``most_layers`` take.
      many_bytes: See ``segment_bytes``.
      least_part: See ``segment_bytes``.
      most_layers: See ``segment_bytes``.
      much_alive_bytes: Where long sequences have more than this in memory, a segment
        takes up to a share of the rest, 1 / ``alive_share``, up to ``most_room`` times
        the usual, and up to 1 / ``most_share`` of all that is taken: it computes for
        longer, and hands on less often.
      alive_share: See ``much_alive_bytes``.
      most_room: See ``much_alive_bytes``.
      most_share: See ``much_alive_bytes``.
      rooms: How many times as much is tried, where that lowers the peak: long sequences
        make more inside a layer than it takes, which turns that end there hand on.
      least_parted_bytes: What one more segment has to take from the peak,
      least_parted_part: and what part of all that is taken: it costs a turn's time.
      least_alive_bytes: The least that counts for it.
      rooms_of_updates: How many times what fills a segment may be loaded in it for
        updates: two moments, of its own and of the next one.
      least_segments: Fewer leave too little out to be worth their loops, and the time
        that these take to compile.
      least_freed_bytes: Turns of gradients alone are worth it where so much less is on
        the device: a scheduler that overlaps transfers keeps some 100 MiB more of a
        large model.
      least_freed_part: And so large a part of the peak: what waits crosses the link
        twice more, when nothing is computed. An update that takes as much of both waits
        for the turn in which least is alive.
      small_bytes: What is less may be loaded again for what is computed again.
      reduced_bytes: What an update is reduced to, as by a norm, costs nothing to keep
        until the end of a step if it is no more.
      turn_bytes: What is loaded for the updates of a turn by the one before, at most.
        What is more is loaded beside the products of the turn itself, if each update
        has one, or else updated between turns, in slices.
      turn_rooms: And as many times what fills a turn, at most.
      least_residual_bytes: A residual between turns that is less is not worth a
        transfer of its own.
      least_residual_rows_bytes: Nor are rows of a scan's residual, all of them, in
        every iteration.
      least_stack_bytes: A stack that is less is not worth a loop of its own.
      least_products: The least products of a backward pass in a body that may be cut
        into turns.
      least_taken_bytes: The least that it takes of the step around it: of less all may
        be on the device,
      least_flops_per_byte: as where its backward pass computes less of each byte, which
        each iteration of its loop would load,
      much_taken_bytes: unless it takes so much.
      least_apart_bytes: Leaves of less are loaded together with the others of their
        group: what their stores gain beside those loads is less than the latency, and
        a part is a kernel to compile.
      least_tied_bytes: What is less is moved at any time.
      most_products: What begins beside a product lasts no longer than so many of it
        (F88).
      least_in_turn_bytes: A TPU's compiler takes any smaller transfer for one of this
        size: many of them, one after the other, would keep it from overlapping anything
        else (F77).
      much_in_a_turn_bytes: Copies in flight between turns take memory too, 32 MiB of a
        step that needs 550: many are worth it where turns load as much,
      much_in_all_bytes: or so much is loaded in all.
      flops_per_byte: Matrix products on one device while a byte crosses its link: an
        H100's 400e12 each second that a training step gets of it, over 50 GB/s. A v5e
        has about as many.
    """

    segment_bytes: int = 64 * MIB
    many_bytes: int = 2**31
    least_part: int = 4
    most_layers: int = 2
    much_alive_bytes: int = 384 * MIB
    alive_share: int = 6
    most_room: int = 8
    most_share: int = 16
    rooms: tuple[int, ...] = (2, 4)
    least_parted_bytes: int = 32 * MIB
    least_parted_part: float = 1 / 12
    least_alive_bytes: int = MIB
    rooms_of_updates: int = 4
    least_segments: int = 8
    least_freed_bytes: int = 256 * MIB
    least_freed_part: float = 1 / 6
    small_bytes: int = 2**18
    reduced_bytes: int = 2**16
    turn_bytes: int = 512 * MIB
    turn_rooms: int = 4
    least_residual_bytes: int = MIB
    least_residual_rows_bytes: int = 2**16
    least_stack_bytes: int = MIB
    least_products: int = 16
    least_taken_bytes: int = 128 * MIB
    least_flops_per_byte: int = 128
    much_taken_bytes: int = 512 * MIB
    least_apart_bytes: int = MIB // 2
    least_tied_bytes: int = 2**18
    most_products: int = 2
    least_in_turn_bytes: int = 3 * MIB
    much_in_a_turn_bytes: int = 96 * MIB
    much_in_all_bytes: int = 2**31
    flops_per_byte: float = 8000


# Tests put others here, to cut small programs as large ones are cut.
now = Limits()

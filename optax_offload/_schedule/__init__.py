"""Schedules say what is moved and computed when, as values; they touch no array."""

from optax_offload._schedule.chosen_state import with_chosen_state
from optax_offload._schedule.follow import Scan
from optax_offload._schedule.fused import Fused, asked_window
from optax_offload._schedule.fused_step import FusedScan, FusedStep, Inside, Turns
from optax_offload._schedule.on_tpu import for_tpu
from optax_offload._schedule.own_updates import with_own_updates
from optax_offload._schedule.parts import Parted
from optax_offload._schedule.pipeline import Pipeline, RowUpdate
from optax_offload._schedule.refused import refusals
from optax_offload._schedule.rest import Outer, RemainingUpdate
from optax_offload._schedule.step import plan
from optax_offload._schedule.turns.placing import of_waiting
from optax_offload._schedule.turns.segments import Chain, Segment, StackRow, Tie
from optax_offload._schedule.updates.group import Group, Part, Written
from optax_offload._schedule.updates.loops import Loop
from optax_offload._schedule.updates.update import (
    AnySchedule,
    Branched,
    OverWindow,
    Phased,
    Schedule,
    Straight,
    schedule,
)
from optax_offload._schedule.updates.window import MOST_WINDOW_BYTES

__all__ = [
    "MOST_WINDOW_BYTES",
    "AnySchedule",
    "Branched",
    "Chain",
    "Fused",
    "FusedScan",
    "FusedStep",
    "Group",
    "Inside",
    "Loop",
    "Outer",
    "OverWindow",
    "Part",
    "Parted",
    "Phased",
    "Pipeline",
    "RemainingUpdate",
    "RowUpdate",
    "Scan",
    "Schedule",
    "Segment",
    "StackRow",
    "Straight",
    "Tie",
    "Turns",
    "Written",
    "asked_window",
    "for_tpu",
    "of_waiting",
    "plan",
    "refusals",
    "schedule",
    "with_chosen_state",
    "with_own_updates",
]

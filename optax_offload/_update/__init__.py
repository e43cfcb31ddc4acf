"""An update: traced, scheduled, run."""

from optax_offload._update.arguments import (
    Cell,
    compare,
    compares,
    constrain,
    expect_on_host,
    is_noted,
    is_unknown,
    note_arguments,
)
from optax_offload._update.branches import as_zero, keeping
from optax_offload._update.equation import Deferred, closed, defer, deferred
from optax_offload._update.proof import analyze
from optax_offload._update.schedule import Branched, Schedule, Straight, schedule
from optax_offload._update.slicing import Analysis, RowCount, RowLocal
from optax_offload._update.slicing_rules import NotRowLocalError
from optax_offload._update.stream import run
from optax_offload._update.transforms import transformable
from optax_offload._update.update import Input, Output, Update, trace
from optax_offload._update.window import LINK, MOST_WINDOW_BYTES, Link

__all__ = [
    "LINK",
    "MOST_WINDOW_BYTES",
    "Analysis",
    "Branched",
    "Cell",
    "Deferred",
    "Input",
    "Link",
    "NotRowLocalError",
    "Output",
    "RowCount",
    "RowLocal",
    "Schedule",
    "Straight",
    "Update",
    "analyze",
    "as_zero",
    "closed",
    "compare",
    "compares",
    "constrain",
    "defer",
    "deferred",
    "expect_on_host",
    "is_noted",
    "is_unknown",
    "keeping",
    "note_arguments",
    "run",
    "schedule",
    "trace",
    "transformable",
]

"""An update: traced, scheduled, run."""

from optax_offload._update.argument_shardings import note_shardings
from optax_offload._update.schedule import Branched, Schedule, Straight, schedule
from optax_offload._update.stream import run
from optax_offload._update.transforms import transformable
from optax_offload._update.update import Input, Output, Update, trace
from optax_offload._update.window import LINK, MOST_WINDOW_BYTES, Link

__all__ = [
    "LINK",
    "MOST_WINDOW_BYTES",
    "Branched",
    "Input",
    "Link",
    "Output",
    "Schedule",
    "Straight",
    "Update",
    "note_shardings",
    "run",
    "schedule",
    "trace",
    "transformable",
]

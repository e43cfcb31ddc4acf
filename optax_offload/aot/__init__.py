"""Compiling for a TPU or a GPU that is not there, and reading what was compiled."""

from optax_offload.aot.chip import Chip
from optax_offload.aot.chips import CHIPS, GPUS_PER_HOST
from optax_offload.aot.compile import compile, mesh_of
from optax_offload.aot.measured import Measured, measure
from optax_offload.aot.peak import DoesNotFitError, Peak, peak
from optax_offload.aot.step_times import Assumption, StepTime, step_time
from optax_offload.aot.targets import Target
from optax_offload.aot.transfers import Transfer, host_computations, transfers

__all__ = [
    "CHIPS",
    "GPUS_PER_HOST",
    "Assumption",
    "Chip",
    "DoesNotFitError",
    "Measured",
    "Peak",
    "StepTime",
    "Target",
    "Transfer",
    "compile",
    "host_computations",
    "measure",
    "mesh_of",
    "peak",
    "step_time",
    "transfers",
]

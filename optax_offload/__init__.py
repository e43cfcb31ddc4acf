"""Optimizer state, parameters and residuals in host memory, streamed by the step."""

from optax_offload._ground.errors import (
    CodecError,
    MemoryKindError,
    OffloadError,
    OffloadWarning,
)
from optax_offload._host.link import measure_link
from optax_offload._low_bit import (
    Encoded,
    low_bit,
    low_bit_decode,
    low_bit_encode,
    master_weights,
    stochastic_round,
)
from optax_offload._places.memory import set_memory_kind
from optax_offload._places.rule_files import load_config
from optax_offload._places.rules import OffloadConfig, Rule
from optax_offload._places.shardings import state_shardings
from optax_offload._places.spread import spread
from optax_offload._places.step_options import Options
from optax_offload._places.templates import eval_shape
from optax_offload._plan import Plan, Step, plan
from optax_offload._report import MemoryReport, memory_report
from optax_offload._schedule import FusedStep, Schedule
from optax_offload._states import offload_states, reload_states
from optax_offload._step import Jitted, Offloaded, jit, offload, place, stream

__all__ = [
    "CodecError",
    "Encoded",
    "FusedStep",
    "Jitted",
    "MemoryKindError",
    "MemoryReport",
    "OffloadConfig",
    "OffloadError",
    "OffloadWarning",
    "Offloaded",
    "Options",
    "Plan",
    "Rule",
    "Schedule",
    "Step",
    "eval_shape",
    "jit",
    "load_config",
    "low_bit",
    "low_bit_decode",
    "low_bit_encode",
    "master_weights",
    "measure_link",
    "memory_report",
    "offload",
    "offload_states",
    "place",
    "plan",
    "reload_states",
    "set_memory_kind",
    "spread",
    "state_shardings",
    "stochastic_round",
    "stream",
]

__version__ = "0.1.0"

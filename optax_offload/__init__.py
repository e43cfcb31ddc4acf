"""Optimizer state, parameters and residuals in host memory, streamed by the step."""

from optax_offload._errors import (
    CodecError,
    MemoryKindError,
    OffloadError,
    OffloadWarning,
)
from optax_offload._jit import Jitted, jit
from optax_offload._link import measure_link
from optax_offload._low_bit import (
    Encoded,
    low_bit,
    low_bit_decode,
    low_bit_encode,
    master_weights,
    stochastic_round,
)
from optax_offload._memory import set_memory_kind
from optax_offload._offload import Offloaded, offload
from optax_offload._place import place
from optax_offload._plan import Plan, Step, plan
from optax_offload._report import MemoryReport, memory_report
from optax_offload._rule_files import load_config
from optax_offload._rules import OffloadConfig, Rule
from optax_offload._schedule import FusedStep, Schedule
from optax_offload._shardings import state_shardings
from optax_offload._spread import spread
from optax_offload._states import offload_states, reload_states
from optax_offload._step_options import Options
from optax_offload._stream import stream
from optax_offload._templates import eval_shape

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

"""Writing a schedule down as equations: the only place that moves anything."""

from optax_offload._emit.streamed_step import streamed
from optax_offload._emit.update import carry_out

__all__ = ["carry_out", "streamed"]

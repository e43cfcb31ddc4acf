"""The step that an offloaded update is part of: jitted so that nothing is undone."""

from optax_offload._jit.jit import Jitted, before_jit, jit
from optax_offload._jit.machine import compiling_for

__all__ = ["Jitted", "before_jit", "compiling_for", "jit"]

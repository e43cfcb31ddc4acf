"""Where every leaf is, beside where rules want it."""

from optax_offload._report.host_memory import gpu_plugin_settings
from optax_offload._report.report import MemoryReport, memory_report

__all__ = ["MemoryReport", "gpu_plugin_settings", "memory_report"]

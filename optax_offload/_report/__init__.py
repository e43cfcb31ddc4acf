"""Reports of where every leaf is, and where rules want it."""

from optax_offload._report.report import MemoryReport, memory_report

__all__ = ["MemoryReport", "memory_report"]

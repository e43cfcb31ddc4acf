"""Checks whether offloading helps on a machine, before you train on it."""

from optax_offload._machine.diagnosis import Diagnosis, diagnose
from optax_offload._machine.directory_view import look_at
from optax_offload._machine.findings import Finding, Level
from optax_offload._machine.jax_view import look
from optax_offload._machine.texts import Here, Saved, Texts

__all__ = [
    "Diagnosis",
    "Finding",
    "Here",
    "Level",
    "Saved",
    "Texts",
    "diagnose",
    "look",
    "look_at",
]

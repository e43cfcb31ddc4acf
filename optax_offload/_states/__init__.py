"""Whole states between steps: off the device for a while, and back as they were."""

from optax_offload._states.states import offload_states, reload_states

__all__ = ["offload_states", "reload_states"]

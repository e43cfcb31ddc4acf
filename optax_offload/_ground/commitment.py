"""Arrays that JAX may move to other devices, before a call that commits them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core


def committing(values: Iterable[Any]) -> Callable[[Any], Any] | None:
    """What puts loose arrays of a call on the device of the others, for good.

    A step with any committed argument returns all results committed, and is compiled
    again for them (F36). A number on a mesh is on all of its devices.

    Args:
      values: The arguments of the call.

    Returns:
      A function of a value, or None where all is committed, or nothing is.
    """
    arrays = [x for x in values if is_concrete(x)]
    homes = {x.sharding for x in arrays if x.committed}
    if not homes or len(arrays) == sum(x.committed for x in arrays):
        return None
    meshes = {s.mesh for s in homes if isinstance(s, jax.NamedSharding)}
    devices = {d for s in homes for d in s.device_set}
    if len(devices) == 1:
        home = jax.sharding.SingleDeviceSharding(devices.pop())
    elif len(meshes) == 1:
        home = jax.NamedSharding(meshes.pop(), jax.sharding.PartitionSpec())
    else:
        return None

    loose = {id(x) for x in arrays if not x.committed}

    def put(x: Any) -> Any:
        fits = id(x) in loose and (home.num_devices == 1 or x.size == 1)
        return jax.device_put(x, home) if fits else x

    return put


def is_concrete(x: Any) -> bool:
    """Returns whether a value is an array that is not traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)

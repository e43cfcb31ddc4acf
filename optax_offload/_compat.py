"""Every difference between versions of JAX, and the only private names of it in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import primitives

# Whether loops may run once, as those over whole leaves. With JAX 0.10.2 a TPU's
# compiler takes their bodies for row-major, and copies on the host what is not.
LOOPS_RUN_ONCE = jax.__version_info__ >= (0, 11)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.11 and later
    return len(consts), len(carry)


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same value as one of a Python number's dtype, which gives way to others'.

    Arrays made from NumPy's never are, and a step that was compiled for a weakly typed
    counter would be compiled again, or promote otherwise.
    """
    moved = jax.device_put(x, x.sharding.with_memory_kind("device"))
    weak = primitives.convert_element_type_p.bind(
        moved, new_dtype=x.dtype, weak_type=True, sharding=None
    )
    return jax.device_put(weak, x.sharding)

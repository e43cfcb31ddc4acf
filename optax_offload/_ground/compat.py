"""Every difference between versions of JAX, and the only private names of it in use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import effects as _effects
from jax._src.core import (
    NamedAxisEffect,
    get_axis_env,
    trace_ctx,
    trace_state_clean,
)
from jax._src.state.discharge import discharge_state
from jax.extend import core as jex
from jax.extend.core import primitives
from jax.interpreters import partial_eval

# Whether loops may run once, as those over whole leaves. With JAX 0.10.2 a TPU's
# compiler takes their bodies for row-major, and copies on the host what is not (F25).
LOOPS_RUN_ONCE = jax.__version_info__ >= (0, 11)
# Whether rows that the next iteration stores are worth their memory. With JAX 0.10.2 a
# GPU's compiler hardly overlaps transfers at all (an H100's step of `gated` is modeled
# at 432 ms without such rows, 423 with them), and a TPU's keeps more beside the loop.
STORES_OVERLAP = jax.__version_info__ >= (0, 11)
# Whether a GPU's compiler reads the positions of slices of host memory right. Before
# JAX 0.11.1 it takes every function of a loop's counter for the counter itself (U10).
# JAX takes no plugin of a version other than its own.
COPIES_AT_POSITIONS = jax.__version_info__ >= (0, 11, 1)
# Whether XLA's CUDA graph of a loop's turn has copies beside kernels. Before JAX 0.12
# its nodes are a chain, in the order in which they start (F79).
GRAPHS_OVERLAP = jax.__version_info__ >= (0, 12)
# Whether a compiler frees what a segment of a step takes when that is done. With JAX
# 0.10.2 and 0.11.2 an H100's keeps nine times a layer for each.
SEGMENTS_ARE_FREED = jax.__version_info__ >= (0, 12)
# What has a nested jit be inlined when it is traced, as ``inline=True`` did before JAX
# 0.12: there it is inlined when it is lowered, and by then its operands are not seen to
# be arguments of the program.
INLINE_EARLY: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.11 and later
    return len(consts), len(carry)


def has_effects(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation does more than to compute its results.

    A reduction over an axis of `jax.shard_map` has that axis as an effect, which does
    not count.
    """
    return any(not isinstance(effect, NamedAxisEffect) for effect in e.effects)


def has_ordered_effects(e: jex.JaxprEqn | jex.ClosedJaxpr) -> bool:
    """Returns whether a runtime keeps effects of equations in their order."""
    return any(map(_effects.ordered_effects.contains, e.effects))


def without_refs(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A jaxpr of the values of its refs, whose last results are their new values."""
    return discharge_state(closed)


def struct_is_on_host(struct: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a struct without a sharding says that it is in host memory.

    JAX 0.10 has no such structs: there only a sharding says it.
    """
    space = getattr(struct, "_memory_space", None)  # JAX 0.11 and later
    return space == jax.memory.Space.Host


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same value as one of a Python number's dtype, which gives way to others'.

    Arrays made from NumPy's never are (F40), and a step that was compiled for a weakly
    typed counter would be compiled again, or promote otherwise. JAX has no public call
    that makes one from an array, so this binds the primitive of its own conversions.
    """
    moved = jax.device_put(x, x.sharding.with_memory_kind("device"))
    weak = primitives.convert_element_type_p.bind(
        moved, new_dtype=x.dtype, weak_type=True, sharding=None
    )
    return jax.device_put(weak, x.sharding)


def tracing() -> bool:
    """Returns whether something is being traced or transformed just now."""
    return not trace_state_clean()


def tracing_for_jit_alone() -> bool:
    """Returns whether current traces are all of `jax.jit`, of no loop or branch.

    In the body of a loop, in a branch or under `jax.checkpoint` no value is an argument
    of the program, so that lowering says no more of it than its type.
    """
    trace: Any = trace_ctx.trace
    while trace is not None:
        frame = getattr(trace, "frame", None)
        if frame is not None and frame.debug_info.traced_for != "jit":
            return False
        trace = getattr(trace, "parent_trace", None)
    return True


def maps_over_axes() -> bool:
    """Returns whether current traces map over a named axis, as that of `jax.pmap`."""
    return bool(get_axis_env().axis_sizes)


def jit_is_disabled() -> bool:
    """Returns whether jitted functions run as they are (`jax.disable_jit`)."""
    return _config.disable_jit.value


def check_inside(
    primitive: jex.Primitive, body: Callable[..., jex.ClosedJaxpr]
) -> None:
    """Has `checkify` look into an equation, as into a nested jit.

    Without this it would take the equation as it is, and miss the NaNs in it.

    Args:
      primitive: The primitive of the equation.
      body: What the equation means, given the types of its operands, and parameters.
    """
    check: Any = _checkify.checkify_jaxpr
    # Between 0.10.2 and 0.12.0.1 a context has come before the other arguments.
    first = int(next(iter(inspect.signature(check).parameters)) == "ctx")

    def rule(*args: Any, **params: Any) -> Any:
        context, (error, enabled, *values) = args[:first], args[first:]
        body_of = body(*map(jax.typeof, values), **params)
        return check(*context, body_of, enabled, error, *values)

    _checkify.error_checks[primitive] = rule


def used_inputs(traced: jax.stages.Traced) -> list[bool]:
    """Finds the leaves of a call that its function reads; `jax.jit` drops others."""
    jaxpr = traced.jaxpr.jaxpr  # A jaxpr of JAX 0.11 and later has itself as this.
    return list(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def without_unused(jaxpr: Any) -> Any:
    """A jaxpr of the same arguments, without what none of its results needs."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    wanted = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, wanted, instantiate=True)[0]


def forget_only_call(jitted: Any) -> None:
    """Takes a call that raised out of a jitted function's count of calls it knows."""
    if jitted._cache_size() == 1:
        jitted._clear_cache()

"""Facts about the fields of optax's states: signs, moments, parameters."""

from __future__ import annotations

from typing import Any

import jax

from optax_offload._ground import trees

# Of optax 0.2.8: the fields of a state that are averages, sums or maxima of squares or
# of magnitudes. By name, since not all of these classes are public.
_NEVER_NEGATIVE: dict[str, tuple[str, ...]] = {
    "DAdaptAdamWState": ("exp_avg_sq",),
    "FactoredState": ("v_row", "v_col", "v"),
    "MadgradState": ("grad_sum_sq",),
    "MomoAdamState": ("exp_avg_sq",),
    "ProdigyState": ("exp_avg_sq",),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdamState": ("nu",),
    "ScaleByAdanState": ("n",),
    "ScaleByAdemamixState": ("nu",),
    "ScaleByAdoptState": ("nu",),
    "ScaleByAmsgradState": ("nu", "nu_max"),
    "ScaleByBeliefState": ("nu",),
    "ScaleByRmsState": ("nu",),
    "ScaleByRmsWithCountState": ("nu",),
    "ScaleByRssState": ("sum_of_squares",),
    "ScaleByRStdDevState": ("nu",),
    "ScaleByRStdDevWithCountState": ("nu",),
    "ScaleBySM3State": ("mu",),
    "ScaleBySimplifiedAdEMAMixState": ("n",),
}

# Those that are averages of gradients, and have a sign.
_SIGNED: dict[str, tuple[str, ...]] = {
    "DAdaptAdamWState": ("exp_avg",),
    "MomoAdamState": ("exp_avg",),
    "MomoState": ("exp_avg",),
    "MuonState": ("mu",),
    "ProdigyState": ("exp_avg",),
    "ScaleByAdamState": ("mu",),
    "ScaleByAdanState": ("m", "v"),
    "ScaleByAdemamixState": ("m1", "m2"),
    "ScaleByAdoptState": ("mu",),
    "ScaleByAmsgradState": ("mu",),
    "ScaleByBeliefState": ("mu",),
    "ScaleByLionState": ("mu",),
    "ScaleByNovogradState": ("mu",),
    "ScaleByRStdDevState": ("mu",),
    "ScaleByRStdDevWithCountState": ("mu",),
    "ScaleBySM3State": ("nu",),
    "ScaleBySimplifiedAdEMAMixState": ("m",),
    "TraceState": ("trace",),
}


# Parameters that an update is a difference of, or a distance from: what rounding
# changes of them is of the size of the update, and more.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "COCOBState": ("init_particles",),
    "DoGState": ("init_params",),
    "DoWGState": ("init_params",),
    "MadgradState": ("x0",),
    "MechanicState": ("x0",),
    "ProdigyState": ("params0",),
    "ScaleByLBFGSState": ("params",),
    "ScheduleFreeState": ("z",),
}


def never_negative(state: Any) -> set[str]:
    """The paths of the leaves of an optax state that are known to be at least zero."""
    return _paths_of(state, _NEVER_NEGATIVE)


def moments(state: Any) -> set[str]:
    """The paths of the leaves of an optax state that are known to be moments."""
    return _paths_of(state, _NEVER_NEGATIVE) | _paths_of(state, _SIGNED)


def parameters(state: Any) -> set[str]:
    """The paths of the leaves of an optax state that are known to be parameters."""
    return _paths_of(state, _PARAMETERS)


def _paths_of(
    state: Any, known: dict[str, tuple[str, ...]], above: tuple[Any, ...] = ()
) -> set[str]:
    """The paths of all leaves in these fields, of states within others too."""
    paths: set[str] = set()
    nodes, _ = trees.flatten_with_path(state, is_leaf=lambda x: bool(_fields(x, known)))
    for keys, node in nodes:
        fields = _fields(node, known)
        for name in node._fields if fields else ():
            here = (*above, *keys, jax.tree_util.GetAttrKey(name))
            value = getattr(node, name)
            if name in fields:
                inside, _ = trees.flatten_with_path(value)
                paths.update(trees.path_string((*here, *k)) for k, _ in inside)
            else:
                paths |= _paths_of(value, known, here)
    return paths


def _fields(x: Any, known: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    cls = type(x)
    if cls.__module__.split(".")[0] != "optax":
        return ()
    return known.get(cls.__name__, ())

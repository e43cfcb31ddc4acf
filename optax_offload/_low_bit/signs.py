"""Moments that are never negative, of the optimizers that optax has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from optax_offload import _trees

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


def never_negative(state: Any) -> set[str]:
    """The paths of the leaves of an optax state that are known to be at least zero."""
    return _paths(state, _NEVER_NEGATIVE)


def moments(state: Any) -> set[str]:
    """The paths of the leaves of an optax state that are known to be moments."""
    return _paths(state, _NEVER_NEGATIVE) | _paths(state, _SIGNED)


def _paths(state: Any, table: Mapping[str, tuple[str, ...]]) -> set[str]:
    def fields(x: Any) -> tuple[str, ...]:
        cls = type(x)
        known = cls.__module__.split(".")[0] == "optax"
        return table.get(cls.__name__, ()) if known else ()

    paths: set[str] = set()
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: bool(fields(x))
    )
    for keys, node in nodes:
        for field in fields(node):
            inside, _ = jax.tree_util.tree_flatten_with_path(getattr(node, field))
            key = jax.tree_util.GetAttrKey(field)
            paths.update(_trees.path_string((*keys, key, *k)) for k, _ in inside)
    return paths

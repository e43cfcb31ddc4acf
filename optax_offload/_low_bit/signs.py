"""Moments that are never negative, of the optimizers that optax has."""

from __future__ import annotations

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


def _fields(x: Any) -> tuple[str, ...]:
    cls = type(x)
    if cls.__module__.split(".")[0] != "optax":
        return ()
    return _NEVER_NEGATIVE.get(cls.__name__, ())


def never_negative(state: Any) -> set[str]:
    """The paths of the leaves of an optax state that are known to be at least zero."""
    paths: set[str] = set()
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: bool(_fields(x))
    )
    for keys, node in nodes:
        for field in _fields(node):
            inside, _ = jax.tree_util.tree_flatten_with_path(getattr(node, field))
            key = jax.tree_util.GetAttrKey(field)
            paths.update(_trees.path_string((*keys, key, *k)) for k, _ in inside)
    return paths

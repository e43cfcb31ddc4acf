"""`stochastic_round`: updates that bfloat16 parameters take up on average."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_offload._ground import trees
from optax_offload._low_bit import chance


class StochasticRoundState(NamedTuple):
    """The state of `stochastic_round`.

    Attributes:
      step: The number of updates, from which the next one's chances come.
    """

    step: jax.Array


def stochastic_round(seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Rounds bfloat16 parameters up or down by chance, so that small updates count.

    A bfloat16 parameter loses an update of less than a 512th of itself, because the sum
    is rounded back. At the end of a chain, this takes the sum in float32 and rounds it
    to one of its two neighbours, the nearer one more often. The result is the sum on
    average, and needs no copy of the parameters.

    Chances come from the seed, the parameter's path and the number of the step, so they
    are the same in every replica and in every run.

    Args:
      seed: the seed of the chances.

    Returns:
      An `optax.GradientTransformationExtraArgs`, for the end of `optax.chain`. Updates
      of bfloat16 parameters become float32; others are left as they are. (So put
      `optax.apply_if_finite` around the transformations before it in the chain.)

    Raises:
      TypeError: ``seed`` is no integer.
      ValueError: from ``update``, ``params`` were not given.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = optax.chain(optax.sgd(1e-3), oo.stochastic_round())
      >>> params = {"w": jnp.ones(100_000, jnp.bfloat16)}
      >>> grads = {"w": jnp.ones(100_000)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> new = optax.apply_updates(params, updates)["w"]
      >>> bool(abs(new.astype(jnp.float32).mean() - 0.999) < 1e-4)
      True
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r}; it must be an int")

    def init(params: optax.Params) -> StochasticRoundState:
        del params
        return StochasticRoundState(jnp.zeros((), jnp.uint32))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundState]:
        del extra_args
        if params is None:
            raise ValueError(
                "stochastic_round needs params: tx.update(grads, state, params)"
            )

        def rounded(keys: Any, p: Any, u: Any) -> Any:
            if p.dtype != jnp.bfloat16:
                return u
            key = chance.key_of(trees.path_string(keys), state.step, seed)
            before = p.astype(jnp.float32)
            new = chance.rounded(before + u.astype(jnp.float32), key)
            return new.astype(jnp.float32) - before

        updates = trees.map_with_path(rounded, params, updates)
        return updates, StochasticRoundState(state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)

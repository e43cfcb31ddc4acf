"""The table of optimizers that the contract suite goes through.

A new optimizer is one line. Those in `INSIDE` are offloaded as a whole, those in
`OUTSIDE` in a part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

LR = 1e-2


def _weights_only(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


INSIDE: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(LR),
    "adadelta": lambda: optax.adadelta(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=8),
    "adafactor_momentum": lambda: optax.adafactor(LR, momentum=0.9),
    "adagrad": lambda: optax.adagrad(LR),
    "adam": lambda: optax.adam(LR),
    "adam_bfloat16_mu": lambda: optax.adam(LR, mu_dtype=jnp.bfloat16),
    "adamax": lambda: optax.adamax(LR),
    "adamaxw": lambda: optax.adamaxw(LR),
    "adamw": lambda: optax.adamw(LR),
    "adan": lambda: optax.adan(LR),
    "ademamix": lambda: contrib.ademamix(LR),
    "adopt": lambda: contrib.adopt(LR),
    "amsgrad": lambda: optax.amsgrad(LR),
    "cocob": lambda: contrib.cocob(),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(LR),
    "dog": lambda: contrib.dog(LR),
    "ema": lambda: optax.chain(optax.sgd(LR), optax.ema(0.9)),
    "galore": lambda: contrib.galore(LR, rank=4),
    "lamb": lambda: optax.lamb(LR),
    "lars": lambda: optax.lars(LR),
    "lbfgs": lambda: optax.lbfgs(LR, memory_size=3),
    "lion": lambda: optax.lion(LR),
    "madgrad": lambda: contrib.madgrad(LR),
    "mechanic": lambda: contrib.mechanize(optax.adam(LR)),
    "momo_adam": lambda: contrib.momo_adam(LR),
    "muon": lambda: contrib.muon(LR),
    "nadamw": lambda: optax.nadamw(LR),
    "noisy_sgd": lambda: optax.noisy_sgd(LR, key=0),
    "novograd": lambda: optax.novograd(LR),
    "optimistic_adam": lambda: optax.optimistic_adam_v2(LR),
    "prodigy": lambda: contrib.prodigy(LR),
    "radam": lambda: optax.radam(LR),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(LR), contrib.reduce_on_plateau(patience=1)
    ),
    "rmsprop": lambda: optax.rmsprop(LR, momentum=0.9, centered=True),
    "rprop": lambda: optax.rprop(LR),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(LR),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(LR),
    "sgd_momentum": lambda: optax.sgd(LR, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(LR),
    "sm3": lambda: optax.sm3(LR),
    "yogi": lambda: optax.yogi(LR),
    # Transformations around an optimizer, all of it offloaded.
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(LR), 3),
    "clip_and_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, LR, 2, 10)),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(LR, 0.0, 10)
    ),
    "masked": lambda: optax.masked(optax.adam(LR), _weights_only),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(LR), 2),
    "multi_steps_skip": lambda: optax.MultiSteps(
        optax.adamw(LR), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adamw(LR), "vector": optax.sgd(LR, momentum=0.9)}, _labels
    ),
    "backtracking": lambda: optax.chain(
        optax.adam(LR), optax.scale_by_backtracking_linesearch(3)
    ),
}

Wrap = Callable[..., Any]

# Each is given what wraps a part of it: `offload`, or nothing for the plain one.
OUTSIDE: dict[str, Callable[[Wrap], Any]] = {
    "apply_if_finite": lambda wrap: optax.apply_if_finite(wrap(optax.adamw(LR)), 3),
    "chain": lambda wrap: optax.chain(
        optax.clip_by_global_norm(1.0), wrap(optax.adamw(LR)), optax.scale(0.5)
    ),
    "conditionally_transform": lambda wrap: optax.transforms.conditionally_transform(
        wrap(optax.adam(LR)), lambda step: jnp.mod(step, 2) == 0
    ),
    "inject_hyperparams": lambda wrap: optax.inject_hyperparams(
        lambda learning_rate: wrap(optax.adamw(learning_rate))
    )(learning_rate=optax.linear_schedule(LR, 0.0, 10)),
    "masked": lambda wrap: optax.masked(wrap(optax.adam(LR)), _weights_only),
    "mechanic": lambda wrap: contrib.mechanize(wrap(optax.adam(LR))),
    "multi_steps": lambda wrap: optax.MultiSteps(
        wrap(optax.adamw(LR)), 2
    ).gradient_transformation(),
    "partition": lambda wrap: optax.partition(
        {"matrix": wrap(optax.adamw(LR)), "vector": optax.sgd(LR)}, _labels
    ),
    "schedule_free": lambda wrap: contrib.schedule_free(
        wrap(optax.rmsprop(LR)), learning_rate=LR
    ),
    "two_parts": lambda wrap: optax.chain(
        wrap(optax.scale_by_adam()), optax.scale(-LR), wrap(optax.ema(0.9))
    ),
}

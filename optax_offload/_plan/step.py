"""The input of `plan`: a train step, and the function that makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from optax_offload import aot


class Step(NamedTuple):
    """A train step, to be compiled: what a step factory returns.

    Attributes:
      fn: The function, or a jitted one, which brings its own options.
      args: Its arguments, arrays or `jax.ShapeDtypeStruct`, with shardings on the
        target's mesh if it has several devices. The optimizer's state is among them.
      donate_argnums: The arguments to donate, as in `jax.jit`.
      out_shardings: The shardings of the results, as in `jax.jit`.
      tokens: The number of tokens that a step trains on, on all devices; a plan uses it
        to tell how many a second are modelled.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: int | Sequence[int] | None = None
    out_shardings: Any = None
    tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class StepFactory:
    """A function that makes a step, with the target and what else it is called with.

    Attributes:
      make_step: The function, called as ``make_step(offload, target, *args)``.
      target: The chips that the step is made for.
      args: Further arguments of the function.
    """

    make_step: Callable[..., Step]
    target: aot.Target
    args: tuple[Any, ...] = ()

    def step(self, offload: Callable[[Any], Any]) -> Step:
        """Calls the function.

        Args:
          offload: is given the optimizer, and returns the one that the step uses.

        Raises:
          TypeError: the function returns something else than a `Step`.
        """
        step = self.make_step(offload, self.target, *self.args)
        if not isinstance(step, Step):
            raise TypeError(
                "a step factory must return an optax_offload.Step(fn, args, ...), got "
                f"{step!r}"
            )
        return step

    def plain_step(self) -> Step:
        """The step without `offload`."""
        return self.step(lambda inner: inner)


def compile_step(step: Step, target: aot.Target) -> jax.stages.Compiled:
    """Compiles a step.

    Raises:
      aot.DoesNotFitError: the step does not fit on the target.
    """
    return aot.compile(
        step.fn,
        *step.args,
        target=target,
        donate_argnums=step.donate_argnums,
        out_shardings=step.out_shardings,
    )

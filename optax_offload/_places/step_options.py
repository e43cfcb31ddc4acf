"""The options of a train step, as `stream`, `jit` and rule files take them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

import jax

LateGradients = Literal["auto", "host", "recompute", "device"]
Residuals = Literal["device", "host"]
LatencyHiding = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a step. ``**options`` are the arguments of `jit`.

    Attributes:
      fuse: Whether updates are moved into the backward pass.
      late_gradients: The treatment of gradients whose update needs all of them first.
      residuals: The place of the values that the forward pass keeps for the backward
        pass.
      latency_hiding: Whether XLA's latency-hiding scheduler orders a GPU's program.

    Example:
      >>> options = dict(**Options(residuals="host"))
      >>> options["late_gradients"], options["residuals"], options["latency_hiding"]
      ('auto', 'host', 'auto')
    """

    fuse: bool = True
    late_gradients: LateGradients = "auto"
    residuals: Residuals = "device"
    latency_hiding: LatencyHiding = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.fuse, bool):
            raise ValueError(f"fuse is {self.fuse!r}; it must be a bool")
        for name, of in (
            ("late_gradients", LateGradients),
            ("residuals", Residuals),
            ("latency_hiding", LatencyHiding),
        ):
            given, allowed = getattr(self, name), get_args(of)
            if given not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is {given!r}; it must be one of {listed}")

    def keys(self) -> Iterator[str]:
        """The names of the arguments, as a mapping has them."""
        return (field.name for field in dataclasses.fields(self))

    def __getitem__(self, name: str) -> Any:
        """The value of an argument."""
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


class JitOptions(TypedDict, total=False):
    """The arguments of `jax.jit` that `jit` passes on as they are."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: Mapping[str, Any] | None


def check_names(given: Iterable[str]) -> None:
    """Raises if an argument of `jit` has a name that neither it nor JAX's has.

    Args:
      given: The names.

    Raises:
      TypeError: There is such a name. The message has the nearest one.
    """
    of_jax = list(inspect.signature(jax.jit).parameters)[1:]
    allowed = [*of_jax, *Options().keys()]
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f". Did you mean {near[0]}?" if near else ""
            raise TypeError(f"jit() got an unexpected keyword argument {name!r}{hint}")

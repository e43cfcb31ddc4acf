"""One of two forms of a step, by the platform that it is lowered for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex
from jax.interpreters import batching, mlir

Form = Callable[..., list[Any]]


def on_tpu_or_else(on_tpu: Form, other: Form, args: Sequence[Any]) -> list[Any]:
    """The results of the form for the platform that the program is lowered for.

    `jax.lax.platform_dependent` would have a conditional around it, whose arguments are
    not those of the program.

    Args:
      on_tpu: For programs for TPUs alone.
      other: For all others; results of the same types.
      args: The arguments of either.
    """
    forms = [jax.make_jaxpr(form)(*args) for form in (on_tpu, other)]
    # Constants may be traced values of a function around the step.
    given = [*args, *(x for form in forms for x in form.consts)]
    counts = tuple(len(form.consts) for form in forms)
    jaxprs = tuple(form.jaxpr for form in forms)
    return _form.bind(*given, jaxprs=jaxprs, counts=counts, arguments=len(args))


def _evaluated(
    index: int, given: Sequence[Any], jaxprs: Any, counts: Any, arguments: int
) -> list[Any]:
    first = arguments + sum(counts[:index])
    consts = given[first : first + counts[index]]
    return jax.core.eval_jaxpr(jaxprs[index], consts, *given[:arguments])


def _run(*given: Any, **params: Any) -> list[Any]:
    return _evaluated(1, given, **params)


def _types(*_: Any, jaxprs: tuple[jex.Jaxpr, jex.Jaxpr], **__: Any) -> Any:
    return [v.aval for v in jaxprs[1].outvars], jaxprs[1].effects


def _lower(ctx: mlir.LoweringRuleContext, *given: Any, **params: Any) -> Any:
    index = 0 if tuple(ctx.module_context.platforms) == ("tpu",) else 1

    def run(*values: Any) -> list[Any]:
        return _evaluated(index, values, **params)

    return mlir.lower_fun(run, multiple_results=True)(ctx, *given)


def _batched(given: Any, dims: Any, **params: Any) -> Any:
    results = jax.vmap(lambda *x: _run(*x, **params), in_axes=tuple(dims))(*given)
    return results, [0] * len(results)


_form = jex.Primitive("form_of_step")
_form.multiple_results = True
_form.def_impl(_run)
_form.def_effectful_abstract_eval(_types)
# Not as a function of its own, in which nothing would be an argument of the program.
mlir.register_lowering(_form, _lower, cacheable=False)
batching.primitive_batchers[_form] = _batched

"""A step in the form for the platform that it is lowered for, as one equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

Form = Callable[..., list[Any]]


def in_form(
    forms: Sequence[Form], plain: jex.ClosedJaxpr, args: Sequence[Any]
) -> list[Any]:
    """The results of a step in the form for the platform that it is lowered for.

    `jax.lax.platform_dependent` would have a conditional around it, whose arguments are
    not those of the program.

    Args:
      forms: One for all platforms; or one for programs for TPUs alone, and one for all
        others, with results of the same types.
      plain: The step as it was before. It is what JAX transforms: a population's step,
        or tangents.
      args: The arguments of each.
    """
    made = [*(jax.make_jaxpr(form)(*args) for form in forms), plain]
    # Constants may be traced values of a function around the step.
    given = [*args, *(x for form in made for x in form.consts)]
    counts = tuple(len(form.consts) for form in made)
    jaxprs = tuple(form.jaxpr for form in made)
    return _form.bind(*given, jaxprs=jaxprs, counts=counts, arguments=len(args))


def _evaluated(
    index: int, given: Sequence[Any], jaxprs: Any, counts: Any, arguments: int
) -> list[Any]:
    first = arguments + sum(counts[:index])
    consts = given[first : first + counts[index]]
    return jax.core.eval_jaxpr(jaxprs[index], consts, *given[:arguments])


def _run(*given: Any, **params: Any) -> list[Any]:
    return _evaluated(len(params["jaxprs"]) - 2, given, **params)


def _plain(*given: Any, **params: Any) -> list[Any]:
    return _evaluated(len(params["jaxprs"]) - 1, given, **params)


def _types(*_: Any, jaxprs: Sequence[jex.Jaxpr], **__: Any) -> Any:
    return [v.aval for v in jaxprs[-2].outvars], jaxprs[-2].effects


def _lower(ctx: mlir.LoweringRuleContext, *given: Any, **params: Any) -> Any:
    tpu = tuple(ctx.module_context.platforms) == ("tpu",)
    index = 0 if tpu else len(params["jaxprs"]) - 2

    def run(*values: Any) -> list[Any]:
        return _evaluated(index, values, **params)

    return mlir.lower_fun(run, multiple_results=True)(ctx, *given)


def _batched(given: Any, dims: Any, **params: Any) -> Any:
    results = jax.vmap(lambda *x: _plain(*x, **params), in_axes=tuple(dims))(*given)
    return results, [0] * len(results)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Of what has no tangent none is made."""
    given = list(primals)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of(*values: Any) -> list[Any]:
        for i, x in zip(moving, values, strict=True):
            given[i] = x
        return _plain(*given, **params)

    return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])


_form = jex.Primitive("form_of_step")
_form.multiple_results = True
_form.def_impl(_run)
_form.def_effectful_abstract_eval(_types)
# Not as a function of its own, in which nothing would be an argument of the program.
mlir.register_lowering(_form, _lower, cacheable=False)
batching.primitive_batchers[_form] = _batched
ad.primitive_jvps[_form] = _jvp

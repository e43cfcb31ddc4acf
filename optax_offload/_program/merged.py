"""Equations that are equal to one before: evaluated once, if that saves products.

A compiler evaluates equal ones once (what a loss and a metric both compute, a value and
its derivatives), but none that are in the bodies of two loops, as those of two turns
are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program.call import called
from optax_offload._program.flops import flops_of
from optax_offload._program.graph import (
    Atom,
    Program,
    bound,
    signature,
    variables,
    within,
)
from optax_offload._program.loaded import Loaded

# Each barrier keeps apart what is equal. Of loops it is known what turns take.
_OTHERS = {"optimization_barrier", "cond", "scan", "shard_map", "while"}


def merged(program: Program) -> Program:
    """A program without what is equal to something before, if products are among it.

    What is loaded, or made of that alone, stays where it is taken. So does what
    `jax.checkpoint` computes again: that is one equation, which takes what the backward
    pass has made too.

    Args:
      program: The equations of a step, before any checkpoint is taken apart.
    """
    equal = _Equal(program)
    kept = [x for e in program.equations if (x := equal.kept(e)) is not None]
    return dataclasses.replace(program, equations=kept) if equal.flops else program


class _Equal:
    """What the equations of a program are equal to, asked for one after the other.

    Attributes:
      flops: The operations of products that were left out.
    """

    def __init__(self, program: Program):
        self.flops = 0
        self._results = program.results
        self._loaded = Loaded({*program.invars, *program.constants})
        self._before: dict[Hashable, jex.JaxprEqn] = {}
        constants: dict[int, jex.Var] = {}
        # The first variable with a variable's value, and the one that takes its place.
        self._first = {
            v: constants.setdefault(id(x), v) for v, x in program.constants.items()
        }
        self._names: dict[Atom, Atom] = {}

    def kept(self, e: jex.JaxprEqn) -> jex.JaxprEqn | None:
        """An equation, of what is kept; None if it is equal to one before."""
        key = self._key(e)
        before = e if key is None else self._before.setdefault(key, e)
        self._loaded.add(e)
        stays = any(v in self._loaded or v in self._results for v in e.outvars)
        if before is not e:
            self._first |= bound(e.outvars, map(self._value, before.outvars))
            if not stays:
                self._names |= bound(e.outvars, before.outvars)
                self.flops += flops_of(e)
                return None
        taken = variables(e.invars)
        if self._names.keys().isdisjoint(taken):
            return e
        known = self._names
        operands = [known.get(a, a) if isinstance(a, jex.Var) else a for a in e.invars]
        return e.replace(invars=operands)

    def _key(self, e: jex.JaxprEqn) -> Hashable:
        """Equal for equations of one value; None for what is always evaluated."""
        hosted = any(memory.on_host(v.aval) for v in e.outvars)
        dropped = any(isinstance(v, jex.DropVar) for v in e.outvars)
        if hosted or dropped or compat.has_effects(e) or called(e) is not None:
            return None
        # A generator without a key makes other numbers each time.
        inside = (x.primitive.name for x in (e, *within(e)))
        if e.primitive.name in _OTHERS or "rng_uniform" in inside:
            return None
        params = tuple((name, _written(x)) for name, x in e.params.items())
        key = e.primitive, tuple(map(self._value, e.invars)), params, e.ctx
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _value(self, a: Atom) -> Hashable:
        if isinstance(a, jex.Literal):
            return a.aval, np.asarray(a.val).tobytes()
        return self._first.get(a, a)


def _written(x: Any) -> Any:
    """A parameter; bodies that were traced apart, as of two calls, are equal."""
    if isinstance(x, (tuple, list)):
        return tuple(map(_written, x))
    if isinstance(x, jex.ClosedJaxpr):
        return _body(x.jaxpr), tuple(map(id, x.consts))
    return _body(x) if isinstance(x, jex.Jaxpr) else x


def _body(jaxpr: jex.Jaxpr) -> Hashable:
    return signature(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)

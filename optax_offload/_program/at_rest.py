"""A step that was traced as if all were on the device, with what rests on the host.

An argument in host memory is used as if it were on the device. A scan takes it row by
row, and each is loaded for it (`resting_scans.py`); an update takes it where it is; any
other use loads all of it, just before. A result that replaces it returns to where it
rests.

Values that a scan would stack of rows at rest, such as the casts that the backward pass
takes, are not stacked: their readers load the rows again. Nor is what is computed of
rows before a scan, as a base is decoded: each turn computes its own (`followed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend import source_info_util

from optax_offload._ground import limits
from optax_offload._places import memory
from optax_offload._program import conds, jits, remats, shard_maps
from optax_offload._program.accounts import Account, AtRest, Stored
from optax_offload._program.bodies import entered, takers
from optax_offload._program.call import called, called_where_it_rests
from optax_offload._program.followed import Followed, decodes
from optax_offload._program.graph import (
    bound,
    evaluated,
    in_pairs,
    read,
    variables,
    whole_and_rows,
)
from optax_offload._program.lowered import Spread
from optax_offload._program.primitives import facts
from optax_offload._program.resting_scans import scan_at_rest
from optax_offload._program.row_values import RowValue, made_of_rows, rests
from optax_offload._program.wanted import (
    Wanted,
    has_update,
    inside,
    loads_itself,
    row_counts,
    update_refused,
    wanted_at_rest,
    wanted_in_turn,
)


def resting(
    closed: jex.ClosedJaxpr,
    types: Sequence[Any],
    returns: Mapping[int, int],
    *,
    residuals: bool = False,
) -> tuple[jex.ClosedJaxpr, AtRest]:
    """Rewrites a step so that values rest where its arguments have them.

    Args:
      closed: A step that was traced as if all were on the device.
      types: The types of its arguments, where they are.
      returns: The argument at rest that each result replaces, as positions.
      residuals: Whether values that scans stack for scans alone rest on the host too.

    Returns:
      The step, with types of arguments, results and updates that say where they rest;
      and a description of how it takes them.
    """
    account = Account()
    walk = _Walk(account, residuals)

    def step(*args: Any) -> list[Any]:
        account.name(args, range(len(args)))
        results = walk.evaluate(closed.jaxpr, closed.consts, args)
        return [
            memory.transfer(x, "pinned_host") if k in returns else x
            for k, x in enumerate(results)
        ]

    found = jax.make_jaxpr(step)(*types)
    jaxpr = found.jaxpr.replace(debug_info=closed.jaxpr.debug_info)
    rest = account.at_rest(types, returns, step_loads=loads_itself(closed.jaxpr))
    return jex.ClosedJaxpr(jaxpr, found.consts), rest


class _Walk:
    """Evaluates equations with values where they rest."""

    def __init__(self, account: Account, residuals: bool):
        self._account, self._residuals = account, residuals

    def _load(self, x: Any, names: Sequence[str]) -> Any:
        """All of a value, on the device, for equations of these names."""
        for one in x.sources if isinstance(x, RowValue) else (x,):
            if rests(one):
                self._account.note_whole(one, names)
        return _on_device(_load_rows(x)) if rests(x) else x

    def _load_all(self, e: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
        return [self._load(x, takers(e, i)) for i, x in enumerate(values)]

    def evaluate(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        by_rows: Sequence[int | None] = (),
    ) -> list[Any]:
        """The results of equations, each where it was left.

        Args:
          jaxpr: The equations.
          consts: What they close over.
          args: Their arguments.
          by_rows: For each result the rows, if it is wanted row by row.
        """
        env = bound([*jaxpr.constvars, *jaxpr.invars], [*consts, *args])
        followed = Followed(jaxpr, by_rows, env)
        plain: list[jex.JaxprEqn] = []
        stored = self._stored(jaxpr)
        unnamed = jaxpr.debug_info.with_unknown_names()

        def run_plain() -> None:
            if plain:
                env.update(evaluated(plain, env.__getitem__, unnamed))
                plain.clear()

        for e in jaxpr.eqns:
            resting = any(v in env and rests(env[v]) for v in variables(e.invars))
            resting |= any(memory.on_host(v.aval) for v in variables(e.invars))
            own = resting or has_update(e) or any(v in stored for v in e.outvars)
            if not own and not decodes(e, followed.counts):
                plain.append(e)
                continue
            run_plain()
            values = [read(a, env.__getitem__) for a in e.invars]
            info = e.source_info
            user = source_info_util.user_context
            with user(info.traceback, name_stack=info.name_stack), e.ctx.manager:
                results = followed.results(e)
                if results is None and not own:
                    plain.append(e)
                    continue
                if results is None:
                    counts = list(map(followed.counts.get, e.outvars))
                    results = self._results(jaxpr, e, values, stored, counts)
            env |= bound(e.outvars, results)
        run_plain()
        results = [read(a, env.__getitem__) for a in jaxpr.outvars]
        wanted = by_rows or [None] * len(results)
        return [
            _load_rows(x) if count is None else x
            for x, count in zip(results, wanted, strict=True)
        ]

    def _stored(self, jaxpr: jex.Jaxpr) -> Mapping[jex.Var, Stored]:
        """The stacked results of scans that are stored in host memory row by row.

        These are the results that are moved there as a whole, as new parameters are;
        and, if it was asked for, those that only scans take rows of.
        """
        stacked: set[jex.Var] = set()
        whole = set(variables(jaxpr.outvars))
        taken: set[jex.Var] = set()
        moved: set[jex.Var] = set()
        for e in jaxpr.eqns:
            if e.primitive.name == "device_put":
                some = {a for a, v in in_pairs(e) if memory.on_host(v.aval)}
                moved.update(variables(some))
                whole.update(set(variables(e.invars)) - some)
                continue
            stacked.update(v for body in entered(e) for v in body.stacked)
            some, rows = whole_and_rows(e)
            whole.update(some)
            taken.update(rows)
        made = (stacked & moved) - whole - taken
        found: dict[jex.Var, Stored] = dict.fromkeys(made, "made")
        if self._residuals:
            for v in (stacked & taken) - whole:
                size = memory.movable_nbytes(v.aval) or 0
                if size >= limits.now.least_residual_rows_bytes:
                    found[v] = "residual"
        return found

    def _results(
        self,
        jaxpr: jex.Jaxpr,
        e: jex.JaxprEqn,
        values: Sequence[Any],
        stored: Mapping[jex.Var, Stored],
        counts: Sequence[int | None],
    ) -> Sequence[Any]:
        """The results of an equation that takes or leaves something at rest."""
        what = called(e)
        if what is not None:
            self._account.note_updated(values[i] for i in what.update.loads)
            return called_where_it_rests(what, list(map(_load_rows, values)))
        name = e.primitive.name
        if name == "scan":
            return self._scan(e, values, stored)
        if facts(e).hands_on == "value":
            return _bound(jaxpr, e, list(map(_load_rows, values)))
        wanted = inside(e, counts)
        kept = wanted.rows | wanted.updated
        if not kept and not has_update(e):
            return _bound(jaxpr, e, self._load_all(e, values))
        bodies = entered(e)
        if not bodies:
            raise update_refused(e)
        values = [
            x if i in kept else self._load(x, takers(e, i))
            for i, x in enumerate(values)
        ]
        values = self._spread(values, wanted.spread)
        if name == "cond":
            return self._cond(e, values)
        if name == "while":
            return self._while(e, values)
        if name == "shard_map":
            values = list(map(_load_rows, values))
        if name in _AROUND:
            return _AROUND[name](self._named(bodies[0].closed, values), e, values)
        return jits.around(self._body(bodies[0].closed, counts), e, values)

    def _spread(
        self, values: Sequence[Any], spread: Mapping[int, Spread]
    ) -> Sequence[Any]:
        """Arguments at rest, spread over a mesh as bodies want them."""
        found = shard_maps.spread_as_wanted(values, spread)
        self._account.name(found.values(), [self._account.of(values[i]) for i in found])
        return [found.get(i, x) for i, x in enumerate(values)]

    def _scan(
        self, e: jex.JaxprEqn, values: Sequence[Any], stored: Mapping[jex.Var, Stored]
    ) -> Sequence[Any]:
        (turn,) = entered(e)
        closed, wanted = turn.closed, wanted_in_turn(turn)
        at = turn.split(turn.operands)
        whole = {i: x for i, x in wanted.spread.items() if i not in at.xs}
        values = self._spread(values, whole)
        consts, carry, xs = turn.split(values)
        name = [e.primitive.name]
        consts = [
            x if i in wanted.rows | wanted.updated else self._load(x, name)
            for i, x in zip(at.consts, consts, strict=True)
        ]
        names = list(map(self._account.of, carry))
        kinds = turn.split(_kinds(wanted, values)).carry
        carry = [
            memory.transfer(_load_rows(x), kind)
            if kind == "pinned_host"
            else self._load(x, name)
            for x, kind in zip(carry, kinds, strict=True)
        ]
        pairs = zip(at.xs, xs, strict=True)
        kept = [i in wanted.updated and not isinstance(x, RowValue) for i, x in pairs]
        made = made_of_rows(turn, xs, kept, consts)
        # Each once, whoever takes it: loaded, or as it is.
        sources: dict[tuple[int, bool], Any] = {}
        for x, keep in zip(xs, kept, strict=True):
            for one in x.sources if isinstance(x, RowValue) else (x,):
                sources.setdefault((id(one), keep or not rests(one)), one)
        params, length = e.params, e.params["length"]
        taken = [x for (_, as_is), x in sources.items() if not as_is]
        made_here = any(self._account.of(x) is None for x in taken)
        if (stored or made_here) and 2 * params["unroll"] >= length:
            # Compilers write out a loop of two iterations, and without one there are no
            # turns.
            params = params | {"unroll": 1}
        self._account.note_rows(taken, length)
        for x in xs:
            of_rows = x.sources if isinstance(x, RowValue) else ()
            here = [one for one in of_rows if not rests(one)]
            if any(jnp.issubdtype(one.dtype, jnp.integer) for one in here):
                self._account.note_codes(here)

        def row(x: Any, keep: bool, rows: Mapping[tuple[int, bool], Any]) -> Any:
            if isinstance(x, RowValue):
                return x.row([rows[id(one), not rests(one)] for one in x.sources])
            return rows[id(x), keep or not rests(x)]

        def body(carry: Sequence[Any], given: Sequence[Any]) -> Any:
            self._account.times = around * length
            rows = bound(sources, given)
            self._account.name(carry, names)
            own = [row(x, keep, rows) for x, keep in zip(xs, kept, strict=True)]
            results = self.evaluate(
                closed.jaxpr, closed.consts, [*consts, *carry, *own]
            )
            after, ys = turn.given(results)
            left = (y for v, y in zip(turn.stacked, ys, strict=True) if v not in made)
            return memory.transfer_all(after, kinds), list(left)

        around = self._account.times
        after, stacked = scan_at_rest(
            body,
            carry,
            list(sources.values()),
            loaded=[not as_is for _, as_is in sources],
            stored=[v in stored for v in turn.stacked if v not in made],
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self._account.times = around
        rest = iter(stacked)
        for v in turn.stacked:
            if v in stored and v not in made:
                self._account.note_stored(stored[v], v.aval)
        if any(map(rests, (*sources.values(), *stacked))):
            self._account.note_positions(params)
        return [
            *after,
            *(made[v] if v in made else next(rest) for v in turn.stacked),
        ]

    def _cond(self, e: jex.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        index, *operands = values
        branches = e.params["branches"]
        types = [jax.make_jaxpr(self._body(b))(*operands).out_avals for b in branches]
        kinds = [
            "pinned_host" if any(map(memory.on_host, some)) else "device"
            for some in zip(*types, strict=True)
        ]

        def branch(b: jex.ClosedJaxpr) -> Callable[..., list[Any]]:
            body = self._named(b, operands)
            return lambda *args: memory.transfer_all(body(*args), kinds)

        return conds.around(list(map(branch, branches)), e, [index, *operands])

    def _body(
        self, closed: jex.ClosedJaxpr, by_rows: Sequence[int | None] = ()
    ) -> Callable[..., list[Any]]:
        return lambda *args: self.evaluate(closed.jaxpr, closed.consts, args, by_rows)

    def _while(self, e: jex.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        (turn,) = entered(e)
        condition = e.params["cond_jaxpr"]
        # Under `jax.vmap` each member has its own end.
        of_many = bool(condition.out_avals[0].shape)
        of_condition = self._load_all(e, values[: turn.first])
        consts, carry, _ = turn.split(values[turn.first :])
        names = list(map(self._account.of, carry))
        wanted = wanted_at_rest(turn.jaxpr)
        kinds = turn.split(_kinds(wanted, values[turn.first :])).carry

        def placed(carry: Sequence[Any]) -> list[Any]:
            return memory.transfer_all(carry, kinds)

        def each_goes_on(carry: Sequence[Any]) -> Any:
            (found,) = self._body(condition)(*of_condition, *map(_on_device, carry))
            return found

        def goes_on(carry: Sequence[Any]) -> Any:
            found = each_goes_on(carry)
            return found.any() if of_many else found

        def once(carry: Sequence[Any]) -> list[Any]:
            self._account.name(carry, names)
            results = self._body(turn.closed)(*consts, *carry)
            going = each_goes_on(carry) if of_many else None
            return placed(_where_going(going, results, carry))

        before = placed(list(map(_load_rows, carry)))
        return lax.while_loop(goes_on, once, before)

    def _named(
        self, body: jex.ClosedJaxpr, values: Sequence[Any]
    ) -> Callable[..., list[Any]]:
        """A body as a function of what stands for values in it."""

        def fn(*args: Any) -> list[Any]:
            leaves = jax.tree.leaves(args)
            self._account.name(
                leaves, list(map(self._account.of, jax.tree.leaves(values)))
            )
            results = self._body(body)(*args)
            self._account.name(leaves, [None] * len(leaves))
            return results

        return fn


# Equations that stay as they were, around another body.
_AROUND = {"remat2": remats.around, "shard_map": shard_maps.around}


def _kinds(wanted: Wanted, arguments: Sequence[Any]) -> list[str]:
    """Where each argument of a body rests: what is carried, where it did."""
    return [
        "pinned_host"
        if i in wanted.updated or (i in wanted.rows and rests(x))
        else "device"
        for i, x in enumerate(arguments)
    ]


def _where_going(
    going: Any, results: Sequence[Any], carry: Sequence[Any]
) -> Sequence[Any]:
    """What is carried on by the members of a batch that go on; the others keep it."""
    if going is None:
        return results

    def chosen(new: Any, old: Any) -> Any:
        new, old = _on_device(new), _on_device(old)
        members = lax.broadcast_in_dim(going, new.shape, range(going.ndim))
        return lax.select(members, new, old)

    return list(map(chosen, results, carry))


def _on_device(x: Any) -> Any:
    return memory.transfer(x, "device")


def _load_rows(x: Any) -> Any:
    return x.whole() if isinstance(x, RowValue) else x


def _bound(jaxpr: jex.Jaxpr, e: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The results of an equation."""
    pairs = zip(e.invars, values, strict=True)
    given = {a: x for a, x in pairs if isinstance(a, jex.Var)}
    unnamed = jaxpr.debug_info.with_unknown_names()
    return [*evaluated([e], given.__getitem__, unnamed).values()]


def makes_rows(closed: jex.ClosedJaxpr) -> bool:
    """Returns whether a function moves stacked results to the host, as for init.

    Or whether it decodes, on the device, what its scans take rows of.
    """
    counts = row_counts(closed.jaxpr)
    stacked: set[jex.Var] = set()
    for e in closed.jaxpr.eqns:
        if decodes(e, counts):
            return True
        stacked.update(v for body in entered(e) for v in body.stacked)
        moved = in_pairs(e) if e.primitive.name == "device_put" else ()
        if any(a in stacked and memory.on_host(v.aval) for a, v in moved):
            return True
    return False

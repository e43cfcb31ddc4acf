"""Objects of Flax NNX: a function of objects as one of values, as `nnx.jit` has it.

To JAX an NNX object is a pytree. A function that is traced gets a copy, and what it
does to the copy is lost unless somebody brings it back. So objects are split into
arrays and a graph outside of the traced function, and merged inside; what the function
made of them is split there and merged outside, into the objects that were given
(`flax.nnx.update_context`, Flax 0.12, is Flax's own way to do so, and `nnx.jit`'s).
References are shared among all arguments and results.

Flax is not needed: a tree holds its objects only where it was imported.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax

from optax_offload._ground import commitment, compat, trees

F = TypeVar("F", bound=Callable[..., Any])

# Modules, optimizers, lists, random streams; and variables.
_OBJECTS = (("flax.nnx.pytreelib", "Pytree"), trees.NNX_VARIABLE)
# States are values: what is merged of them shares their variables.
_STATES = (trees.NNX_STATE, ("flax.nnx.statelib", "FlatState"))

_LINES = (
    "jax.jit, jax.grad and other transformations of JAX give it copies of objects. Jit "
    "the step with one that gives objects back, and with no other:\n"
    "    @oo.jit(donate_argnums=(0, 1))\n"
    "    def step(model, optimizer, x):\n"
    "        ...\n"
    "Or return the objects. If the step only evaluates, call model.eval() before it: "
    "then statistics and random streams stay as they are"
)


def has_objects(tree: Any) -> bool:
    """Returns whether anything in a tree is an object that a function may change."""
    return next(_objects(tree), None) is not None


def has_split(tree: Any) -> bool:
    """Returns whether there are objects in a tree, which are split."""
    return bool(_nodes(tree))


class Pure:
    """A function that is given NNX objects, as one of values.

    Attributes:
      of_values: The function of `SplitObject` objects. It returns what became of those
        in each argument, and its result.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        donated: Callable[[int | str], bool] = lambda _: False,
        static: Callable[[int | str], bool] = lambda _: False,
        commits: bool = False,
    ):
        """Makes the function.

        Args:
          fun: The function.
          donated: Tells whether the buffers of an argument, by its position or name,
            are donated.
          static: Tells whether an argument is static, and its objects no arguments.
          commits: Whether a call puts all that objects hold on a device for good,
            if anything is.
        """
        self._donated, self._static, self._commits = donated, static, commits
        self._tag = object()

        @functools.wraps(fun)
        def of_values(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return self._called(fun, args, kwargs)

        self.of_values = of_values

    def takes(self, args: Any, kwargs: Any) -> bool:
        """Returns whether there are objects among the arguments of a call."""
        named = [*enumerate(args), *kwargs.items()]
        return any(has_objects(x) for name, x in named if not self._static(name))

    def call(self, jitted: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls what was made of `of_values` for objects, and changes these.

        Args:
          jitted: The function of values, transformed.
          args: The positional arguments of the call.
          kwargs: Its other arguments.

        Raises:
          TypeError: The function changes copies, which nothing brings back.
        """
        copies = compat.tracing() and not _inside_flax()
        before = _contents(args, kwargs) if copies else []
        with _flax().update_context(self._tag):
            args, kwargs = self.split(args, kwargs)
            if self._commits:
                args, kwargs = _committed((args, kwargs))
            values = _values((args, kwargs))
            after, result = jitted(*args, **kwargs)
            if has_split((after, result)):
                with _flax().merge_context(self._tag, inner=False) as context:
                    _merged(context, after, values)
                    result = _merged(context, result, values)
        _refuse(_lost(before, result))
        return result

    def split(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call, with each object split.

        Within `flax.nnx.update_context`, see `context`.
        """
        with _flax().split_context(self._tag) as context:
            given = tuple(
                x if self._static(i) else _split(context, x) for i, x in enumerate(args)
            )
            named = {
                k: x if self._static(k) else _split(context, x)
                for k, x in kwargs.items()
            }
        return given, named

    def context(self) -> Any:
        """Returns the context in which arguments are split for one call."""
        return _flax().update_context(self._tag)

    def _called(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        named = [*enumerate(args), *kwargs.items()]
        donated = [self._donated(k) for k, x in named for _ in _values(x)]
        before = [jax.tree.flatten(x) for x in _values((args, kwargs))]
        graphs = _graphs((args, kwargs))
        with _flax().merge_context(self._tag, inner=True) as context:
            given, given_named = _merged(context, (args, kwargs))
        result = fun(*given, **given_named)
        known = {id(x): i for i, x in enumerate(_values((args, kwargs)))}

        def left(x: Any) -> Any:
            """What stays as it was is no result, unless its buffer is donated."""
            i = known.get(id(x))
            if i is None or donated[i] or not _same(before[i], jax.tree.flatten(x)):
                return x
            return _Kept(i)

        with _flax().split_context(self._tag) as context:
            after = tuple(
                _split(context, _objects_of(now), left) if has_split(was) else None
                for was, now in [
                    *zip(args, given, strict=True),
                    *((x, given_named[name]) for name, x in kwargs.items()),
                ]
            )
            result = _split(context, result)
        kept = all(isinstance(x, _Kept) for x in _values(after))
        if kept and graphs == _graphs(after) and not _nodes(result):
            after = (None,) * len(after)  # Nothing changed.
        return after, result


def as_values(
    fun: Callable[..., Any],
    args: Sequence[Any],
    donated: int | Sequence[int] | None = None,
    static: int | Sequence[int] | None = None,
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A function of objects and its arguments, as a function of values and these.

    The objects stay as they are: its results say what would become of them.

    Args:
      fun: The function.
      args: Its arguments.
      donated: The positions of those that are donated, as `jax.jit` has them.
      static: The positions of static ones.
    """
    chosen = [
        {i % len(args) for i in ([x] if isinstance(x, int) else x or ())}
        for x in (donated, static)
    ]
    pure = Pure(fun, chosen[0].__contains__, chosen[1].__contains__)
    if not pure.takes(args, {}):
        return fun, args
    pure._tag = None
    return pure.of_values, pure.split(args, {})[0]


def splits(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in whose result objects are split; `merged` gives them back."""

    def split(*args: Any) -> Any:
        result = fun(*args)
        if not has_objects(result):
            return result
        with _flax().split_context() as context:
            return _split(context, result)

    return split


def merged(tree: Any) -> Any:
    """A tree with new objects in the place of split ones."""
    if not has_split(tree):
        return tree
    with _flax().merge_context() as context:
        return _merged(context, tree)


def in_place(fun: F) -> F:
    """A function of a tree that changes the objects in it, and returns that tree.

    The function is given a state in the place of each object.
    """

    @functools.wraps(fun)
    def changing(tree: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_objects(tree):
            return fun(tree, *args, **kwargs)

        def state(x: Any) -> Any:
            is_module = _is_object(x) and not trees.is_nnx_variable(x)
            return _flax().state(x) if is_module else x

        def change(x: Any, new: Any) -> Any:
            if not _is_object(x):
                return new
            _flax().update(x, new)
            return x

        whole = {"is_leaf": lambda x: isinstance(x, trees.classes(*_OBJECTS, *_STATES))}
        states, args = jax.tree.map(state, (tree, args), **whole)
        return jax.tree.map(change, tree, fun(states, *args, **kwargs), **whole)

    return cast("F", changing)


def _committed(tree: Any) -> Any:
    """The values of split objects, on a device for good where others there are so."""
    put = commitment.committing(jax.tree.leaves(_values(tree)))
    if put is None:
        return tree
    return jax.tree.map(
        lambda x: jax.tree.map(put, x) if _is_split(x) else x, tree, is_leaf=_is_split
    )


class _Paths(tuple[str, ...]):
    """The paths of values in an object, which its graph tells too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Paths)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class SplitObject:
    """An NNX object, as a node of a tree.

    Attributes:
      graph: What Flax makes the object of, given its values.
      paths: The paths of its values.
      values: The values, of which most are arrays.
    """

    graph: Any
    paths: _Paths
    values: Sequence[Any]

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the values with their paths, each as one key, and the rest."""
        keys = map(jax.tree_util.DictKey, self.paths)
        return [*zip(keys, self.values, strict=True)], (self.graph, self.paths)

    def tree_flatten(self) -> tuple[Any, Any]:
        """Returns the values and the rest."""
        return self.values, (self.graph, self.paths)

    @classmethod
    def tree_unflatten(cls, of: Any, values: Any) -> SplitObject:
        """Makes a node."""
        graph, paths = of
        return cls(graph, paths, [*values])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Kept:
    """Stands for the value of an argument that is as it was, by its position."""

    position: int


def _flax() -> Any:
    return sys.modules["flax.nnx"]


def _inside_flax() -> bool:
    """Returns whether a transformation of Flax is around, which gives objects back."""
    context = getattr(sys.modules["flax.nnx.graphlib"], "GRAPH_CONTEXT", None)
    return bool(getattr(context, "update_context_stacks", False))


def _is_object(x: Any) -> bool:
    return isinstance(x, trees.classes(*_OBJECTS))


def _is_split(x: Any) -> bool:
    return isinstance(x, SplitObject)


def _nodes(tree: Any) -> list[SplitObject]:
    return [*filter(_is_split, jax.tree.leaves(tree, is_leaf=_is_split))]


def _values(tree: Any) -> list[Any]:
    return [x for node in _nodes(tree) for x in node.values]


def _graphs(tree: Any) -> list[Any]:
    return [node.graph.with_no_outer_index() for node in _nodes(tree)]


def _split(context: Any, tree: Any, left: Callable[[Any], Any] = lambda x: x) -> Any:
    """A tree with each object split, and its values as a function leaves them."""
    objects, variables = trees.classes(*_OBJECTS), trees.classes(trees.NNX_VARIABLE)

    def split(x: Any) -> Any:
        if not isinstance(x, objects):
            return x
        graph, flat = context.flatten(x)
        paths = _Paths("/".join(map(str, path)) for path in flat.paths)
        values = [
            v.get_raw_value() if isinstance(v, variables) else v for v in flat.leaves
        ]
        return SplitObject(graph, paths, [*map(left, values)])

    return jax.tree.map(split, tree, is_leaf=_is_object)


def _merged(context: Any, tree: Any, given: Sequence[Any] = ()) -> Any:
    def merge(x: Any) -> Any:
        if not isinstance(x, SplitObject):
            return x
        values = [given[v.position] if isinstance(v, _Kept) else v for v in x.values]
        return context.unflatten(x.graph, values)

    return jax.tree.map(merge, tree, is_leaf=_is_split)


def _objects_of(tree: Any) -> Any:
    """A tree with None for all that is no object."""
    return jax.tree.map(
        lambda x: x if _is_object(x) else None, tree, is_leaf=_is_object
    )


def _same(before: tuple[Sequence[Any], Any], now: tuple[Sequence[Any], Any]) -> bool:
    """Returns whether two flat trees are of the same objects."""
    (leaves, structure), (others, other) = before, now
    return structure == other and all(map(operator.is_, leaves, others))


def _objects(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects of a tree that are in no other, with their paths."""
    objects, states = trees.classes(*_OBJECTS), trees.classes(*_STATES)
    if not objects:
        return
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, (*objects, *states))
    )
    for keys, x in flat:
        if isinstance(x, objects):
            yield trees.path_string(keys), x


def _contents(args: Any, kwargs: Any) -> list[tuple[str, Any, dict[str, Any], Any]]:
    """The path, object, leaves and structure of each object among arguments."""
    found = [*_objects(args), *_objects(kwargs)]
    return [(f"argument {path}", x, *_content(x)) for path, x in found]


def _content(x: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of an object by path, and its structure."""
    if jax.tree_util.all_leaves([x]):
        return {}, None  # Of a class with `pytree=False`, which JAX does not copy.
    return dict(trees.leaves_with_paths(x)), jax.tree.structure(x)


def _refuse(lost: Collection[str]) -> None:
    if lost:
        raise TypeError(
            "the step changes objects of Flax NNX in place, and nothing keeps what "
            f"becomes of them, so that it would train nothing: "
            f"{trees.listed([*lost])}. {_LINES}"
        )


def _lost(given: list[tuple[str, Any, dict[str, Any], Any]], results: Any) -> list[str]:
    """The paths of what was changed and is not returned.

    Args:
      given: Path, object, leaves and structure of each argument, before the step.
      results: What the step returned.
    """
    returned = {id(x) for _, x in _objects(results)}
    values = {id(x) for x in jax.tree.leaves(results)}
    lost: list[str] = []
    for path, x, before, structure in given:
        if id(x) in returned:
            continue
        after, now = _content(x)
        changed = [k for k, v in after.items() if v is not before.get(k)]
        gone = [k for k in before if k not in after]
        some = [*(k for k in changed if id(after[k]) not in values), *gone]
        if not (changed or gone) and structure != now:
            some = [""]  # A number or a flag of Python's.
        lost += ["/".join(filter(None, (path, k))) for k in some]
    return lost

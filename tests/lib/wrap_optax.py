"""A pytest plugin: the factories of optax return offloaded transformations.

``pytest -p wrap_optax --pyargs optax._src.alias_test`` runs optax's own tests so. What
the outermost call returns is offloaded; what a factory is made of stays plain, and so
does what is made or used while an update is traced.

- ``--plain`` leaves the factories as they are, to compare with.
- ``--cases=N`` runs at most N cases of each numbered test, spread over all of them.
- ``--outcomes=FILE`` writes how each test ended, and what was wrapped.
"""

import collections
import contextlib
import functools
import gc
import importlib.util
import inspect
import json
import pathlib
import re
import sys
import types

import jax
import optax
import optax.contrib
import optax.experimental
from optax._src import test_utils

import optax_offload as oo

# Every leaf that can be moved goes, but for counters of 4 bytes.
RULE = oo.Rule(".*", min_bytes=8, optional=True)
# Of the factories that were replaced, of the transformations that they returned, of the
# updates that came with state in host memory (run or traced), and of its leaves.
counts = collections.Counter()
outcomes = {}
# The transformations that offloaded ones were made of, by the identity of their update.
_plain = {}
_depth = 0


@contextlib.contextmanager
def _inside():
    """In here factories are optax's own, and so is what they returned."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def offloaded(tx):
    """A transformation with its state in host memory, whose uses are counted."""

    def guarded(fn):
        @functools.wraps(fn)
        def call(*args, **kwargs):
            with _inside():
                return fn(*args, **kwargs)

        return call

    def init(params):
        return (plain if _depth else result).init(params)

    def update(updates, state, params=None, **extra_args):
        if _depth:
            return plain.update(updates, state, params, **extra_args)
        on_host = sum(map(_on_host, jax.tree.leaves(state)))
        counts["updates"] += on_host > 0
        counts["leaves"] += on_host
        return result.update(updates, state, params, **extra_args)

    with _inside():
        plain = optax.with_extra_args_support(tx)
        inner = plain._replace(init=guarded(plain.init), update=guarded(plain.update))
        result = oo.offload(inner, RULE)
    counts["wrapped"] += 1
    _plain[id(update)] = update, tx
    return result._replace(init=init, update=update)


def _on_host(x):
    return isinstance(x, jax.Array) and (
        jax.typeof(x).memory_space == jax.memory.Space.Host
    )


def unwrapped(x):
    """An argument of a factory, without offloading: that must not be nested."""
    if isinstance(x, optax.GradientTransformation):
        return _plain.get(id(x.update), (None, x))[1]
    if isinstance(x, dict):
        return type(x)((k, unwrapped(v)) for k, v in x.items())
    if type(x) in (list, tuple):
        return type(x)(map(unwrapped, x))
    return x


def wrapped(factory):
    """A factory that returns offloaded transformations, where its call is outermost."""

    @functools.wraps(factory)
    def call(*args, **kwargs):
        outermost = _depth == 0
        with _inside():
            result = factory(*unwrapped(args), **unwrapped(kwargs))
        if isinstance(result, types.FunctionType):  # of inject_hyperparams
            return wrapped(result)
        if outermost and isinstance(result, optax.GradientTransformation):
            return offloaded(result)
        return result

    return call


class MultiSteps(optax.MultiSteps):
    """`optax.MultiSteps`, which is no transformation but can be offloaded like one."""

    def __init__(self, opt, *args, **kwargs):
        with _inside():
            super().__init__(unwrapped(opt), *args, **kwargs)
        if _depth == 0:
            inner = optax.GradientTransformationExtraArgs(super().init, super().update)
            self.init, self.update = offloaded(inner)


@contextlib.contextmanager
def log_compilations(original=test_utils.log_compilations):
    """As it is, less one of each test: what was not committed is now (F36)."""
    with original() as logs:
        yield logs
    if logs and not counts["again"]:
        counts["again"] += 1
        del logs[0]


def pytest_runtest_setup():
    """No compilation is forgiven yet."""
    counts["again"] = 0


def is_factory(x):
    """Whether optax says that a function of its own returns a transformation."""
    if not isinstance(x, types.FunctionType) or not x.__module__.startswith("optax."):
        return False
    returns = inspect.signature(x).return_annotation
    told = x.__doc__ or "" if returns is inspect.Signature.empty else str(returns)
    return "GradientTransformation" in told


def patch():
    """Replaces the factories wherever a module of optax has them."""
    importlib.import_module("optax.experimental._aggregating")
    replaced = {optax.MultiSteps: MultiSteps}
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "optax"]
    found = [(m, name, x) for m in modules for name, x in vars(m).items()]
    for module, name, x in found:
        if is_factory(x) and x not in replaced:
            replaced[x] = wrapped(x)
        if isinstance(x, types.FunctionType | type) and x in replaced:
            setattr(module, name, replaced[x])
    counts["factories"] = len(replaced)
    test_utils.log_compilations = log_compilations


def without_sklearn():
    """A few of optax's tests need it; the others in their file do not."""
    if importlib.util.find_spec("sklearn") is None:
        placeholder = types.ModuleType("sklearn")
        sys.modules["sklearn"] = placeholder
        placeholder.datasets = placeholder.linear_model = None


def pytest_addoption(parser):
    """As the module's text says."""
    parser.addoption("--plain", action="store_true")
    parser.addoption("--cases", type=int)
    parser.addoption("--outcomes", type=pathlib.Path)


def pytest_configure(config):
    """Before any test file is imported, which may hold on to a factory."""
    gc.freeze()  # As in our own tests.
    gc.set_threshold(100_000, 50, 100)
    without_sklearn()
    if not config.option.plain:
        patch()


def pytest_collection_modifyitems(config, items):
    """The first of the cases, and others at even distances."""
    most = config.option.cases
    if most is None:
        return
    tests = collections.defaultdict(list)
    for item in items:
        tests[re.sub(r"\d+$", "", item.nodeid)].append(item)
    items[:] = [
        case for cases in tests.values() for case in cases[:: -(-len(cases) // most)]
    ]


def pytest_runtest_logreport(report):
    """A test has failed if any of its phases or subtests has."""
    if report.failed or (report.when == "call" and report.nodeid not in outcomes):
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session):
    """Writes what is known."""
    if session.config.option.outcomes:
        told = {"outcomes": outcomes, "counts": counts}
        session.config.option.outcomes.write_text(json.dumps(told, indent=1))

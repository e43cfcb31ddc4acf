"""Finds a step factory by its name, and its arguments in options."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from optax_offload._plan import check_factory


def load_factory(name: str, options: Sequence[str] = ()) -> Callable[..., Any]:
    """The function of an import path, with options.

    Args:
      name: The function, as ``package.module:function``; looked for from the current
        directory too.
      options: Arguments for it, each as ``name=value``.

    Raises:
      ValueError: there is no such module or function, or the function does not take
        the arguments.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(
            f"{name!r} does not name a step factory; write package.module:function"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        right = f". Write {module_name.removesuffix('.py')}:{attribute}"
        raise ValueError(
            f"no module {module_name!r} in {os.getcwd()} or on the Python path. Run "
            "this in the module's directory, or set PYTHONPATH"
            + right
            * module_name.endswith(".py")
        ) from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        own = [n for n, x in vars(module).items() if _is_factory(x, module_name)]
        raise ValueError(
            f"{module_name} has no function {attribute!r}; it has "
            f"{', '.join(own) or 'no step factory'}"
        )
    arguments = dict(_option(option) for option in options)
    check_factory(found, name, **arguments)
    return functools.partial(found, **arguments)


def _is_factory(x: Any, module_name: str) -> bool:
    return (
        inspect.isfunction(x)
        and x.__module__ == module_name
        and next(iter(inspect.signature(x).parameters), "") == "offload"
    )


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--set {text!r}: write name=value")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value

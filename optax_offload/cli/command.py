"""`optax-offload`: from out of memory to a rule file, at the command line.

A step factory is named as `package.module:function`, looked for from the current
directory. It is called as `factory(offload, target)`, and returns an
`optax_offload.Step`: see `optax_offload.plan`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ImportError as error:
    raise SystemExit(
        "optax-offload, the command, needs typer and rich: "
        'pip install "optax-offload[cli]"'
    ) from error

import jax

from optax_offload import _plan, _rules, aot
from optax_offload._plan import measure_link as _measure_link
from optax_offload._plan import plot as _plot
from optax_offload._units import parse_size, size_text
from optax_offload.aot import Target
from optax_offload.cli import checkpoint as _checkpoint
from optax_offload.cli import tables as _tables

BAD_INPUT, DOES_NOT_FIT, IDLE_RULE = 2, 3, 4

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Which optimizer state to keep in host memory so that a step fits, and what "
    "that costs.",
    epilog="Exit codes: 0 it fits, or all is well; 2 the input is wrong; 3 it does not "
    "fit with all state moved; 4 (explain) a rule decides nothing.",
)
_traceback = False
_out, _err = Console(), Console(stderr=True)

FactoryArgument = Annotated[
    str, typer.Argument(help="A step factory: package.module:function.")
]
TargetOption = Annotated[
    str, typer.Option(help="What to compile for: see `optax-offload targets`.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="An argument of the factory: name=value.", metavar="N=V"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]


@app.callback()
def main_options(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Where an error comes from.")
    ] = False,
) -> None:
    global _traceback
    _traceback = traceback


@app.command()
def fit(
    factory: FactoryArgument,
    target: TargetOption,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Of each device: 70GiB, 24GB. By default its memory less a reserve: "
            "10 % on a GPU, 2 % on a TPU."
        ),
    ] = None,
    rules: Annotated[
        pathlib.Path | None,
        typer.Option(help="A rule file of what has to go, and what has to stay."),
    ] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Write the rule file here.")
    ] = None,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Draw the peak as bars, as PNG.")
    ] = None,
    set_: SetOption = None,
    measure_link: Annotated[
        bool, typer.Option(help="Measure the link of the device that is attached.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Finds the least state to move for a step to fit, by compiling it."""
    with _errors():
        make_step = _factory(factory, set_)
        link = _measure_link() if measure_link else None
        with _progress() as progress:
            plan = _plan.plan(
                make_step,
                target=Target(target),
                budget_bytes=None if budget is None else parse_size(budget),
                rules=None if rules is None else _rules.load_config(rules),
                link_bytes_per_second=link,
                progress=progress,
            )
        if out is not None:
            plan.save(out)
        if plot is not None:
            _plot.save(plan, plot)
    if as_json:
        _print_json(plan.as_dict())
        return
    _tables.print_plan(_out, plan)
    for path in (out, plot):
        if path is not None:
            _out.print(f"wrote {path}", highlight=False)
    if out is None and not plan.empty:
        _out.print("--out FILE writes the rules, for optax_offload.load_config")


@app.command()
def explain(
    rules: Annotated[pathlib.Path, typer.Argument(help="A rule file.")],
    step: Annotated[str | None, typer.Option(help="A step factory.")] = None,
    target: Annotated[str, typer.Option(help="For the factory's mesh.")] = "h100",
    checkpoint: Annotated[
        pathlib.Path | None, typer.Option(help="An Orbax checkpoint.")
    ] = None,
    under: Annotated[
        str,
        typer.Option(
            help="Where in the checkpoint the state of the offloaded optimizer is, as "
            "opt_state/1. Rules match paths from there."
        ),
    ] = "",
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Says which leaf goes where, by which rule, and which rule decides nothing."""
    with _errors():
        if (step is None) == (checkpoint is None):
            raise ValueError("give one of --step and --checkpoint")
        config = _rules.load_config(rules)
        if checkpoint is not None:
            leaves = _under(_checkpoint.leaves(checkpoint), under)
        else:
            assert step is not None
            recorded = _plan.record(_factory(step, set_), Target(target))
            leaves = [(x.path, x.nbytes) for r in recorded for x in r.state]
        lenient = [dataclasses.replace(rule, optional=True) for rule in config.rules]
        placements = _rules.place(_rules.OffloadConfig(lenient), leaves)
    rows = [
        {"path": path, "bytes": nbytes, "memory_kind": p.memory_kind, "why": p.why}
        for (path, nbytes), p in zip(leaves, placements, strict=True)
    ]
    decided = {p.rule.regex for p in placements if p.rule is not None}
    idle = [
        {"rule": i, "pattern": rule.regex, "optional": rule.optional}
        for i, rule in enumerate(config.rules)
        if rule.regex not in decided
    ]
    if as_json:
        _print_json({"leaves": rows, "idle_rules": idle})
    else:
        cells = [
            (r["path"], size_text(r["bytes"] or 0), r["memory_kind"], r["why"])
            for r in rows
        ]
        columns = ("path", "size ", "goes to", "by")
        _out.print(_tables.table(str(rules), columns, cells))
        for kind in ("pinned_host", "device"):
            total = sum(r["bytes"] or 0 for r in rows if r["memory_kind"] == kind)
            _out.print(f"{kind}: {size_text(total)}", highlight=False)
        for rule in idle:
            allowed = " (optional)" if rule["optional"] else ""
            _err.print(
                f"rule {rule['rule']} decides nothing{allowed}: {rule['pattern']}",
                highlight=False,
                markup=False,
            )
    if any(not rule["optional"] for rule in idle):
        raise typer.Exit(IDLE_RULE)


@app.command()
def report(
    checkpoint: Annotated[pathlib.Path, typer.Argument(help="An Orbax checkpoint.")],
    as_json: JsonOption = False,
) -> None:
    """Lists the leaves of a checkpoint. No array is loaded."""
    with _errors():
        leaves = _checkpoint.leaves(checkpoint)
    if as_json:
        total = sum(x.nbytes for x in leaves)
        _print_json({"leaves": [x._asdict() for x in leaves], "bytes": total})
    else:
        _tables.print_leaves(_out, str(checkpoint), leaves)


@app.command()
def targets(as_json: JsonOption = False) -> None:
    """Lists what can be compiled for."""
    if as_json:
        _print_json(_tables.target_rows())
    else:
        _tables.print_targets(_out)


def _factory(name: str, options: list[str] | None) -> Callable[..., Any]:
    """The function of an import path, with options."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{name!r} is no step factory; write package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {module_name!r} from {os.getcwd()}: run where it is, "
            "or set PYTHONPATH"
        ) from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        own = [n for n, x in vars(module).items() if _is_factory(x, module_name)]
        raise ValueError(
            f"{module_name} has no function {attribute!r}; it has "
            f"{', '.join(own) or 'no step factory'}"
        )
    arguments = dict(_option(option) for option in options or ())
    try:
        inspect.signature(found).bind(None, None, **arguments)
    except TypeError as error:
        raise ValueError(
            f"{name} is called with (offload, target"
            + "".join(f", {k}={v!r}" for k, v in arguments.items())
            + f"), but takes {inspect.signature(found)}: {error}"
        ) from error
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


def _under(
    leaves: list[_checkpoint.SavedLeaf], prefix: str
) -> list[tuple[str, int | None]]:
    prefix = prefix.strip("/")
    start = f"{prefix}/" if prefix else ""
    found = [(x.path.removeprefix(start), x.nbytes) for x in leaves]
    found = [f for f, x in zip(found, leaves, strict=True) if x.path.startswith(start)]
    if not found:
        tops = sorted({"/".join(x.path.split("/")[:2]) for x in leaves})
        raise ValueError(
            f"nothing is under {prefix!r} in the checkpoint; there is {', '.join(tops)}"
        )
    return [*found]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str | _plan.Compiled], None]]:
    """Shows what is being compiled, and keeps a line of what was."""
    with _err.status("tracing") as status:

        def show(what: str | _plan.Compiled) -> None:
            if isinstance(what, str):
                status.update(what)
            else:
                _err.print(f"compiled with {what}", highlight=False)

        yield show


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Errors of the input as a line and an exit code."""
    try:
        yield
    except aot.DoesNotFitError as error:
        code, shown = DOES_NOT_FIT, error
    except (ValueError, TypeError, OSError, ImportError) as error:
        code, shown = BAD_INPUT, error
    else:
        return
    if _traceback:
        raise shown
    _err.print(f"error: {shown}", markup=False, highlight=False)
    if code == BAD_INPUT:
        _err.print(
            "(optax-offload --traceback ... says where it comes from)", style="dim"
        )
    raise typer.Exit(code)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def main() -> None:
    """The command. A program of its own: it may choose for JAX."""
    # Nothing is run but `--measure-link`: a GPU or TPU that is here stays free.
    if "--measure-link" not in sys.argv:
        jax.config.update("jax_platforms", "cpu")
    # The compilers' own logs: a GPU's calls state in host memory an error. JAX itself
    # sets 1 where nobody has set it.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    app()


if __name__ == "__main__":
    main()

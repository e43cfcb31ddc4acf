"""`optax-offload`: from out of memory to a rule file, at the command line.

A step factory is named as `package.module:function`, looked for from the current
directory. It is called as `factory(offload, target)`, and returns an
`optax_offload.Step`: see `optax_offload.plan`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Generator
from importlib import metadata
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

from optax_offload import __version__, _link, _plan, _rule_files, aot
from optax_offload._units import parse_size
from optax_offload.aot import Target
from optax_offload.cli import checkpoint as checkpoints
from optax_offload.cli import tables
from optax_offload.cli.diagnosis import NO_GAIN, diagnosis_of, print_diagnosis
from optax_offload.cli.errors import error_line
from optax_offload.cli.explanation import explanation_of
from optax_offload.cli.factory import load_factory
from optax_offload.cli.interrupts import leave, until_interrupted

DOES_NOT_FIT, BAD_INPUT, IDLE_RULE, INTERRUPTED = 1, 2, 4, 130


def _examples(*lines: str) -> str:
    """The foot of `--help`. rich keeps a line where an empty one is before it."""
    return "\n\n".join(["Examples:", *(f"optax-offload {line}" for line in lines)])


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What to keep in host memory so that a training step fits, and what that "
    "costs.",
    epilog=_examples(
        "fit my_steps:make_step --target h100 --out rules.toml",
        "explain rules.toml --step my_steps:make_step",
        "report runs/1/checkpoints",
    )
    + "\n\nExit codes: 0 it fits, or all is well; 1 nothing fits; 2 the input is "
    "wrong; 4 (explain) a rule decides nothing; 130 (fit) it was interrupted.",
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


def _print_version(asked: bool) -> None:
    if asked:
        versions = [f"{name} {metadata.version(name)}" for name in ("jax", "optax")]
        print(f"optax-offload {__version__} ({', '.join(versions)})")
        raise typer.Exit


@app.callback()
def main_options(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Where an error comes from.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="The versions of this, JAX and optax.",
        ),
    ] = False,
) -> None:
    """Sets what holds for every command."""
    del version
    global _traceback
    _traceback = traceback


@app.command(
    epilog=_examples(
        "fit my_steps:make_step --target h100",
        "fit my_steps:make_step --target v5e:2x4 --budget 14GiB --out rules.toml",
        "fit my_steps:make_step --target rtx4090 --allow int8 --host-memory 64GiB",
        "fit my_steps:make_step --target h100 --allow int8,bfloat16-remainder",
        "fit my_steps:make_step --target h100 --set layers=24",
    )
)
def fit(  # noqa: PLR0913 - each parameter is an option
    factory: FactoryArgument,
    target: TargetOption,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Of each device: 70GiB, 24GB. By default its memory less a reserve: "
            "10 % on a GPU, 2 % on a TPU."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="What each host has for this: 64GiB. Without it, what is needed is "
            "said."
        ),
    ] = None,
    rules: Annotated[
        pathlib.Path | None,
        typer.Option(help="A rule file of what has to go, and what has to stay."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A codec in which state may be kept: int8 and others for moments, "
            "bfloat16-remainder for float32 copies of bfloat16 parameters. Several "
            "with commas, or given repeatedly."
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Write the rule file here.")
    ] = None,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Draw peaks and times, as PNG.")
    ] = None,
    set_: SetOption = None,
    measure_link: Annotated[
        bool, typer.Option(help="Measure the link of the device that is attached.")
    ] = False,
    cache: Annotated[
        bool,
        typer.Option(
            help="Keep what is compiled in the user's cache, and do not compile it "
            "again."
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Finds the fastest way to train a step that fits, by compiling it."""
    with _errors():
        _check_can_write(out, plot)
        make_step = load_factory(factory, set_ or ())
        link = _link.measure_link() if measure_link else None
        chips = Target(target)
        asked = _plan.Asked(
            _plan.checked_budget(
                None if budget is None else parse_size(budget),
                None if host_memory is None else parse_size(host_memory),
                chips,
            ),
            allow=_plan.allowed(allow),
            link_bytes_per_second=link,
            folder=_cache_folder() if cache else None,
        )
        given = None if rules is None else _rule_files.load_config(rules)
        with _progress() as progress:
            planner = _plan.Planner(
                _plan.StepFactory(make_step, chips), asked, given, progress
            )
            complete = until_interrupted(planner.run)
        if not complete:
            _say_what_was_found(planner)
        plan = planner.plan()
    # Before the files: what took minutes to find is not lost if one of them fails.
    if as_json:
        _print_json(plan.as_dict())
    else:
        tables.print_plan(_out, plan)
    with _errors():
        if out is not None:
            plan.save(out)
        if plot is not None:
            _plan.save_plot(plan, plot)
    if not as_json:
        for path in (out, plot):
            if path is not None:
                _out.print(f"wrote {path}", highlight=False)
        tables.print_training(_out, plan, out)
    if not complete:
        # The compiler may still be at work in its thread, and cannot be stopped.
        _out.file.flush()
        leave(INTERRUPTED)


def _say_what_was_found(planner: _plan.Planner) -> None:
    """Ends the process where nothing that fits was found before Ctrl-C."""
    if planner.best is not None:
        _err.print("interrupted: this is the best that was found", style="bold")
        return
    _err.print("interrupted: nothing that was compiled fits", style="bold")
    if planner.compiled:
        tables.print_alternatives(_err, planner.alternatives)
    leave(INTERRUPTED)


def _cache_folder() -> pathlib.Path:
    """The folder of peaks and times of earlier runs, in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "optax_offload" / "compiled"


def _check_can_write(out: pathlib.Path | None, plot: pathlib.Path | None) -> None:
    """Finds what would fail only after all compiling.

    Raises:
      ValueError: a file is a directory, or cannot be made where it is to be.
      ImportError: matplotlib is needed, and not installed.
    """
    for option, path in (("--out", out), ("--plot", plot)):
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ValueError(
                f"{option} {path}: there is no directory {folder}; make it first: "
                f"mkdir -p {folder}"
            )
        if path.is_dir():
            raise ValueError(
                f"{option} {path} is a directory; name a file in it, such as "
                f"{path / ('rules.toml' if option == '--out' else 'peak.png')}"
            )
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(
                f"{option} {path} may not be written by this user; name another file, "
                f"or change the permissions of {folder}"
            )
    if plot is not None:
        _plan.check_can_plot()


@app.command(
    epilog=_examples(
        "explain rules.toml --step my_steps:make_step",
        "explain rules.toml --checkpoint runs/1/checkpoints --under opt_state/1",
    )
)
def explain(  # noqa: PLR0913 - each parameter is an option
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
    parameters_under: Annotated[
        str, typer.Option(help="Where in the checkpoint the parameters are.")
    ] = "params",
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Says which leaf goes where, by which rule, and which rule decides nothing."""
    with _errors():
        if (step is None) == (checkpoint is None):
            raise ValueError("give one of --step and --checkpoint")
        config = _rule_files.load_config(rules)
        parameters: list[tuple[str, int | None]] = []
        if checkpoint is not None:
            saved = checkpoints.leaves(checkpoint)
            leaves = checkpoints.under(saved, under)
            if config.parameters:
                parameters = checkpoints.under(saved, parameters_under)
        else:
            assert step is not None
            factory = load_factory(step, set_ or ())
            made = _plan.StepFactory(factory, Target(target))
            recorded = _plan.record(made, config)
            leaves = [(x.path, x.nbytes) for r in recorded for x in r.state]
            weights = {x.argument: x.leaf for r in recorded for x in r.parameters}
            parameters = [(x.path, x.nbytes) for x in weights.values()]
        found = {"": explanation_of(config.rules, leaves)}
        if config.parameters:
            found[" of parameters"] = explanation_of(config.parameters, parameters)
    idle = [(of, rule) for of, each in found.items() for rule in each.idle_rules]
    if as_json:
        of_state, *of_parameters = (each.as_dict() for each in found.values())
        if of_parameters:
            of_state["parameters"] = of_parameters[0]
        _print_json(of_state)
    else:
        for of, each in found.items():
            title = f"parameters of {rules}" if of else str(rules)
            tables.print_explanation(_out, title, each)
        for of, rule in idle:
            allowed = " (optional)" if rule.optional else ""
            line = f"rule {rule.rule}{of} decides nothing{allowed}: {rule.pattern}"
            _err.print(line, highlight=False, markup=False)
    if any(not rule.optional for _, rule in idle):
        raise typer.Exit(IDLE_RULE)


@app.command(
    epilog=_examples(
        "report runs/1/checkpoints",
        "report runs/1/checkpoints/1000 --json",
    )
)
def report(
    checkpoint: Annotated[pathlib.Path, typer.Argument(help="An Orbax checkpoint.")],
    as_json: JsonOption = False,
) -> None:
    """Lists the leaves of a checkpoint. No array is loaded."""
    with _errors():
        leaves = checkpoints.leaves(checkpoint)
    if as_json:
        total = sum(x.nbytes for x in leaves)
        _print_json({"leaves": [x._asdict() for x in leaves], "bytes": total})
    else:
        tables.print_leaves(_out, str(checkpoint), leaves)


@app.command(
    epilog=_examples(
        "targets",
        "targets --json",
    )
)
def targets(as_json: JsonOption = False) -> None:
    """Lists what can be compiled for."""
    if as_json:
        _print_json(tables.target_rows())
    else:
        tables.print_targets(_out)


@app.command(
    epilog=_examples(
        "doctor",
        "doctor --no-measure-link --json",
        "doctor --save machine.txt",
        "doctor --machine machine.txt",
    )
    + "\n\nExit code 5: offload gains nothing here, or does not work."
)
def doctor(
    machine: Annotated[
        pathlib.Path | None,
        typer.Option(help="A machine that --save wrote, instead of this one."),
    ] = None,
    save: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write what was read of this machine here, as text."),
    ] = None,
    measure_link: Annotated[
        bool, typer.Option(help="Measure the link of the device that is attached.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Says what this machine can do for offloading, before anybody trains on it."""
    with _errors():
        found = diagnosis_of(machine, save, measure_link=measure_link)
    if as_json:
        _print_json(found.as_dict())
    else:
        print_diagnosis(_out, found)
    if not found.offload_helps:
        raise typer.Exit(NO_GAIN)


@contextlib.contextmanager
def _progress() -> Generator[_plan.Progress, None, None]:
    """Shows what is being compiled, and keeps a line of what was."""
    with _err.status("tracing") as status:

        def show(what: str | _plan.CompiledCandidate) -> None:
            if isinstance(what, str):
                status.update(what)
            else:
                _err.print(f"compiled: {what}", highlight=False, markup=False)

        yield show


@contextlib.contextmanager
def _errors() -> Generator[None, None, None]:
    """Turns what is raised into a line and an exit code.

    Whatever it is: a step factory, and the step it makes, may raise anything.
    """
    try:
        yield
    except aot.DoesNotFitError as error:
        code, shown = DOES_NOT_FIT, error
        if isinstance(error, _plan.NothingFitsError):
            tables.print_alternatives(_err, error.alternatives)
    except typer.Exit:
        raise
    except Exception as error:
        code, shown = BAD_INPUT, error
    else:
        return
    if _traceback:
        raise shown
    line = f"error: {error_line(shown)}"
    _err.print(line, markup=False, highlight=False, soft_wrap=True)
    if code == BAD_INPUT:
        _err.print(
            "(optax-offload --traceback ... says where it comes from)", style="dim"
        )
    raise typer.Exit(code)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def main() -> None:
    """The command. A program of its own: it may choose for JAX."""
    # Nothing is run but `--measure-link` and `doctor`: a GPU or TPU that is here stays
    # free.
    command = next((x for x in sys.argv[1:] if not x.startswith("-")), "")
    if command == "doctor":
        # Beside another process on the device it takes what it needs.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elif "--measure-link" not in sys.argv:
        jax.config.update("jax_platforms", "cpu")
    # The compilers' own logs: a GPU's calls state in host memory an error (F21). JAX
    # itself sets 1 where nobody has set it.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    app()


if __name__ == "__main__":
    main()

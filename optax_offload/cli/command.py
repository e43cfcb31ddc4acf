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
import re
import sys
from collections.abc import Generator
from importlib import metadata
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ImportError as error:
    raise SystemExit(
        "the command optax-offload needs typer and rich: "
        'pip install "optax-offload[cli]"'
    ) from error

import jax

from optax_offload import __version__, _plan, aot
from optax_offload._ground import trees
from optax_offload._ground.units import parse_size
from optax_offload._host import link
from optax_offload._places import rule_files
from optax_offload.aot import Target
from optax_offload.cli import checkpoint as checkpoints
from optax_offload.cli import tables
from optax_offload.cli.diagnosis import NO_GAIN, diagnosis_of, print_diagnosis
from optax_offload.cli.errors import check_can_write, error_line
from optax_offload.cli.explanation import explanation_of
from optax_offload.cli.factory import load_factory
from optax_offload.cli.interrupts import leave, until_interrupted
from optax_offload.cli.text import say

DOES_NOT_FIT, BAD_INPUT, IDLE_RULE, INTERRUPTED = 1, 2, 4, 130


def _examples(*lines: str) -> str:
    """The examples below `--help`. rich keeps line breaks after empty lines only."""
    return "\n\n".join(["Examples:", *(f"optax-offload {line}" for line in lines)])


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Finds out what to keep in host memory to make a train step fit, and what it "
    "costs.",
    epilog=_examples(
        "fit my_steps:make_step --target h100 --out rules.toml",
        "explain rules.toml --step my_steps:make_step",
        "report runs/1/checkpoints",
        "doctor",
    )
    + "\n\nExit codes: 0: it fits, or all is well. 1: nothing fits. 2: the input is "
    "wrong. 4: a rule has no effect (explain). 5: offload does not help here "
    "(doctor). 130: interrupted (fit).",
)
_traceback = False
_out, _err = Console(), Console(stderr=True)

FactoryArgument = Annotated[
    str,
    typer.Argument(
        help="Your step factory, as package.module:function. It returns an "
        "optax_offload.Step."
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        help="The chips to compile for, such as h100:8 (required). `optax-offload "
        "targets` lists them."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="An argument for the factory, as name=value. Repeat it for more.",
        metavar="N=V",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of tables.")
]


def _print_version(asked: bool) -> None:
    if asked:
        versions = [f"{name} {metadata.version(name)}" for name in ("jax", "optax")]
        print(f"optax-offload {__version__} ({', '.join(versions)})")
        raise typer.Exit


@app.callback()
def main_options(
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Print the traceback of an error."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of optax-offload, JAX and optax.",
        ),
    ] = False,
) -> None:
    """Sets the options of all commands."""
    del version
    global _traceback
    _traceback = traceback


@app.command(
    epilog=_examples(
        "fit my_steps:make_step --target h100",
        "fit my_steps:make_step --target v5e:2x4 --budget 14GiB --out rules.toml",
        "fit my_steps:make_step --target rtx4090 --allow int8 --host-memory 64GiB",
        "fit my_steps:make_step --target h100 --allow int8,bfloat16-remainder",
        "fit my_steps:make_lora --target rtx4090 --frozen 'layers/.*' --allow nf4",
        "fit my_steps:make_step --target h100 --set layers=24",
    )
)
def fit(  # noqa: PLR0913 - each parameter is an option
    factory: FactoryArgument,
    target: TargetOption = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="The memory that a step may take on each device, such as 70GiB or "
            "24GB. By default 90 % of a GPU's memory and 98 % of a TPU's."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="The memory of each device, if your card has less than the target: "
            "for an RTX 4080, --target rtx4090 --memory 16GiB."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="The host memory that a step may take on each host, such as 64GiB. "
            "Unlimited by default."
        ),
    ] = None,
    rules: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="A rule file: leaves that must move, and leaves that must stay."
        ),
    ] = None,
    frozen: Annotated[
        str | None,
        typer.Option(
            help="A regex for parameters that are not trained, such as the base under "
            "adapters. It matches whole paths within the step's argument.",
            metavar="REGEX",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A codec that the plan may use: int8 and others for moments, "
            "bfloat16-remainder for float32 copies of bfloat16 parameters, nf4 and "
            "others for frozen parameters. Several with commas, or given repeatedly."
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Write the rule file to this path.")
    ] = None,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(help="Draw peaks and times to this path, such as peak.png."),
    ] = None,
    set_: SetOption = None,
    measure_link: Annotated[
        bool, typer.Option(help="Measure the link of the attached device.")
    ] = False,
    cache: Annotated[
        bool,
        typer.Option(help="Cache results, so that nothing is compiled twice."),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Finds the fastest way to train a step within memory, by compiling it."""
    with _errors():
        if target is None:
            raise ValueError(
                "missing option --target, such as --target h100: "
                "`optax-offload targets` lists the chips"
            )
        # Mistakes that would otherwise fail after minutes of compiling.
        chips = Target(target, memory_bytes=_size("--memory", memory))
        budgets = _plan.checked_budget(
            _size("--budget", budget), _size("--host-memory", host_memory), chips
        )
        if out is not None:
            check_can_write("--out", out, "rules.toml")
        if plot is not None:
            check_can_write("--plot", plot, "peak.png")
            _plan.check_can_plot()
        make_step = load_factory(factory, set_ or ())
        asked = _plan.PlanRequest(
            budgets,
            allow=_plan.allowed(allow),
            link_bytes_per_second=link.measure_link() if measure_link else None,
            folder=_cache_folder() if cache else None,
            frozen=frozen,
        )
        given = None if rules is None else rule_files.load_config(rules)
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
                say(_out, f"wrote {path}")
        tables.print_training(_out, plan, out)
    if not complete:
        # The compiler may still be at work in its thread, and cannot be stopped.
        _out.file.flush()
        leave(INTERRUPTED)


def _size(option: str, text: str | None) -> int | None:
    """The bytes that an option names; None where it is not given."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _say_what_was_found(planner: _plan.Planner) -> None:
    """Ends the process where nothing that fits was found before Ctrl-C or SIGTERM."""
    if planner.best is not None:
        _err.print("interrupted: this is the best way found so far", style="bold")
        return
    _err.print("interrupted: nothing compiled so far fits", style="bold")
    if planner.compiled:
        tables.print_alternatives(_err, planner.alternatives)
    leave(INTERRUPTED)


def _cache_folder() -> pathlib.Path:
    """The folder in the user's cache that keeps peaks and times of earlier runs."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "optax_offload" / "compiled"


@app.command(
    epilog=_examples(
        "explain rules.toml --step my_steps:make_step",
        "explain rules.toml --checkpoint runs/1/checkpoints --under opt_state/1",
    )
)
def explain(  # noqa: PLR0913 - each parameter is an option
    rules: Annotated[pathlib.Path, typer.Argument(help="The rule file to explain.")],
    step: Annotated[
        str | None,
        typer.Option(help="The step factory whose state to apply the rules to."),
    ] = None,
    target: Annotated[
        str, typer.Option(help="The chips whose mesh the factory gets.")
    ] = "h100",
    checkpoint: Annotated[
        pathlib.Path | None,
        typer.Option(help="An Orbax checkpoint, in place of a step factory."),
    ] = None,
    under: Annotated[
        str,
        typer.Option(
            help="The path of the offloaded optimizer's state in the checkpoint, such "
            "as opt_state/1. Rules match paths below it."
        ),
    ] = "",
    parameters_under: Annotated[
        str, typer.Option(help="The path of the parameters in the checkpoint.")
    ] = "params",
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows where each leaf of the state rests, and by which rule."""
    with _errors():
        if (step is None) == (checkpoint is None):
            raise ValueError("give either --step or --checkpoint")
        config = rule_files.load_config(rules)
        parameters: list[tuple[str, int | None]] = []
        saved = [] if checkpoint is None else checkpoints.leaves(checkpoint)
        if checkpoint is not None:
            leaves = checkpoints.under(saved, under)
            if config.parameters:
                parameters = checkpoints.under(saved, parameters_under)
        else:
            assert step is not None
            factory = load_factory(step, set_ or ())
            made = _plan.StepFactory(factory, Target(target))
            recorded = _plan.record(made, config)
            leaves = [(x.path, x.nbytes) for r in recorded for x in r.state]
            parameters = _plan.parameters_of(made, recorded, config)
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
            say(_err, f"rule {rule.rule}{of} has no effect{allowed}: {rule.pattern}")
            below = trees.beginning(re.compile(rule.pattern), (x.path for x in saved))
            if below:
                say(_err, f"it matches leaves below {below}: give --under {below}")
    if any(not rule.optional for _, rule in idle):
        raise typer.Exit(IDLE_RULE)


@app.command(
    epilog=_examples(
        "report runs/1/checkpoints",
        "report runs/1/checkpoints/1000 --json",
    )
)
def report(
    checkpoint: Annotated[pathlib.Path, typer.Argument(help="The Orbax checkpoint.")],
    as_json: JsonOption = False,
) -> None:
    """Lists the leaves of a checkpoint, without loading any array."""
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
    """Lists the chips that `fit` can compile for."""
    if as_json:
        _print_json(tables.target_rows())
    else:
        tables.print_targets(_out)


@app.command(
    epilog=_examples(
        "doctor",
        "doctor --no-measure-link --json",
        "doctor --directory /mnt/states",
        "doctor --save machine.txt",
        "doctor --machine machine.txt",
    )
    + "\n\nThe exit code is 5 if offloading gains nothing here, or doesn't work."
)
def doctor(
    machine: Annotated[
        pathlib.Path | None,
        typer.Option(help="Diagnose a machine from a file that --save wrote."),
    ] = None,
    save: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write what was read from this machine to this file."),
    ] = None,
    measure_link: Annotated[
        bool, typer.Option(help="Measure the link of the attached device.")
    ] = True,
    directory: Annotated[
        str | None,
        typer.Option(
            help="A directory for states on disk, to examine and to measure with a "
            "file of up to a GiB."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Checks whether offloading helps on this machine, and what to set."""
    with _errors():
        found = diagnosis_of(
            machine, save, directory=directory, measure_link=measure_link
        )
    if as_json:
        _print_json(found.as_dict())
    else:
        print_diagnosis(_out, found)
    if not found.offload_helps:
        raise typer.Exit(NO_GAIN)


@contextlib.contextmanager
def _progress() -> Generator[_plan.Progress, None, None]:
    """Shows what is being compiled, and keeps a line of what was.

    Where nothing can be shown for a while, as in a log, each has a line.
    """
    with _err.status("tracing") as status:

        def show(what: str | _plan.CompiledCandidate) -> None:
            if isinstance(what, str):
                status.update(what)
                if not _err.is_terminal:
                    say(_err, what)
            else:
                say(_err, f"tried: {what}")

        yield show


@contextlib.contextmanager
def _errors() -> Generator[None, None, None]:
    """Turns any exception into a line and an exit code.

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
        say(_err, "(optax-offload --traceback ... prints the traceback)", "dim")
    raise typer.Exit(code)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def main() -> None:
    """Runs the command, and chooses JAX's platform for it."""
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

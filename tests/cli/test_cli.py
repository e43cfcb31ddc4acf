"""The command: what it prints, its exit codes and its errors."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from typer.testing import CliRunner

import optax_offload as oo
from optax_offload import _plan, aot
from optax_offload._plan.alternatives import Alternatives
from optax_offload._plan.variants import Variant
from optax_offload.aot import targets
from optax_offload.cli import command as cli
from optax_offload.cli import interrupts

FACTORY = """
import jax, jax.numpy as jnp, optax
import optax_offload as oo

def make_step(offload, target, width=1024, optimizer="adam"):
    params = {"w": jax.ShapeDtypeStruct((16, width, width), jnp.float32)}
    tx = offload(getattr(optax, optimizer)(1e-3))
    state = oo.eval_shape(tx.init, params)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x = jax.ShapeDtypeStruct((16, 8, width), jnp.float32)
    return oo.Step(step, (params, state, x), donate_argnums=(0, 1))

def broken(offload, target):
    raise ValueError("mine")

def broken_otherwise(offload, target):
    return {}["params"]

def broken_in_the_step(offload, target):
    step = make_step(offload, target, width=64)
    return step._replace(fn=lambda *args: 1 / 0)
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs the command where the module `my_steps` is."""
    (tmp_path / "my_steps.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    runner = CliRunner(env={"COLUMNS": "160"})

    def run(*args, code=0):
        result = runner.invoke(cli.app, [str(a) for a in args])
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A saved parameter and Adam's state of it, under a chain."""
    ocp = pytest.importorskip("orbax.checkpoint")
    params = {"w": jnp.ones((256, 128)), "b": jnp.ones(3)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), oo.offload(optax.adam(1e-3)))
    state = tx.init(params)
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": params, "opt_state": state})
    return path


@pytest.fixture
def rules(tmp_path):
    """A rule file for Adam's moments."""
    file = tmp_path / "rules.toml"
    file.write_text("[[rules]]\npattern = '.*/(mu|nu)/.*'\n")
    return file


def test_help(invoke):
    """The exit codes are in it."""
    text = invoke("--help").output
    for word in (
        "fit",
        "explain",
        "report",
        "targets",
        "Exit codes",
        "1: nothing fits",
    ):
        assert word in text
    assert "--out" in re.sub(r"\x1b\[[\d;]*m", "", invoke("fit", "--help").output)


@pytest.mark.parametrize("name", ["fit", "explain", "report", "targets", "doctor"])
def test_each_command_has_an_example(invoke, name):
    """A whole line to copy, and a sentence about the command."""
    text = re.sub(r"\x1b\[[\d;]*m", "", invoke(name, "--help").output)
    assert "Examples:" in text
    assert re.search(rf"^ *optax-offload {name}\b", text, re.MULTILINE)


@pytest.mark.parametrize("command", [(), ("fit",), ("explain",), ("report",)])
def test_help_has_examples(invoke, command):
    """Each line is one that can be pasted."""
    text = re.sub(r"\x1b\[[\d;]*m", "", invoke(*command, "--help").output)
    assert re.search(rf"Examples:\s+optax-offload {(*command, 'fit')[0]} \S", text)


def test_version(invoke):
    """This library's, and of those that a step is traced with."""
    text = invoke("--version").output
    assert text == (
        f"optax-offload {oo.__version__} (jax {jax.__version__}, optax "
        f"{optax.__version__})\n"
    )


def test_targets(invoke):
    """Every chip, with its memory and its link."""
    rows = json.loads(invoke("targets", "--json").stdout)
    assert [r["name"] for r in rows] == [*targets.TPUS, *targets.GPUS]
    (h100,) = (r for r in rows if r["name"] == "h100")
    assert h100["memory_bytes"] == 84942979072
    assert h100["budget_bytes"] == int(84942979072 * 0.9)
    assert h100["link_bytes_per_second"] == 64e9
    text = invoke("targets").stdout
    assert re.search(r"h100 +79\.11 GiB +71\.20 GiB +64 GB/s +989", text)
    assert "link of h100: PCIe 5.0 x16" in text


def test_report(invoke, checkpoint):
    """Each leaf and its size, from the metadata alone."""
    found = json.loads(invoke("report", checkpoint, "--json").stdout)
    leaves = {x["path"]: x for x in found["leaves"]}
    mu = leaves["opt_state/1/0/mu/w"]
    assert (mu["shape"], mu["dtype"], mu["nbytes"]) == ([256, 128], "float32", 131072)
    assert found["bytes"] == sum(x["nbytes"] for x in leaves.values())
    assert len(leaves) == 7
    text = invoke("report", checkpoint).stdout
    assert re.search(r"opt_state/1/0/nu/w +256x128 +float32 +128\.00 KiB", text)
    assert "records no memory kinds" in text


def test_report_of_steps(invoke, tmp_path):
    """Of a folder of steps the last one counts."""
    ocp = pytest.importorskip("orbax.checkpoint")
    steps = tmp_path / "steps"
    with ocp.CheckpointManager(steps) as manager:
        for step, size in ((9, 4), (10, 5)):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(size)}))
    for path in (steps, steps / "10"):
        found = json.loads(invoke("report", path, "--json").stdout)
        assert [x["shape"] for x in found["leaves"]] == [[5]]


def test_explain_a_checkpoint(invoke, checkpoint, rules):
    """Where each leaf goes and by which rule."""
    args = ("explain", rules, "--checkpoint", checkpoint, "--under", "opt_state/1")
    found = json.loads(invoke(*args, "--json").stdout)
    kinds = {x["path"]: (x["memory_kind"], x["why"]) for x in found["leaves"]}
    assert kinds["0/mu/w"] == ("pinned_host", "rule 0 '.*/(mu|nu)/.*'")
    assert kinds["0/mu/b"][0] == "device"
    assert kinds["0/count"] == ("device", "no rule matches")
    assert len(kinds) == 5
    assert found["idle_rules"] == []
    text = invoke(*args).stdout
    assert re.search(r"0/mu/w +128\.00 KiB +pinned_host +rule 0", text)
    assert "pinned_host: 256.00 KiB" in text
    rules.write_text("[[rules]]\npattern = '\\d+/mu/.*'")
    told = invoke("explain", rules, "--checkpoint", checkpoint, code=4).stderr
    assert "below opt_state/1: give --under opt_state/1" in told


def test_explain_a_step(invoke, tmp_path):
    """A rule without effect is named, and is an exit code."""
    file = tmp_path / "rules.toml"
    rules = ("0/mu/.*", "0/mou/.*", "nothing")
    file.write_text("".join(f"[[rules]]\npattern = '{r}'\n" for r in rules))
    file.write_text(file.read_text() + "optional = true\n")
    args = ("explain", file, "--step", "my_steps:make_step")
    result = invoke(*args, code=4)
    assert re.search(
        r"0/mu/w +64\.00 MiB +pinned_host +rule 0 '0/mu/\.\*'", result.stdout
    )
    assert "rule 1 has no effect: 0/mou/.*" in result.stderr
    assert "rule 2 has no effect (optional): nothing" in result.stderr
    found = json.loads(invoke(*args, "--json", code=4).stdout)
    assert [r["rule"] for r in found["idle_rules"]] == [1, 2]


PARAMETER_RULES = """
[[rules]]
pattern = '.*/(mu|nu)/.*'
[[parameters]]
pattern = 'w'
[[parameters]]
pattern = 'v'
"""


def test_explain_parameters(invoke, tmp_path, checkpoint):
    """Of a rule file with rules of them, by the paths that these match."""
    file = tmp_path / "rules.toml"
    file.write_text(PARAMETER_RULES)
    args = ("explain", file, "--step", "my_steps:make_step")
    result = invoke(*args, code=4)
    state, parameters = result.stdout.split("parameters of")
    assert "0/mu/w" in state
    assert re.search(r"\bw +64\.00 MiB +pinned_host +rule 0 'w'", parameters)
    assert "pinned_host: 64.00 MiB" in parameters
    assert "rule 1 of parameters has no effect: v" in result.stderr
    found = json.loads(invoke(*args, "--json", code=4).stdout)
    assert [x["path"] for x in found["parameters"]["leaves"]] == ["w"]
    assert found["parameters"]["idle_rules"][0]["pattern"] == "v"
    args = ("explain", file, "--checkpoint", checkpoint, "--under", "opt_state/1")
    found = json.loads(invoke(*args, "--json", code=4).stdout)
    kinds = {x["path"]: x["memory_kind"] for x in found["parameters"]["leaves"]}
    assert kinds == {"w": "pinned_host", "b": "device"}
    args = (*args, "--parameters-under", "model")
    assert "nothing under 'model'" in invoke(*args, code=2).stderr


def test_explain_without_rules_of_parameters(invoke, rules):
    """Then nothing is said of them."""
    args = ("explain", rules, "--step", "my_steps:make_step")
    assert "parameters" not in invoke(*args).stdout
    assert "parameters" not in json.loads(invoke(*args, "--json").stdout)


@pytest.mark.aot
@pytest.mark.xdist_group("gpu")
def test_nothing_is_said_of_plugins(tmp_path):
    """In a process of its own, although JAX looks for them when values are made."""
    made = "values = jax.random.normal(jax.random.key(0), (8,))\n"
    (tmp_path / "my_steps.py").write_text(FACTORY + made)
    (tmp_path / "rules.toml").write_text("[[rules]]\npattern = '0/mu/.*'\n")
    command = ("explain", "rules.toml", "--step", "my_steps:make_step")
    unset = {"JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"}
    env = {k: v for k, v in os.environ.items() if k not in unset}
    root = str(pathlib.Path(oo.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", "from optax_offload.cli import main; main()", *command],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pinned_host" in ran.stdout
    assert ran.stderr == ""


def test_explain_names_codecs(invoke, tmp_path, checkpoint):
    """Beside the bytes of codes; a checkpoint without codes is not in a codec."""
    file = tmp_path / "rules.toml"
    file.write_text("[[rules]]\npattern = '.*/(mu|nu)/.*'\ncodec = 'int8'\n")
    text = invoke("explain", file, "--step", "my_steps:make_step").stdout
    assert re.search(r"0/mu/w/codes_int8 +16\.00 MiB +int8 +pinned_host +rule 0", text)
    args = ("explain", file, "--checkpoint", checkpoint, "--under", "opt_state/1")
    found = json.loads(invoke(*args, "--json").stdout)
    (mu,) = (x for x in found["leaves"] if x["path"] == "0/mu/w")
    assert (mu["codec"], mu["bytes"]) == ("", 131072)
    assert mu["why"].endswith("; not in int8 here")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("fit", "my_steps:stepp", "--target", "h100"),
            "my_steps has no function 'stepp'; it has make_step, broken, "
            "broken_otherwise, broken_in_the_step",
        ),
        (("fit", "my_steps:make_step", "--target", "h10"), "names no chip"),
        (
            ("fit", "no_steps:never_imported", "--target", "h100", "--budget", "70"),
            "--budget: '70' has no unit; write 70GiB (2**30 bytes), 70GB (10**9) or",
        ),
        (
            ("fit", "my_steps:make_step", "--target", "rtx3060", "--memory", "16GiB"),
            "16.00 GiB): each device of 'rtx3060' has",
        ),
        (
            ("fit", "my_steps:make_step", "--target", "h100", "--host-memory", "all"),
            "'all' is not a size; write it as 70GiB",
        ),
        (
            ("fit", "my_steps:make_step", "--target", "h100", "--allow", "int3"),
            "allow has 'int3'; each must be one of 'int8'",
        ),
        (
            ("fit", "my_steps:make_step", "--target", "h100", "--frozen", "w"),
            "frozen is 'w', which matches what the step replaces: 'w'. The step "
            "replaces all of its arguments but single arrays: nothing of it is frozen",
        ),
        (
            ("fit", "my_steps:make_step", "--target", "h100", "--set", "depth=3"),
            "is called with (offload, target, depth=3), but takes (offload, target, "
            "width=1024, optimizer='adam')",
        ),
        (
            ("fit", "my_steps:broken", "--target", "h100"),
            "error: my_steps.py, line 19: ValueError: mine",
        ),
        (
            ("explain", "RULES", "--step", "my_steps:broken_otherwise"),
            "error: my_steps.py, line 22: KeyError: 'params'",
        ),
        (
            ("fit", "my_steps:make_step", "--target", "h100", "--rules", "no.toml"),
            "no.toml",
        ),
        (("explain", "RULES"), "give either --step or --checkpoint"),
        (("explain", "no.toml", "--step", "my_steps:make_step"), "no.toml"),
        (
            ("explain", "RULES", "--checkpoint", "CHECKPOINT", "--under", "opt"),
            "the checkpoint has nothing under 'opt'; it has opt_state/1, params/b",
        ),
        (("report", "."), "is not an Orbax checkpoint: no _METADATA"),
    ],
)
def test_bad_input(invoke, args, message, checkpoint, rules):
    """A line that says what is wrong, no traceback, and an exit code of its own."""
    given = {"RULES": rules, "CHECKPOINT": checkpoint}
    result = invoke(*(given.get(a, a) for a in args), code=2)
    assert message in result.stderr.replace("\n", " ").replace("  ", " ")
    assert "Traceback" not in result.output
    assert "--traceback" in result.stderr


def given_plan(monkeypatch, prepare=lambda: None):
    """Puts a plan in the place of planning, which takes long."""
    compiled = _plan.CompiledCandidate(
        Variant(), 0, 5, None, True, 1.0, {"parameters": 5}
    )
    plan = oo.Plan(
        target=aot.Target("h100"),
        budget_bytes=10,
        config=oo.OffloadConfig([oo.Rule("0/mu/.*")]),
        moved=(),
        before=compiled,
        after=compiled,
        compiled=(compiled,),
        alternatives=Alternatives((), (), ()),
        environment={},
    )

    class Planner:
        """Finds it at once."""

        def __init__(self, *args):
            prepare()

        def run(self):
            """Has nothing to do."""

        def plan(self):
            """What is given."""
            return plan

    monkeypatch.setattr(_plan, "Planner", Planner)
    return plan


@pytest.mark.parametrize("option", ["--out", "--plot"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing/file", r"missing/file: the directory \S+missing does not.*mkdir -p"),
        (".", r"{option} \. is a directory; name a file in it, such as (rules|peak)\."),
        ("protected", r"{option} protected: you may not write this file. Name another"),
    ],
)
def test_where_to_write_is_checked_first(invoke, option, file, message, monkeypatch):
    """Compiling takes minutes: nothing is compiled for a file that cannot be made."""
    pytest.importorskip("matplotlib")
    pathlib.Path("protected").touch()
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: mode != os.W_OK or pathlib.Path(path).name != "protected",
    )
    given_plan(monkeypatch, lambda: pytest.fail("something is compiled"))
    args = ("fit", "my_steps:make_step", "--target", "h100", option, file)
    result = invoke(*args, code=2)
    error = " ".join(result.stderr.split())
    assert re.search(message.replace("{option}", option), error), error


def test_a_picture_needs_matplotlib(invoke, monkeypatch):
    """Said before anything is compiled."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    given_plan(monkeypatch, lambda: pytest.fail("something is compiled"))
    args = ("fit", "my_steps:make_step", "--target", "h100", "--plot", "my.png")
    error = " ".join(invoke(*args, code=2).stderr.split())
    assert "pip install 'optax-offload[plot]'" in error


@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_that_cannot_be_written_is_printed(invoke, as_json, monkeypatch):
    """The directory may go away, or the disk be full, while the step is compiled."""
    plan = given_plan(monkeypatch, lambda: pathlib.Path("my.toml").mkdir())
    args = ["fit", "my_steps:make_step", "--target", "h100", "--out", "my.toml"]
    result = invoke(*args, *(["--json"] if as_json else []), code=2)
    assert "my.toml" in result.stderr
    if as_json:
        assert json.loads(result.stdout) == json.loads(json.dumps(plan.as_dict()))
    else:
        assert "fits with the given rules" in result.stdout


def test_traceback(invoke):
    """On demand the error itself."""
    args = ("--traceback", "fit", "my_steps:broken", "--target", "h100")
    result = invoke(*args, code=1)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "mine"


def test_a_module_that_fails_is_not_a_missing_one(invoke, tmp_path):
    """What it imports and does not find is named."""
    (tmp_path / "failing.py").write_text("import not_there")
    result = invoke("fit", "failing:f", "--target", "h100", code=2)
    assert "No module named 'not_there'" in result.stderr


def test_measure_link_needs_a_device(invoke):
    """A CPU has no link."""
    args = ("fit", "my_steps:make_step", "--target", "h100", "--measure-link")
    result = invoke(*args, code=2)
    assert "measure_link needs an attached GPU or TPU" in result.stderr.replace(
        "\n", " "
    )


@pytest.mark.aot
def test_fit(invoke, tmp_path, monkeypatch):
    """From a budget to a rule file, a picture, tables and JSON."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    args = ["fit", "my_steps:make_step", "--target", "h100", "--budget", "241MiB"]
    args += ["--out", "my.toml", "--plot", "my.png", "--host-memory", "1GiB"]
    result = invoke(*args)
    assert result.stderr.count("tried: ") >= 3
    assert "fits with" in result.stdout
    assert "of 1.00 GiB" in result.stdout
    assert "memory, 1 leaf, 64.00 MiB of each device:\n  \\d+/mu/w\n" in result.stdout
    assert re.search(r"^ *-> ", result.stdout, re.MULTILINE), "the chosen way is marked"
    jitting = "oo.jit(train_step, donate_argnums=(0, 1), **config.step)"
    assert f"\n  step = {jitting}\n" in result.stdout
    assert f"jitted with: {jitting}." in (tmp_path / "my.toml").read_text()
    config = oo.load_config(tmp_path / "my.toml")
    assert [r.regex for r in config.rules] == [r"\d+/mu/w"]
    assert (tmp_path / "my.png").read_bytes().startswith(b"\x89PNG")
    again = invoke(*args, "--json")
    assert again.stderr.count("(cached)") == again.stderr.count("tried: ")
    found = json.loads(again.stdout)
    assert found["after"]["used_bytes"] <= found["budget_bytes"] == 241 * 2**20
    assert found["before"]["used_bytes"] > found["budget_bytes"]
    assert [r["pattern"] for r in found["rules"]] == [r"\d+/mu/w"]
    assert sum(found["after"]["parts"].values()) == found["after"]["used_bytes"]
    assert found["host_bytes"] == 64 * 2**20
    (chosen,) = (r for r in found["alternatives"]["rows"] if r["why"] == "chosen")
    assert chosen["step_seconds"] == found["after"]["time"]["seconds"]
    assert len(found["compiled"]) >= 3
    explained = invoke("explain", "my.toml", "--step", "my_steps:make_step")
    assert "pinned_host: 64.00 MiB" in explained.stdout


@pytest.mark.aot
def test_a_step_that_raises_when_it_is_traced(invoke):
    """The factory returns it, and the compiler calls it: one line all the same."""
    result = invoke("fit", "my_steps:broken_in_the_step", "--target", "h100", code=2)
    error = result.stderr.replace("\n", " ")
    assert "error: my_steps.py, line 26: ZeroDivisionError: division by zero" in error
    assert "Traceback" not in result.output


@pytest.mark.aot
def test_fit_needs_nothing_or_cannot(invoke):
    """It fits as it is: 0. It does not fit at all: 1, a table, and what would help."""
    args = ("fit", "my_steps:make_step", "--target", "h100", "--set", "optimizer=sgd")
    found = json.loads(invoke(*args, "--json").stdout)
    assert found["empty"]
    assert found["moved"] == []
    result = invoke(*args, "--budget", "9MiB", "--no-cache", code=1)
    error = " ".join(result.stderr.split())
    assert "does not fit on 'h100', whatever is moved" in error
    assert "nearest: " in error
    assert "What would help" in result.stderr
    assert "Traceback" not in result.output


@pytest.fixture
def ctrl_c():
    """Ctrl-C interrupts, also where the process began in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    terminated = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, terminated)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_what_is_found_before_an_interrupt_is_told(monkeypatch, sent):
    """At once, whatever the other thread does; and errors are the caller's.

    What is found is written then, whatever else is sent: `timeout` sends two signals.
    """
    before = signal.getsignal(signal.SIGTERM)
    started = threading.Event()

    def work():
        started.set()
        time.sleep(30)

    monkeypatch.setattr(
        threading.Thread,
        "join",
        lambda self, timeout: signal.raise_signal(sent),
    )
    assert interrupts.until_interrupted(work) is False
    monkeypatch.undo()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGTERM, before)
    assert interrupts.until_interrupted(lambda: None) is True
    with pytest.raises(ZeroDivisionError):
        interrupts.until_interrupted(lambda: 1 / 0)
    assert signal.getsignal(signal.SIGTERM) == before


def interrupted(monkeypatch, best, compiled):
    """Ctrl-C is pressed when so much was found; gives the code of the process."""
    plan = given_plan(monkeypatch)
    _plan.Planner.best, _plan.Planner.compiled = best, compiled
    _plan.Planner.alternatives = plan.alternatives
    monkeypatch.setattr(cli, "until_interrupted", lambda work: False)

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(cli, "leave", leave)


def test_ctrl_c_prints_the_best_found(invoke, monkeypatch):
    """And writes its file; where nothing fits, it says so."""
    args = ("fit", "my_steps:make_step", "--target", "h100", "--out", "my.toml")
    interrupted(monkeypatch, best=3, compiled=(3,))
    result = invoke(*args, code=130)
    assert "interrupted: this is the best way found" in result.stderr
    assert "wrote my.toml" in result.stdout
    interrupted(monkeypatch, best=None, compiled=(3,))
    result = invoke(*args, code=130)
    assert "interrupted: nothing compiled so far fits" in result.stderr


def test_a_missing_target_says_what_lists_them(invoke):
    """Before anything is loaded."""
    error = " ".join(invoke("fit", "no:such", code=2).stderr.split())
    assert "missing option --target" in error
    assert "`optax-offload targets` lists the chips" in error


def test_the_command_is_installed_by_this_name():
    """`optax-offload` is this module's `main`."""
    import tomllib

    root = pathlib.Path(__file__).parent.parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"optax-offload": "optax_offload.cli:main"}
    assert callable(cli.main)
    assert jax.config.jax_platforms == "cpu"

"""The command `optax-offload doctor`, and what it asks JAX."""

import json
import logging
import os
import pathlib
import re
import sys
import types

import jax
import pytest
from typer.testing import CliRunner

from optax_offload._machine import Saved, jax_view
from optax_offload.cli import command as cli

CAPTURED = pathlib.Path(__file__).parent / "captured"


@pytest.fixture
def doctor():
    """Runs the command, at a narrow terminal."""
    runner = CliRunner(env={"COLUMNS": "40"})

    def run(*args, code: int | None = 0):
        result = runner.invoke(cli.app, ["doctor", *map(str, args)])
        assert code in (None, result.exit_code), result.output
        return result

    return run


def test_this_machine(doctor, tmp_path):
    """Saved and read again it is the same machine, free memory too."""
    file = tmp_path / "machine.txt"
    printed = doctor("--save", file, code=None).stdout
    for topic in ("devices", "JAX", "host memory", "locked memory", "NUMA", "fit"):
        assert topic in printed
    assert f"jax {jax.__version__}" in printed
    assert ("no accelerator here" in printed) == ("no accelerator was" in printed)
    assert doctor("--machine", file, code=None).stdout == printed


@pytest.mark.parametrize("option", [[], ["--traceback"]])
def test_devices_are_for_doctor(option, monkeypatch):
    """Other commands leave them alone; it takes no more of them than it needs."""
    configured, name = [], "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setattr(jax.config, "update", lambda *args: configured.append(args))
    monkeypatch.setattr(cli, "app", lambda: None)
    monkeypatch.setenv(name, "true")
    monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["optax-offload", *option, "doctor"])
    cli.main()
    assert (configured, os.environ.pop(name)) == ([], "false")
    monkeypatch.setattr(sys, "argv", ["optax-offload", *option, "report", "doctor"])
    cli.main()
    assert configured == [("jax_platforms", "cpu")]
    assert name not in os.environ


def test_a_machine_that_gains_nothing(doctor):
    """An exit code for scripts; lines to paste are not wrapped."""
    printed = doctor("--machine", CAPTURED / "dgx_spark.txt", code=5).stdout
    assert "offloading gains nothing here, or doesn't work: see memories" in printed
    assert "$ export XLA_PYTHON_CLIENT_PREALLOCATE=false\n" in printed


def test_json(doctor):
    """The findings as values."""
    args = ("--machine", CAPTURED / "h100_two_nodes.txt", "--json")
    found = json.loads(doctor(*args).stdout)
    assert found["offload_helps"] is True
    numa = next(x for x in found["findings"] if x["topic"] == "NUMA")
    assert set(numa) == {"topic", "level", "seen", "means", "do", "sources"}
    assert len(numa["do"]) == 2


def test_what_looks_like_markup_is_printed(doctor):
    """An extra in brackets is part of the line to paste."""
    printed = doctor("--machine", CAPTURED / "docker_cgroup2_l4.txt").stdout
    assert 'pip install -U "jax[cuda12]"' in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rules]]\n", "this file describes no machine"),
        (None, "No such file"),
    ],
)
def test_no_machine(doctor, tmp_path, text, message):
    """A line, and the code of bad input."""
    file = tmp_path / "machine.txt"
    if text is not None:
        file.write_text(text)
    assert message in doctor("--machine", file, code=2).stderr


def test_bytes_that_are_no_text(doctor, tmp_path):
    """A file that is none is no traceback."""
    file = tmp_path / "machine.txt"
    file.write_bytes(b"\xff\xfe\x00")
    assert "this file describes no machine" in doctor("--machine", file, code=2).stderr


def test_a_place_that_cannot_be_written(doctor, tmp_path):
    """Says what makes it."""
    file = tmp_path / "none" / "machine.txt"
    result = doctor("--save", file, "--no-measure-link", code=2)
    assert f"mkdir -p {file.parent}" in result.stderr
    result = doctor("--save", tmp_path, "--no-measure-link", code=2)
    assert f"such as {tmp_path / 'machine.txt'}" in result.stderr
    saved = CAPTURED / "nothing.txt"
    result = doctor("--machine", saved, "--save", tmp_path / "x", code=2)
    assert "give either --machine" in result.stderr


def device(kind="NVIDIA L4", platform="gpu", coords=None):
    """A device as JAX has it."""
    memories = [types.SimpleNamespace(kind=k) for k in ("device", "pinned_host")]
    found = types.SimpleNamespace(
        device_kind=kind,
        platform=platform,
        addressable_memories=lambda: memories,
    )
    if coords is not None:
        found.coords = coords
    return found


@pytest.fixture
def devices(monkeypatch):
    """Gives JAX other devices: those of this process, and those of all."""

    def give(here, everywhere=None):
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # Nothing else is configured.
        monkeypatch.setattr(jax, "local_devices", lambda: here)
        monkeypatch.setattr(jax, "devices", lambda platform: everywhere or here)

    return give


NOTHING = Saved("== proc/version\n")


def test_the_link_is_measured(devices):
    """Of an accelerator; a CPU has none."""
    devices([device()])
    assert jax_view.look(NOTHING, lambda: 7e9).link_bytes_per_second == 7e9
    assert jax_view.look(NOTHING, None).link_bytes_per_second is None
    devices([device("cpu", "cpu")])
    assert jax_view.look(NOTHING, lambda: 7e9).link_bytes_per_second is None


def test_a_link_that_cannot_be_measured(devices):
    """Is a finding, not an error: that is what one wants to know."""

    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    devices([device()])
    found = jax_view.look(NOTHING, fail)
    assert found.link_error == "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    wsl = Saved("== proc/version\nLinux version 5.15-microsoft-standard-WSL2 (x)")
    assert jax_view.look(wsl, fail).link_error == "not under WSL2"


def test_a_slice_of_several_hosts(devices):
    """Its grid is that of all chips."""
    here = [device("TPU v5 lite", "tpu", (x, y, 0)) for x in (0, 1) for y in (0, 1)]
    other = [device("TPU v5 lite", "tpu", (x, y, 0)) for x in (0, 1) for y in (2, 3)]
    devices(here, [*here, *other])
    (found,) = jax_view.look(NOTHING, None).devices
    assert (found.count, found.grid) == (4, (2, 4, 1))


def test_plugins_that_fail(devices, monkeypatch):
    """Why JAX goes on without one is kept, and not printed."""
    logger = logging.getLogger("jax.anything")

    def local_devices():
        try:
            raise RuntimeError("Unable to load cuDNN. Is it installed?")
        except RuntimeError:
            logger.exception("Jax plugin configuration error")
        logger.warning("no exception at all")
        return [device("cpu", "cpu")]

    devices([])
    monkeypatch.setattr(jax, "local_devices", local_devices)
    found = jax_view.look(NOTHING, None)
    assert found.error == "RuntimeError: Unable to load cuDNN. Is it installed?"
    assert logging.getLogger("jax").propagate


def test_no_devices_at_all(devices, monkeypatch):
    """A plugin that finds its device in use raises."""

    def local_devices():
        raise RuntimeError("Unable to initialize backend 'tpu': in use")

    devices([])
    monkeypatch.setattr(jax, "local_devices", local_devices)
    found = jax_view.look(NOTHING, None)
    assert found.error == "RuntimeError: Unable to initialize backend 'tpu': in use"
    assert "jax" in found.versions


def test_a_view_is_read_again(devices):
    """As JSON, in a saved machine; what is no view says nothing."""
    devices([device()])
    found = jax_view.look(NOTHING, lambda: 7e9)
    assert jax_view.JaxView.from_json(found.as_json()) == found
    for text in ("", "{}", "[]", '{"versions": 1, "devices": [{}]}', "7"):
        assert jax_view.JaxView.from_json(text) == jax_view.JaxView()


def test_a_machine_without_accelerators_leaves_plugins_alone(monkeypatch):
    """They would fill the terminal; where one may know a device they are asked."""
    asked = []
    monkeypatch.setattr(jax.config, "update", lambda *args: asked.append(args))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    monkeypatch.setattr(jax, "devices", lambda platform: [device()])
    jax_view.look(NOTHING, None)
    assert asked == [("jax_platforms", "cpu")]
    jax_view.look(Saved((CAPTURED / "dgx_spark.txt").read_text()), None)
    monkeypatch.setattr(jax_view, "_versions", lambda: {"jax-metal": "0.1.1"})
    jax_view.look(NOTHING, None)
    assert len(asked) == 1


def test_the_page_shows_what_is_printed(doctor):
    """Its lines are those of a machine of the tests, however they are wrapped."""
    page = pathlib.Path(__file__).parent.parent.parent / "docs" / "doctor.md"
    (block,) = re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)
    printed = doctor("--machine", CAPTURED / "h100_two_nodes.txt").stdout
    printed = " ".join(printed.split())
    for finding in re.split(r"\n(?= *\w+  \w)", block):
        assert " ".join(finding.split()) in printed

"""`python -m optax_offload` is the command."""

import runpy
import sys

import pytest


def test_it_runs_the_command(monkeypatch, capsys):
    """With its arguments and its exit code."""
    monkeypatch.setattr(sys, "argv", ["optax_offload", "--version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("optax_offload", run_name="__main__")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("optax-offload ")


def test_without_the_extra_it_says_which(monkeypatch):
    """The line to paste, and no traceback."""
    for name in [x for x in sys.modules if x.startswith("optax_offload.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r'pip install "optax-offload\[cli\]"'):
        runpy.run_module("optax_offload", run_name="__main__")

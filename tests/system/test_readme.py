"""What the README shows runs."""

import pathlib
import re
import sys

import pytest
from typer.testing import CliRunner

import optax_offload as oo
from optax_offload.cli import command as cli

README = pathlib.Path(__file__).parent.parent.parent / "README.md"


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
def test_will_it_fit(capsys, monkeypatch):
    """The script compiles for both chips, and prints lines like those beside it."""
    pytest.importorskip("jax_plugins")
    pytest.importorskip("libtpu")
    section = README.read_text().split("## Will it fit?")[1].split("\n## ")[0]
    script, output = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)
    # Smaller, which compiles sooner.
    for large, small in {
        "layers=24, width=1024": "layers=1",
        "(16, 513)": "(4, 9)",
    }.items():
        assert large in script
        script = script.replace(large, small)
    monkeypatch.chdir(README.parent)
    exec(script, {})
    number = r"[\d.]+ (?:B|[KMG]iB)"
    printed = capsys.readouterr().out
    assert re.sub(number, "N", printed) == re.sub(number, "N", output)


def test_save_and_resume(tmp_path, monkeypatch):
    """The scripts of the two sections, one after the other."""
    pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("matplotlib")
    text = README.read_text()
    scripts = [
        re.findall(r"```python\n(.*?)```", part.split("\n## ")[0], re.DOTALL)[0]
        for part in re.split("## Save and resume|## Where everything is", text)[1:]
    ]
    script = "\n".join(scripts).replace("places.png", str(tmp_path / "places.png"))
    assert "Settings()" in script
    script = script.replace("Settings()", "Settings(layers=1, width=64)")
    monkeypatch.chdir(README.parent)
    exec(script, {"path": tmp_path / "state"})
    assert (tmp_path / "places.png").stat().st_size


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
def test_from_out_of_memory_to_a_rule_file(tmp_path, monkeypatch):
    """The factory is planned for by the command beside it, and the file is read."""
    pytest.importorskip("jax_plugins")
    section = README.read_text().split("## From out of memory")[1].split("\n## ")[0]
    (factory,) = re.findall(r"```python\n(# my_steps\.py.*?)```", section, re.DOTALL)
    (command,) = re.findall(r"```sh\noptax-offload (fit .*)\n```", section)
    (tmp_path / "my_steps.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    result = CliRunner().invoke(cli.app, command.split())
    assert result.exit_code == 0, result.output
    assert "fits with this plan" in result.stdout
    assert oo.load_config("my.toml").rules[0].regex == r"\d+/mu/w"
    for line in re.findall(r"^optax-offload (\w+)", section, re.MULTILINE):
        assert CliRunner().invoke(cli.app, [line, "--help"]).exit_code == 0

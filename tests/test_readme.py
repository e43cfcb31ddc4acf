"""What the README shows runs."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


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

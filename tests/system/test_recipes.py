"""Each recipe of docs/recipes.md runs by itself, as one who copies it runs it."""

import doctest
import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "recipes.md"
FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RECIPES = dict(
    re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
)


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs_alone(title, tmp_path, monkeypatch, capsys):
    """One program, with all of its imports, that prints what the page shows."""
    monkeypatch.chdir(tmp_path)
    blocks = FENCE.findall(RECIPES[title])
    assert [language for language, _ in blocks].count("python") == 1
    (_, program), *shown = blocks
    exec(compile(program, f"recipes.md, {title}", "exec"), {"__name__": "recipe"})
    printed = capsys.readouterr().out
    for _, expected in shown:
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(expected, printed, options), printed

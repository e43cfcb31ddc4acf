"""Finding a step factory by its name."""

import sys

import pytest

from optax_offload.cli.factory import load_factory


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A module in the current directory."""
    text = "def make(offload, target, width=1):\n    return width\nother = 3\n"
    (tmp_path / "a_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "a_module", raising=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("(1, 2)", (1, 2)), ("adam", "adam"), ("'3'", "3"), ("a=b", "a=b")],
)
def test_options_are_literals_or_text(text, value):
    """As Python writes them; else the text itself."""
    assert load_factory("a_module:make", [f"width={text}"])(None, None) == value


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "a_module",
            (),
            "'a_module' does not name a step factory; write package.module:function",
        ),
        ("b_module:make", (), "no module 'b_module' in .*set PYTHONPATH$"),
        ("a_module.py:make", (), "set PYTHONPATH. Write a_module:make$"),
        ("a_module:other", (), "a_module has no function 'other'; it has make$"),
        ("a_module:make", ["width"], "--set 'width': write name=value"),
        ("a_module:make", ["a-b=1"], "--set 'a-b=1': write name=value"),
        (
            "a_module:make",
            ["depth=1"],
            r"called with \(offload, target, depth=1\), but",
        ),
    ],
)
def test_names_and_options_that_are_none(name, options, message):
    """What was given, and what to write."""
    with pytest.raises(ValueError, match=message):
        load_factory(name, options)

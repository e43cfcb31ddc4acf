"""Errors as one line."""

import pytest

import optax_offload as oo
from optax_offload.cli.errors import error_line


def line_for(function):
    """What is printed of what a function raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any type
        function()
    # The frames of this file are no part of what a command calls.
    assert caught.tb.tb_next is not None
    return error_line(caught.value.with_traceback(caught.tb.tb_next.tb_next))


def script(tmp_path, text):
    """A function that runs a file's text as that file."""
    file = tmp_path / "theirs.py"
    file.write_text(text)
    code = compile(text, str(file), "exec")
    return lambda: exec(code, {"oo": oo})


def test_an_error_of_the_library_is_its_message(tmp_path):
    """Wherever it was called from: it says all."""
    found = line_for(script(tmp_path, "\noo.Rule('(')"))
    assert found.startswith("pattern '('")
    assert "theirs.py" not in found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\nraise ValueError('mine')", "theirs.py, line 2: ValueError: mine"),
        ("{}['a']", "theirs.py, line 1: KeyError: 'a'"),
        ("raise KeyError", "theirs.py, line 1: KeyError"),
        ("raise RuntimeError('a\\nb')", "theirs.py, line 1: RuntimeError: a"),
        ("import json\njson.loads('(')", "theirs.py, line 2: JSONDecodeError: Expect"),
    ],
)
def test_an_error_of_the_users(tmp_path, text, line, monkeypatch):
    """Its type, its first line, and the last place in files of theirs."""
    monkeypatch.chdir(tmp_path)
    found = line_for(script(tmp_path, text))
    assert found.startswith(line)
    assert "\n" not in found


def test_files_elsewhere_are_named_in_full(tmp_path):
    """Those that are not under the current directory."""
    found = line_for(script(tmp_path, "1 / 0"))
    assert found.startswith(f"{tmp_path / 'theirs.py'}, line 1: ZeroDivisionError")


def test_an_error_of_neither():
    """An unknown one has its type beside the message."""
    assert error_line(KeyError("a")) == "KeyError: 'a'"
    assert error_line(OSError("no space")) == "no space"

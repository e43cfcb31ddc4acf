"""What docs/host-update.md says that compilers do is what they do."""

import pathlib
import re

import pytest

import optax_offload as oo
from optax_offload import aot

PAGE = pathlib.Path(oo.__file__).parent.parent / "docs" / "host-update.md"


def test_reproductions_are_short():
    """At most twenty lines each, so that a bug report can hold one."""
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    assert all(len(block.splitlines()) <= 20 for block in blocks)


@pytest.mark.aot
@pytest.mark.slow
def test_what_compilers_do():
    """The page's blocks run, in order and in one namespace, with their assertions."""
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
    assert namespace["aot"] is aot

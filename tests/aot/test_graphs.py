"""What an XLA:GPU program does with the copies of a loop's turn: finding F79.

A test that fails has found a compiler that does otherwise.
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from benchmarks.chip import overlap
from optax_offload import aot
from optax_offload._ground import compat

ROOT = pathlib.Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.aot, pytest.mark.slow]


def compiled(form, options):
    """All pieces in one turn, for an H200."""
    target = aot.Target("h200")
    place = jax.NamedSharding(target.mesh(), jax.P())
    form = overlap.FORMS[form]
    return aot.compile(
        overlap.jitted(form, overlap.PIECES),
        *overlap.arguments(form, overlap.WIDTH, place),
        target=target,
        compiler_options=overlap.OPTIONS[options],
    )


@pytest.mark.parametrize("form", overlap.FORMS)
def test_copies_start_before_the_product_and_end_after_it(form):
    """One each way, by copy engines: the compiler's schedule has all side by side."""
    program = compiled(form, "as compiled")
    moves = aot.transfers(program)
    assert sorted(m.direction for m in moves) == ["load", "store"]
    assert all(m.by == "copy engine" and m.asynchronous for m in moves)
    bodies = (program.as_text() or "").split("\n\n")
    (body,) = (text for text in bodies if "-start" in text)
    names = " ".join(re.findall(r"%(\S+) = ", body))
    order = re.findall("start|done|dot_general", names)
    assert order == ["start", "start", "dot_general", "done", "done"]


# Whether the commands of the graph with the copies are a chain; None without a graph.
IN_TURN = {
    "slices, as compiled": not compat.GRAPHS_OVERLAP,
    "slices, copies outside of graphs": None,
    "slices, no graphs": None,
    "slices, unordered graphs": False,
    "whole leaves, as compiled": None,
}


@pytest.mark.parametrize("name", IN_TURN)
def test_graphs(name):
    """As the compiler logs them when it makes them."""
    form, options = name.split(", ")
    logged = {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "command_executor=3",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "aot"))),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import test_graphs; test_graphs.compiled({form!r}, {options!r})",
        ],
        env={**os.environ, **logged},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pattern = r"Execution graph: ExecutionGraph: (\d+) nodes.* is_sequential=(\w+)"
    # That of a copy alone has one.
    found = [way for n, way in re.findall(pattern, done.stderr) if int(n) > 1]
    in_turn = IN_TURN[name]
    assert found == ([] if in_turn is None else [str(in_turn).lower()])

"""optax's own tests, which its wheel has, with all of its optimizers offloaded."""

import json
import os
import pathlib
import subprocess
import sys

import optax
import pytest
from harness import of_processes

TESTS = pathlib.Path(__file__).parent.parent
OPTAX = pathlib.Path(optax.__file__).resolve().parent
FILES = (
    *(f"_src/{name}_test.py" for name in ("alias", "base", "factorized")),
    *(f"_src/{name}_test.py" for name in ("lookahead", "sharding", "transform")),
    *(f"contrib/_{name}_test.py" for name in ("common", "sam", "schedule_free")),
    "experimental/_aggregating_test.py",
    "schedules/_inject_test.py",
    "transforms",
)
# Clipping has no state: its update is the plain one (`tests/step/test_offload.py`).
LEFT_OUT = "transforms/_clipping_test.py"
# docs/limits.md says why, and what to write instead.
READS_STATE = "computes with state outside of update"
PYTHON_NUMBER = "branches in Python on a number among the extra arguments"
AGGREGATOR = "asks whether the optimizer is an Aggregator"
FAIL = {
    "_src/transform_test.py::TransformTest::test_lion_modes_variants": READS_STATE,
    "contrib/_schedule_free_test.py::ScheduleFreeTest::test_learning_rate_zero": (
        READS_STATE
    ),
    "transforms/_combining_test.py::ExtraArgsTest::test_extra_args": PYTHON_NUMBER,
    "transforms/_combining_test.py::PartitionTest::test_extra_args": PYTHON_NUMBER,
    **{
        f"experimental/_aggregating_test.py::AggregatorsTest::{test}": AGGREGATOR
        for test in (
            "test_aggregation_and_accumulation_match_standard",
            "test_mean_variance_ema_match_standard0",
        )
    },
}


def outcomes(tmp_path, *options, tests=FILES):
    """How optax's tests end, by name, and what was wrapped."""
    environment = os.environ | of_processes()
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "lib")]),
    }
    told = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "pytest", "-p", "wrap_optax", "-q"]
    command += ["-p", "no:cacheprovider", f"--rootdir={OPTAX}", "--cases=1"]
    command += [f"--ignore={OPTAX / LEFT_OUT}"]
    command += [f"--outcomes={told}", *options, *(OPTAX / test for test in tests)]
    # Half a minute each.
    command += ["-k", "not mixed_precision", "-c", tmp_path / "pytest.ini"]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(told.read_text())
    return found["outcomes"], found["counts"], done.stdout


@pytest.mark.slow
def test_what_passes_plain_passes_offloaded(tmp_path):
    """But for those that must fail, which do."""
    ours, counts, output = outcomes(tmp_path)
    rest = {test for test, outcome in ours.items() if outcome != "passed"}
    plain, _, _ = outcomes(tmp_path, "--plain", tests=sorted(rest))
    assert plain.keys() == rest
    failed = {test for test in rest if plain[test] == "passed"}
    assert failed == FAIL.keys(), output
    # Not because nothing was offloaded.
    assert len(ours) - len(rest) > 180
    assert counts["factories"] > 120
    assert counts["wrapped"] > 340
    assert counts["leaves"] > counts["updates"] > 200

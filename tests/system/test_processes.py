"""Two processes, killed, and resumed on as many or fewer, on other devices too."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import harness
import pytest

pytest.importorskip("orbax.checkpoint")

TESTS = pathlib.Path(__file__).parent.parent / "lib"
STEPS = 6
PARAMETER_BYTES = 4 * (128 * 256 + 256 + 256 * 128 + 128)
LAYERS = 4


def start(directory, *, processes, devices, ways=()):
    """Starts a run, with so many devices in each process."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    environment = os.environ | harness.of_processes()
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(TESTS.parent),
        "XLA_FLAGS": harness.xla_flags(devices),
    }
    command = [sys.executable, TESTS / "train_processes.py", directory]
    command += [f"--coordinator=localhost:{port}", f"--processes={processes}"]
    command += [f"--steps={STEPS}"]
    command += ["--ways", *ways]
    running = []
    for i in range(processes):
        with errors_of(directory, i).open("w") as errors:
            running.append(
                subprocess.Popen(
                    [*command, f"--process={i}"],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
    return running


def errors_of(directory, process):
    """The file with what a process writes on stderr."""
    return directory.parent / f"{directory.name}.{process}.txt"


def losses(lines):
    """The losses that were printed, by step."""
    return {
        int(step): float.fromhex(loss)
        for step, loss in re.findall(r"^step (\d+) (\S+)$", "".join(lines), re.M)
    }


def finish(directory, *, ways=(), **kwargs):
    """Runs to the end: where each way began, and its losses, alike in all processes."""
    running = start(directory, ways=ways, **kwargs)
    outputs = [process.communicate(timeout=300)[0] for process in running]
    for i, process in enumerate(running):
        assert process.returncode == 0, errors_of(directory, i).read_text()
    of_ways = zip(
        *(re.split(r"^way .*$", o, flags=re.M)[1:] for o in outputs), strict=True
    )
    return [
        of_way(way, texts, kwargs["devices"])
        for way, texts in zip(ways or [""], of_ways, strict=True)
    ]


def of_way(way, texts, devices):
    """Where a way began, and its losses, from what each process printed of it."""
    found = [losses(text) for text in texts]
    assert all(x == found[0] for x in found)
    host_bytes = [int(x) for t in texts for x in re.findall(r"host bytes (\d+)", t)]
    nbytes = PARAMETER_BYTES * (LAYERS if way else 1)
    copies = 3 if way == "at_rest" else 2
    assert host_bytes == [copies * nbytes // len(texts)] * len(texts)
    # On each device.
    gone = [int(x) for t in texts for x in re.findall(r"fused bytes (\d+)", t)]
    fused = way not in ("", "plain")
    assert gone == [nbytes // (devices * len(texts))] * (len(texts) if fused else 0)
    return int(re.findall(r"^from (\d+)$", texts[0], re.M)[0]), found[0]


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    """Both killed in the fifth step, after saving in the fourth.

    On two processes the losses are those of an uninterrupted run, bit for bit. On one
    the sums over devices are added up in another order (by XLA's own all-reduce and
    not by gloo's; over two devices in halves), which costs the last places.
    """
    ((first, want),) = finish(tmp_path / "whole", processes=2, devices=2)
    assert (first, list(want)) == (0, [1, 2, 3, 4, 5, 6])
    running = start(tmp_path / "killed", processes=2, devices=2)
    lines = []
    for line in running[0].stdout:
        lines.append(line)
        if line.startswith("step 5"):
            break
    for process in running:
        process.send_signal(signal.SIGKILL)
    for process in running:
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert losses(lines) == {step: want[step] for step in range(1, 6)}
    for name in ("one", "fewer"):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
    rest = {step: want[step] for step in (5, 6)}
    assert finish(tmp_path / "killed", processes=2, devices=2) == [(4, rest)]
    for name, devices in (("one", 4), ("fewer", 2)):
        ((first, got),) = finish(tmp_path / name, processes=1, devices=devices)
        assert first == 4
        assert got == pytest.approx(rest, rel=1e-6)


@pytest.mark.slow
def test_fused(tmp_path):
    """With the updates in the backward pass, after clipping, and without.

    The gradients of every process wait in its own host memory, or the backward passes
    of all run twice; or its parameters and residuals rest there too.
    """
    ways = ["plain", "host", "recompute", "at_rest"]
    ((_, want),) = finish(tmp_path / "one", processes=1, devices=4, ways=ways[:1])
    for first, got in finish(tmp_path / "two", processes=2, devices=2, ways=ways):
        assert first == 0
        assert got == pytest.approx(want, rel=1e-6)

"""Faults, real ones: nothing lost, a clear error, or the right result."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scanned_models import BATCH, make_params, make_step

import optax_offload as oo

ocp = pytest.importorskip("orbax.checkpoint")
resume = pytest.importorskip("resume")  # the example, which needs Flax

ROOT = pathlib.Path(__file__).parent.parent.parent
STEPS = 8
SMALL = ["--layers=1", "--width=64", "--context=16", "--batch=4", "--log_every=1"]


def start(directory, *flags, steps=STEPS):
    """Starts the example that resumes; it saves every two steps."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, ROOT / "examples" / "resume.py", *SMALL, *flags]
    command += [f"--steps={steps}", "--save_every=2"]
    return subprocess.Popen(
        command,
        cwd=directory,
        env=os.environ | harness.of_processes() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(directory, *flags, steps=STEPS):
    """Runs the program to its end."""
    process = start(directory, *flags, steps=steps)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def losses(output):
    """Of the steps, and at the end the held-out one, as printed."""
    return re.findall(r"^(?:step +\d+ +|held-out )loss .*$", output, re.M)


def kill(process):
    """Kills the program as the system would."""
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def checkpoints(directory):
    """The steps that have a checkpoint."""
    names = os.listdir(directory / "out/checkpoints")
    return sorted(int(name) for name in names if name.isdecimal())


def unfinished(directory):
    """The checkpoints that were being written."""
    return list((directory / "out/checkpoints").glob("*.orbax-checkpoint-tmp*"))


def final_state(directory):
    """The leaves of the last checkpoint, as they are on disk."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        state = checkpointer.restore(
            directory / f"out/checkpoints/{STEPS}/default",
            restore_args=jax.tree.map(
                lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
                checkpointer.metadata(
                    directory / f"out/checkpoints/{STEPS}/default"
                ).item_metadata.tree,
            ),
        )
    return harness.bits(state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its directory, and its losses."""
    directory = tmp_path_factory.mktemp("whole")
    status, output, errors = finish(directory)
    assert status == 0, errors
    assert len(losses(output)) == STEPS + 1
    return directory, losses(output)


@pytest.mark.slow
@pytest.mark.xdist_group("faults")
def test_killed_in_a_step_and_in_a_save(whole, tmp_path):
    """The next run goes on from what was saved last, to the same losses and state."""
    directory, want = whole
    process = start(tmp_path)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step     3"):
            break
    kill(process)
    assert checkpoints(tmp_path) == [2]

    for _ in range(3):  # the save may be done before the signal arrives
        process = start(tmp_path)
        while not unfinished(tmp_path) and process.poll() is None:
            time.sleep(0.001)
        kill(process)
        if unfinished(tmp_path):
            break
    else:
        pytest.fail("never killed in a save")
    saved = checkpoints(tmp_path)

    status, output, errors = finish(tmp_path)
    assert status == 0, errors
    assert output.startswith(f"at step {saved[-1]}\n")
    assert losses(output) == want[saved[-1] :]
    assert not unfinished(tmp_path)
    assert final_state(tmp_path) == final_state(directory)


def damage_byte(file):
    """Turns one bit of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_length(file):
    """Cuts a file's last byte off."""
    file.write_bytes(file.read_bytes()[:-1])


def largest(directory):
    """The largest file under a directory."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


@pytest.mark.slow
@pytest.mark.xdist_group("faults")
def test_damaged(whole, tmp_path):
    """The file is named, with the line that lets the run go on from the one before."""
    directory, want = whole
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    file = largest(tmp_path / f"out/checkpoints/{STEPS}")
    damage_byte(file)
    status, output, errors = finish(tmp_path)
    assert status
    assert not losses(output)
    assert f"RuntimeError: damaged since it was saved: {file}. " in errors
    line = re.findall(r"go on from the checkpoint before.*: (rm -r .*)$", errors, re.M)
    subprocess.run(line[-1], shell=True, check=True)
    status, output, errors = finish(tmp_path)
    assert status == 0, errors
    assert output.startswith(f"at step {STEPS - 2}\n")
    assert losses(output) == want[STEPS - 2 :]


@pytest.mark.parametrize("damage", [damage_byte, damage_length, pathlib.Path.unlink])
def test_digests(damage, tmp_path):
    """Any change, in any file; none is none."""
    for name, text in {"a": "12", "deep/b  c": "3456"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    resume.check_digests(tmp_path)
    resume.write_digests(tmp_path)
    resume.check_digests(tmp_path)
    damage(tmp_path / "deep/b  c")
    with pytest.raises(RuntimeError, match=r"saved: .*/deep/b  c\. To go on"):
        resume.check_digests(tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("faults")
def test_other_shapes(whole, tmp_path):
    """Both shapes are named, and the checkpoint is as it was."""
    directory, _ = whole
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    status, output, errors = finish(tmp_path, "--width=32")
    assert status
    assert not losses(output)
    assert re.search(r"Requested shape: .* is not compatible with the stored", errors)
    assert checkpoints(tmp_path) == checkpoints(directory)
    assert final_state(tmp_path) == final_state(directory)


def test_orbax_does_not_see_changed_numbers(tmp_path):
    """Nor does tensorstore: that is why the example writes digests.

    If this fails, one of them has begun to: say so in docs/checkpoints.md.
    """
    state = {"w": jax.random.normal(jax.random.key(0), (256, 128))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    damage_byte(largest(tmp_path / "state"))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", state)
    assert harness.bits(restored) != harness.bits(state)


RULES = oo.Rule(r".*/(mu|nu)/.*", min_bytes=8)


def by_device_put(state):
    """Moves with a memory space."""
    return jax.device_put(state, jax.memory.Space.Device)


def by_set_memory_kind(state):
    """Moves with the library."""
    return oo.set_memory_kind(state, ".*", "device")


def by_named_out_shardings(state):
    """Moves as a step's out_shardings on a mesh do."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = jax.NamedSharding(mesh, jax.P())
    return jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=shardings)(state)


def by_out_shardings_on_a_device(state):
    """Moves as a step's out_shardings on one device do."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=sharding)(state)


@pytest.mark.parametrize(
    "move",
    [
        by_device_put,
        by_set_memory_kind,
        by_named_out_shardings,
        # JAX goes on to call these host values when it traces (F28).
        by_out_shardings_on_a_device,
    ],
)
@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kinds_changed_behind_our_back(move, jitted):
    """Leaves are named; the update raises, or warns, is exact, and puts them back."""
    params = harness.make_params()
    tx = oo.offload(optax.adam(1e-2), RULES, on_misplaced="move")
    strict = oo.offload(optax.adam(1e-2), RULES)
    (_, state, _), *_ = harness.run_updates(tx, params, tx.init(params), steps=1)[0]
    want = harness.bits(jax.jit(tx.update)(params, state, params))
    moved = move(state)
    with pytest.raises(oo.MemoryKindError) as error:
        oo.memory_report(moved, RULES).check()
    for path in ("0/mu/embed/embedding", "0/nu/layers_9/bias"):
        assert f"  {path}: planned pinned_host, is device" in str(error.value)
    message = "came to update on the device: '0/mu/"
    update = jax.jit(strict.update) if jitted else strict.update
    with pytest.raises(oo.MemoryKindError, match=message):
        update(params, moved, params)
    update = jax.jit(tx.update) if jitted else tx.update
    with pytest.warns(oo.OffloadWarning, match=message) as told:
        got = update(params, moved, params)
    assert len(told) == 1
    assert harness.bits(got) == want
    oo.memory_report(got[1], RULES).check()


@pytest.mark.parametrize("fused", [True, False])
def test_out_shardings_on_a_device(fused):
    """The second step of a trainer that names no kinds raises, fused or not."""
    params = make_params()
    tx = oo.offload(optax.adam(1e-2), harness.EVERYTHING)
    step = oo.stream(make_step(tx)) if fused else make_step(tx)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = jax.jit(step, out_shardings=device)
    params, state, _ = step(params, tx.init(params), BATCH)
    with pytest.raises(oo.MemoryKindError, match=r"(?s)'0/mu/.*state_shardings"):
        step(params, state, BATCH)

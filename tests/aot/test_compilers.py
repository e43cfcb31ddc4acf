"""Loading the compilers: every chip, missing wheels, a process that does not notice."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from small_programs import BOTH, descend, struct

from optax_offload import aot
from optax_offload._ground.units import MIB
from optax_offload.aot import compilers


def test_missing_libtpu(monkeypatch):
    """Without libtpu the error is the line that installs the version JAX asks for."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'v5e:8x16' needs the wheel libtpu") as e:
        _ = aot.Target("v5e:8x16").devices
    assert 'pip install "optax-offload[aot]"' in str(e.value)
    assert "pip install 'libtpu==" in str(e.value)
    assert f"jax {jax.__version__} asks for" in str(e.value)


def test_missing_cuda_plugin(monkeypatch):
    """Without the CUDA plugin the error is the line that installs JAX's version."""
    monkeypatch.setattr(compilers, "_load_cuda_plugin", lambda: None)
    with pytest.raises(ImportError, match=r"'h100' needs the wheel jax-cuda13") as e:
        _ = aot.Target("h100", memory_bytes=3 * 2**30).devices
    assert 'pip install "optax-offload[aot]"' in str(e.value)
    assert f"pip install 'jax-cuda13-plugin<={jax.__version__}" in str(e.value)


@pytest.mark.aot
@pytest.mark.parametrize("name", [*aot.CHIPS, "h100:16", "v5e:4x4"])
def test_every_chip(name):
    """There is a compiler for every chip, and for several hosts of it."""
    target = aot.Target(name)
    assert len(target.devices) == target.device_count
    compiled = aot.compile(jnp.tanh, struct((1024, 1024)), target=target)
    usage = aot.peak(compiled)
    assert (usage.argument_bytes, usage.output_bytes) == (4 * MIB, 4 * MIB)


@pytest.mark.aot
def test_unknown_slice():
    """A grid that libtpu does not know is an error with libtpu's reason."""
    with pytest.raises(ValueError, match=r"cannot describe.*'v5e:3x3'.*not divisible"):
        _ = aot.Target("v5e:3x3").devices


_WITHOUT_CUDA = """
import jax, jax.numpy as jnp
from optax_offload import aot

x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
compiled = aot.compile(lambda x: jnp.exp(x @ x), x, target=aot.Target("h100"))
print(aot.peak(compiled).argument_bytes)
"""


@pytest.mark.aot
def test_a_machine_needs_no_cuda():
    """Neither its assembler, which is not called, nor its functions of mathematics.

    Its folders are empty for the process, and none of its programs is in the path.
    """
    hidden = "for d in /usr/local/cuda*/; do mount -t tmpfs none $d; done"
    command = f'{hidden}; PATH=/usr/bin:/bin exec "$0" -c "$1"'
    own = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of its own here, in which folders could be hidden")
    run = subprocess.run(
        [*own, "sh", "-c", command, sys.executable, _WITHOUT_CUDA],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.split() == ["262144"], run.stderr[-2000:]


def test_missing_libdevice():
    """Without it the error is the line that installs it."""
    found = compilers.missing_libdevice("INTERNAL: libdevice not found at ./x.bc")
    assert "pip install nvidia-nvvm" in str(found)
    assert compilers.missing_libdevice("INTERNAL: something else") is None


@pytest.mark.aot
@pytest.mark.skipif(not shutil.which("ptxas"), reason="needs CUDA's assembler")
def test_the_program_is_that_of_a_run():
    """Whoever asks for it has machine code too, and nothing else changes."""

    def compiled(**options):
        return aot.compile(
            lambda x: jnp.exp(x @ x),
            struct((256, 256)),
            target=aot.Target("h100"),
            compiler_options=options,
        )

    as_it_runs = compiled(
        xla_gpu_cuda_data_dir="/usr/local/cuda",
        xla_backend_optimization_level=3,
        xla_llvm_disable_expensive_passes=False,
    )
    assert compiled().as_text() == as_it_runs.as_text()


_FRESH_PROCESS = """
import json, os, signal
from pathlib import Path
import jax, jax.numpy as jnp
import optax_offload
from optax_offload import aot

def mapped():
    maps = Path("/proc/self/maps").read_text()
    return [so for so in ("libtpu.so", "xla_cuda_plugin.so") if so in maps]

def signals():
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("SigIgn", "SigCgt"))]

signal.signal(signal.SIGHUP, signal.SIG_DFL)
loaded_by_import, env, handlers = mapped(), dict(os.environ), signals()
for name in ("v5e", "h100"):
    aot.compile(jnp.tanh, jax.ShapeDtypeStruct((8, 128), jnp.float32),
                target=aot.Target(name))
cached = os.listdir(env["JAX_COMPILATION_CACHE_DIR"])
loaded = mapped()
# Both are errors once a backend is initialised.
jax.config.update("jax_num_cpu_devices", 3)
jax.config.update("jax_platforms", "cpu")
print(json.dumps({
    "loaded by import": loaded_by_import,
    "loaded": loaded,
    "environment": {k: v for k, v in os.environ.items() if env.get(k) != v},
    "removed": sorted(set(env) - set(os.environ)),
    "signals": signals() == handlers,
    "cached": cached,
    "devices": [d.platform for d in jax.devices()],
    "sum": float(jnp.arange(4.0).sum()),
    "cached by the process": len(os.listdir(env["JAX_COMPILATION_CACHE_DIR"])) > 0,
}))
"""


@pytest.mark.aot
def test_process_does_not_notice(tmp_path):
    """A process that has not touched its backend finds everything as it was.

    It runs beside this one, which has libtpu loaded too.
    """
    assert aot.Target("v5e").devices
    ours = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "LIBTPU_INIT_ARGS": "",
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FRESH_PROCESS],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == {
        "loaded by import": [],
        "loaded": ["libtpu.so", "xla_cuda_plugin.so"],
        "environment": {},
        "removed": [],
        "signals": True,
        "cached": [],
        "devices": ["cpu", "cpu", "cpu"],
        "sum": 6.0,
        "cached by the process": True,
    }


@pytest.mark.aot
@BOTH
def test_initialised_backend_stays(name):
    """A backend that is there before is the same after, and still the default."""
    devices, x = jax.devices(), jnp.arange(4.0)
    aot.compile(descend, x, target=aot.Target(name))
    assert jax.devices() == devices
    assert jnp.sum(x).devices() == {devices[0]}

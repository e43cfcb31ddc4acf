"""Texts of machines as values, and texts that are none."""

import math
import os
import sys

import pytest

from optax_offload._machine import Here, Saved, parse, texts
from optax_offload._machine.accelerators import accelerators


@pytest.mark.parametrize(
    ("kernel", "is_wsl"),
    [
        ("5.15.167.4-microsoft-standard-WSL2 (root@f9c8)", True),
        ("5.10.16.3-Microsoft-standard-WSL2 (oe-user@oe-host)", True),
        ("6.8.0-1021-azure (buildd@host) (x86_64-linux-gnu-gcc-13)", False),
        ("6.6.57.1-7.azl3 (root@CBL-Mariner, by microsoft)", False),
    ],
)
def test_wsl(kernel, is_wsl):
    """By the kernel's own name, not by who built it."""
    assert parse.is_wsl(f"Linux version {kernel}") is is_wsl


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("Max locked memory         unlimited            unlimited    bytes", math.inf),
        ("Max locked memory         67108864             unlimited    bytes", 67108864),
        ("Max open files            20000                20000        files", None),
    ],
)
def test_locked_memory(line, found):
    """The soft limit counts."""
    assert parse.locked_bytes(f"Limit  Soft Limit\n{line} \n") == found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("", set()),
        ("7", {7}),
        ("-1", set()),
        ("a-b", set()),
    ],
)
def test_number_sets(text, numbers):
    """Lists of the kernel; what is none has no numbers."""
    assert parse.number_set(text) == numbers


def test_a_range_without_end():
    """Nobody's machine has so many processors; memory is not filled with them."""
    assert parse.number_set("0-99999999999,3") == {3}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Re",
            "580.95.05",
        ),
        ("NVRM version: none", ""),
    ],
)
def test_driver_versions(text, version):
    """Of both kinds of kernel modules."""
    assert parse.driver_version(text) == version


def test_nvidia_smi():
    """Long addresses, memory that is not there, lines that are none."""
    text = (
        "0000000F:01:00.0, NVIDIA GB10, [N/A], 580.95.05\n"
        "Failed to initialize NVML: Driver/library version mismatch\n"
        "0000:19:00.0, NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15\n"
    )
    assert parse.smi_rows(text) == [
        parse.SmiRow("000f:01:00.0", "NVIDIA GB10", None, "580.95.05"),
        parse.SmiRow(
            "0000:19:00.0", "NVIDIA H100 80GB HBM3", 81559 * 2**20, "570.86.15"
        ),
    ]


@pytest.mark.parametrize(
    ("speed", "width", "most", "gb_per_second"),
    [
        ("32.0 GT/s PCIe", "16", "16", 63.0),
        ("16.0 GT/s PCIe", "8", "16", 15.8),
        ("8 GT/s", "16", "16", 15.8),
        ("5.0 GT/s PCIe", "16", "16", 8.0),
    ],
)
def test_slots(speed, width, most, gb_per_second):
    """What is left of the transfers after their encoding."""
    files = {
        "max_link_speed": speed,
        "current_link_width": width,
        "max_link_width": most,
    }
    found = parse.slot(files)
    assert found is not None
    assert found.bytes_per_second / 1e9 == pytest.approx(gb_per_second, abs=0.05)
    assert (found.lanes, found.most_lanes) == (int(width), int(most))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {
            "max_link_speed": "Unknown",
            "current_link_width": "16",
            "max_link_width": "16",
        },
        {
            "max_link_speed": "8 GT/s",
            "current_link_width": "0",
            "max_link_width": "255",
        },
    ],
)
def test_no_slot(files):
    """A device on the chip, and virtual ones."""
    assert parse.slot(files) is None


def test_amd_without_a_name():
    """Its instructions name it, of which two digits are hexadecimal."""
    text = "simd_count 440\ngfx_target_version 90010\ndevice_id 1\nlocation_id 17152\n"
    machine = Saved(f"== sys/class/kfd/kfd/topology/nodes/1/properties\n{text}")
    (found,) = accelerators(machine)
    assert (found.name, found.address) == ("AMD GPU gfx90a", "0000:43:00.0")


def test_amd_names_itself():
    """As the driver of a server's card does."""
    text = "simd_count 440\ngfx_target_version 90010\nlocation_id 17152\ndomain 1\n"
    machine = Saved(
        f"== sys/class/kfd/kfd/topology/nodes/1/properties\n{text}"
        "== sys/bus/pci/devices/0001:43:00.0/product_name\nAMD Instinct MI250X\n"
    )
    assert accelerators(machine)[0].name == "AMD Instinct MI250X"


def test_saved_needs_a_section():
    """Another file says what is wanted."""
    with pytest.raises(
        ValueError, match=r"this file describes no machine.*--save FILE"
    ):
        Saved("[[rules]]\n")


def test_commands(monkeypatch):
    """What fails, or is not there, prints nothing; what prints is kept."""
    here = Here()
    assert here.output("no-such-command") == ""
    monkeypatch.setattr(texts, "_COMMAND_SECONDS", 0.01)
    assert here.output("sleep 5") == ""
    monkeypatch.undo()
    assert here.output(f"{sys.executable} -c 1/0") == ""
    assert here.output("sysctl machdep.cpu.brand_string") == ""
    assert here.output(f"{sys.executable} -c print(7)").strip() == "7"
    assert list(here.seen) == [f"$ {sys.executable} -c print(7)"]


def test_the_environment_is_jaxs(monkeypatch):
    """Nothing else of it is read, or saved."""
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SECRET_TOKEN", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1\n--xla_b=2")
    here = Here()
    assert here.environment() == {
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "200",
        "XLA_FLAGS": "--xla_a=1 --xla_b=2",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert "SECRET" not in here.saved()

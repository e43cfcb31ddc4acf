"""The accelerators of a machine, as its kernel and its drivers name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from optax_offload._host.one_memory import one_memory_of
from optax_offload._machine import parse
from optax_offload._machine.texts import Texts

_NVIDIA, _GOOGLE = "10DE", "1AE0"
# Displays, and accelerators that process data: classes of PCI devices.
_GPU_CLASSES = ("3", "12")
# As JAX finds TPUs before it loads libtpu (jax/_src/hardware_utils.py, JAX 0.12.0.1).
_TPUS = {
    "005E": "TPU v4",
    "0062": "TPU v5p",
    "0063": "TPU v5e",
    "006F": "TPU v6e",
    "0076": "TPU7x",
}
# AMD's kernel driver knows no names (pci-ids.ucw.cz, vendor 1002).
_AMD = {
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x1586: "AMD Radeon 8060S",
}
_DEVICE_TREE = "proc/device-tree/model"
SYSCTL_COMMAND = "sysctl machdep.cpu.brand_string hw.memsize"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device that JAX could use.

    Attributes:
      name: Its name, as JAX has it where it knows the device.
      vendor: "nvidia", "google", "amd" or "apple".
      address: Its PCI address; "" if it is at no PCI bus.
      node: The NUMA node that it is at; None if the machine does not say.
      memory_bytes: Its own memory; None if it is not known, or there is none.
      slot: Its PCI Express link, if it has one.
      driver: The version of its driver; "" if it is not known.
    """

    name: str
    vendor: str
    address: str = ""
    node: int | None = None
    memory_bytes: int | None = None
    slot: parse.Slot | None = None
    driver: str = ""


def accelerators(machine: Texts) -> list[Accelerator]:
    """The accelerators of one vendor, those that a run would use, in a machine.

    An integrated GPU beside NVIDIA's is for the display.
    """
    of_vendors = (_nvidia, _google, _amd, _jetson, _apple)
    found = (list(of_vendor(machine)) for of_vendor in of_vendors)
    return next((devices for devices in found if devices), [])


def apple_memory_bytes(machine: Texts) -> int | None:
    """The memory of an Apple machine."""
    text = parse.fields(machine.output(SYSCTL_COMMAND)).get("hw.memsize", "")
    return int(text) if text.isdecimal() else None


def _nvidia(machine: Texts) -> Iterator[Accelerator]:
    smi = machine.output(parse.SMI_COMMAND)
    rows = {row.address: row for row in parse.smi_rows(smi)}
    driver = parse.driver_version(machine.read("proc/driver/nvidia/version"))
    at_pci = dict(_pci(machine, _NVIDIA, _GPU_CLASSES))
    # Under WSL2 only nvidia-smi knows of them. It lists those that a container or a job
    # may use, where the bus has all.
    for address in sorted(rows or at_pci):
        row = rows.get(address)
        says = machine.read(f"proc/driver/nvidia/gpus/{address}/information")
        model = parse.fields(says).get("Model", "")
        unnamed = f"NVIDIA GPU (PCI device {at_pci.get(address, '')})"
        yield Accelerator(
            name=(row.name if row else model) or unnamed,
            vendor="nvidia",
            address=address,
            node=_node(machine, address),
            memory_bytes=row.memory_bytes if row else None,
            slot=_slot(machine, address),
            driver=row.driver if row else driver,
        )


def _google(machine: Texts) -> Iterator[Accelerator]:
    for address, device in _pci(machine, _GOOGLE, ()):
        if device in _TPUS:
            yield Accelerator(_TPUS[device], "google", address, _node(machine, address))


def _amd(machine: Texts) -> Iterator[Accelerator]:
    """The GPUs that AMD's compute driver lists."""
    for path in machine.paths("sys/class/kfd/kfd/topology/nodes/*/properties"):
        says = parse.properties(machine.read(path))
        if not says.get("simd_count"):
            continue  # A processor.
        place = says.get("location_id", 0)
        address = (
            f"{says.get('domain', 0):04x}:{place >> 8:02x}:"
            f"{place >> 3 & 31:02x}.{place & 7}"
        )
        product = machine.read(f"sys/bus/pci/devices/{address}/product_name").strip()
        # 90402 is gfx942, 110501 gfx1151: the last two are hexadecimal digits.
        major, rest = divmod(says.get("gfx_target_version", 0), 10000)
        instructions = f"AMD GPU gfx{major}{rest // 100:x}{rest % 100:x}"
        known = _AMD.get(says.get("device_id", 0), "")
        yield Accelerator(
            name=known or product or instructions,
            vendor="amd",
            address=address,
            node=_node(machine, address),
            slot=_slot(machine, address),
        )


def _jetson(machine: Texts) -> Iterator[Accelerator]:
    """The GPU of a Jetson, which is not on a PCI bus."""
    model = machine.read(_DEVICE_TREE).strip()
    if one_memory_of(model) is not None:
        yield Accelerator(model, "nvidia")


def _apple(machine: Texts) -> Iterator[Accelerator]:
    says = parse.fields(machine.output(SYSCTL_COMMAND))
    name = says.get("machdep.cpu.brand_string", "")
    if one_memory_of(name) is not None:
        yield Accelerator(name, "apple")


def _pci(
    machine: Texts, vendor: str, classes: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """The addresses and device ids of a vendor's PCI devices."""
    for path in machine.paths("sys/bus/pci/devices/*/uevent"):
        says = parse.variables(machine.read(path))
        maker, _, device = says.get("PCI_ID", "").upper().partition(":")
        # Six hexadecimal digits without the first zeros, of which four tell no more.
        device_class = says.get("PCI_CLASS", "")[:-4]
        if maker == vendor and (not classes or device_class in classes):
            yield path.split("/")[-2], device


def _node(machine: Texts, address: str) -> int | None:
    text = machine.read(f"sys/bus/pci/devices/{address}/numa_node").strip()
    # -1 where the firmware does not say.
    return int(text) if text.isdecimal() else None


def _slot(machine: Texts, address: str) -> parse.Slot | None:
    names = ("max_link_speed", "current_link_width", "max_link_width")
    directory = f"sys/bus/pci/devices/{address}"
    return parse.slot({name: machine.read(f"{directory}/{name}") for name in names})

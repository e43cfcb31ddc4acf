"""The finding about a directory for states on disk."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from optax_offload._ground import file_system
from optax_offload._ground.file_system import Mount
from optax_offload._ground.units import GIB, size_text
from optax_offload._machine import parse
from optax_offload._machine.directory_view import DirectoryView
from optax_offload._machine.findings import Finding, Level
from optax_offload._machine.texts import Texts

_TMPFS = "docs.kernel.org/filesystems/tmpfs.html"
_OVERLAY = "docs.kernel.org/filesystems/overlayfs.html"
_MOUNTINFO = "docs.kernel.org/filesystems/proc.html"
_BLOCK = "docs.kernel.org/admin-guide/devices.html"
# How clouds name the drives that they attach over a network.
_CLOUD = (
    "docs.aws.amazon.com/ebs/latest/userguide/nvme-ebs-volumes.html",
    "docs.cloud.google.com/compute/docs/disks/local-ssd",
    "learn.microsoft.com/azure/virtual-machines/enable-nvme-interface",
)
_CLOUD_DRIVE = re.compile(
    r"Amazon Elastic Block Store|nvme_card-pd|PersistentDisk|MSFT NVMe Accelerator"
)
# Of a state of this size the time is said.
_EXAMPLE_BYTES = 100 * GIB
# Devices on devices: a partition in a volume in an encrypted volume in an array.
_MOST_LAYERS = 6


@dataclasses.dataclass(frozen=True)
class Drive:
    """A block device, as the kernel sees it.

    Attributes:
      sort: Its sort, in words.
      place: Where its bytes are: in memory, in a drive, or at the end of a network.
      slow: Whether it is a disk that turns.
    """

    sort: str
    place: Literal["memory", "drive", "network"] = "drive"
    slow: bool = False


def about_directory(machine: Texts) -> Iterator[Finding]:
    """The finding about the directory that was given, if one was."""
    if machine.read("directory"):
        view = DirectoryView.from_json(machine.read("directory"))
        mount = file_system.mount_of(view.path, machine.read(file_system.MOUNTS))
        yield _directory(machine, view, mount)


def _directory(machine: Texts, view: DirectoryView, mount: Mount | None) -> Finding:
    if mount is None:
        seen = f"{view.path or 'the directory'}: its file system is not known"
        means = "/proc/self/mountinfo does not say what it is on"
        return _finding(view, "unseen", seen, means, _MOUNTINFO)
    drives = drives_of(machine, mount) if mount.kind == "drive" else []
    places = {mount.kind, *(drive.place for drive in drives)}
    what = f"{mount.type} at {mount.point}"
    if drives:
        what += f", on {' and '.join(dict.fromkeys(x.sort for x in drives))}"
    if "memory" in places:
        seen = f"{view.path} is memory ({what})"
        means = (
            "a state that is parked there stays in host memory, as with "
            'memory_kind="pinned_host". Give offload_states a directory on a drive'
        )
        line = "findmnt --real"
        return _finding(view, "fix", seen, means, _TMPFS, do=(line,))
    if mount.read_only:
        seen = f"{view.path} is mounted read-only ({what})"
        means = "a state can be read from it, and none can be parked there"
        return _finding(view, "fix", seen, means, _MOUNTINFO)
    if "network" in places:
        server = f" from {mount.source}" if mount.kind == "network" else ""
        seen = f"{view.path} is on a network ({what}{server})"
        means = (
            "the speed depends on who else uses it, and a server's cache may have "
            "answered. Hosts that share a state need such a directory"
        )
        return _finding(view, "note", seen, means, *(_CLOUD if drives else ()))
    if mount.kind == "overlay":
        seen = f"{view.path} is in a container's own layer ({what})"
        means = (
            "its files are removed with the container, and the machine does not say "
            "what drive they are on. Give the container a directory of a drive"
        )
        line = "docker run --volume /on/a/drive:/states ..."
        return _finding(view, "note", seen, means, _OVERLAY, do=(line,))
    if not drives:
        seen = f"{view.path} is on {what}"
        means = "the machine does not say what drive that is"
        return _finding(view, "unseen", seen, means, _BLOCK)
    seen = f"{view.path} is on {what}"
    if any(drive.slow for drive in drives):
        means = "a disk that turns is much slower than a solid-state drive"
        return _finding(view, "note", seen, means)
    return _finding(view, "good", seen, "")


def _finding(
    view: DirectoryView,
    level: Level,
    seen: str,
    means: str,
    *sources: str,
    do: tuple[str, ...] = (),
) -> Finding:
    """A finding with what is the same for all directories."""
    if view.free_bytes is not None and view.total_bytes is not None:
        seen += (
            f"; {size_text(view.free_bytes)} are free of {size_text(view.total_bytes)}"
        )
    if view.measured_at and view.measured_at != view.path:
        seen += f". It does not exist yet; {view.measured_at} was measured"
    writes, reads = view.write_bytes_per_second, view.read_bytes_per_second
    if view.error:
        seen += f". It could not be measured: {view.error}"
        level = "fix" if level == "good" else level
        means = means or "nothing can be parked where nothing can be written"
        sources = sources or (_MOUNTINFO,)
    elif writes and reads:
        seen += (
            f". It writes {_speed(writes)} and reads {_speed(reads)}, past the page "
            f"cache ({size_text(view.measured_bytes)})"
        )
        pause = (
            f"a state of {size_text(_EXAMPLE_BYTES)} takes {_time(writes)} to park "
            f"and {_time(reads)} to bring back"
        )
        means = f"{pause}. {means[:1].upper()}{means[1:]}" if means else pause
    return Finding("directory", level, seen, means, do, sources)


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _time(bytes_per_second: float) -> str:
    seconds = _EXAMPLE_BYTES / bytes_per_second
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} minutes"


def drives_of(machine: Texts, mount: Mount) -> list[Drive]:
    """The drives that a file system is on; none if the machine does not say."""
    base = f"sys/dev/block/{mount.device}"
    if mount.device.startswith("0:"):  # Of btrfs, say, which may be on several.
        base = f"sys/class/block/{mount.source.removeprefix('/dev/')}"
    return _drives(machine, base, _MOST_LAYERS)


def _drives(machine: Texts, base: str, layers: int) -> list[Drive]:
    says = parse.variables(machine.read(f"{base}/uevent"))
    name = says.get("DEVNAME", "").removeprefix("/dev/")
    if not name or not layers:
        return []
    if says.get("DEVTYPE") == "partition":
        base += "/.."  # The drive's own directory.
    below = [
        drive
        for path in machine.paths(f"{base}/slaves/*/uevent")
        for drive in _drives(machine, path.removesuffix("/uevent"), layers - 1)
    ]
    return below or [_drive(machine, base, name)]


def _drive(machine: Texts, base: str, name: str) -> Drive:
    model = machine.read(f"{base}/device/model").strip()
    vendor = machine.read(f"{base}/device/vendor").strip()
    called = f" ({model})" if model else ""
    if re.match(r"z?ram\d", name):
        return Drive(f"a block device in memory, {name}", "memory")
    if _CLOUD_DRIVE.search(model):
        return Drive(f"a cloud's network drive, {name}{called}", "network")
    if re.match(r"(rbd|nbd|drbd)\d", name):
        return Drive(f"a network block device, {name}", "network")
    if name.startswith("nvme"):
        return Drive(f"NVMe, {name}{called}")
    turns = machine.read(f"{base}/queue/rotational").strip() == "1"
    if name.startswith("sd"):
        bus = "SATA" if vendor == "ATA" else "SCSI"
        sort = "a hard disk" if turns else "a solid-state drive"
        return Drive(f"{bus}, {sort}, {name}{called}", slow=turns)
    if re.match(r"(xvd|vd)[a-z]", name):
        return Drive(f"a virtual drive, {name}, of which the host knows more")
    return Drive(f"{name}{called}")

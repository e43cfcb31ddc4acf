"""The file system that a directory is on, as Linux lists it."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Literal

# "network" is over a network, or of another machine; "overlay" are the layers of a
# container; "drive" is a block device of this machine, as the kernel sees it.
Kind = Literal["memory", "network", "overlay", "drive", "unknown"]

# Below the root, for a saved machine too.
MOUNTS = "proc/self/mountinfo"
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"), "memory"),
    **dict.fromkeys(("overlay", "aufs", "fuse.fuse-overlayfs"), "overlay"),
    **dict.fromkeys(
        (
            *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "virtiofs"),
            *("ceph", "lustre", "gpfs", "beegfs", "wekafs", "panfs", "pvfs2"),
            *("orangefs", "glusterfs", "ocfs2", "gfs2", "drvfs", "vboxsf"),
        ),
        "network",
    ),
}
# Most drivers in user space bring what is elsewhere. These read a local drive.
_LOCAL_FUSE = {"fuse.ntfs-3g", "fuse.mergerfs", "fuse.zfs-fuse", "fuseblk"}


@dataclasses.dataclass(frozen=True)
class Mount:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
      point: The directory that it is mounted at.
      type: The type of the file system, as the kernel names it.
      source: The device, the server or the pool that it comes from.
      device: The numbers of its device, such as ``259:2``; ``0:...`` if it has none.
      read_only: Whether nothing can be written to it.
    """

    point: str
    type: str
    source: str
    device: str
    read_only: bool

    @property
    def kind(self) -> Kind:
        """The sort of place that its files are in."""
        if self.type in _KINDS:
            return _KINDS[self.type]
        if self.type.startswith("fuse") and self.type not in _LOCAL_FUSE:
            return "network"
        if self.source.startswith("/dev/") or not self.device.startswith("0:"):
            return "drive"
        return "drive" if self.type in ("zfs", "btrfs", "bcachefs") else "unknown"


def mount_of(path: str, mounts: str) -> Mount | None:
    """The mount that a path is on; None if the lines do not say.

    Args:
      path: An absolute path without links. It need not exist.
      mounts: The text of a ``/proc/self/mountinfo``.

    Example:
      >>> mounts = '''\
      ... 22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw
      ... 25 22 0:23 / /dev/shm rw - tmpfs tmpfs rw'''
      >>> mount_of("/dev/shm/states", mounts).kind
      'memory'
    """
    lines = [line for line in map(_parsed, mounts.splitlines()) if line is not None]
    numbers = {number for number, _, _ in lines}
    # The root's parent is outside of what this process sees. As the kernel resolves a
    # path, each directory on the way may be another mount, and what is mounted last at
    # one place, on top of the others.
    at: int | None = None
    found = None
    for _ in lines:
        steps = [
            (number, mount)
            for number, parent, mount in lines
            if (parent == at if at is not None else parent not in numbers)
            and _is_below(path, mount.point)
            and number != at
        ]
        if not steps:
            break
        nearest = min(len(mount.point) for _, mount in steps)
        at, found = [s for s in steps if len(s[1].point) == nearest][-1]
    return found


def mount_here(path: str | os.PathLike[str]) -> Mount | None:
    """The mount of a path on this machine; None if the machine does not say."""
    try:
        with open(f"/{MOUNTS}", errors="surrogateescape") as f:
            return mount_of(os.path.realpath(path), f.read())
    except OSError:
        return None


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _parsed(line: str) -> tuple[int, int, Mount] | None:
    # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
    before, dash, after = line.partition(" - ")
    first, last = before.split(" "), after.split(" ")
    if not dash or len(first) < 6 or len(last) < 2:
        return None
    if not first[0].isdecimal() or not first[1].isdecimal():
        return None
    options = {*first[5].split(","), *(last[2].split(",") if len(last) > 2 else ())}
    mount = Mount(
        _unescaped(first[4]), last[0], _unescaped(last[1]), first[2], "ro" in options
    )
    return int(first[0]), int(first[1]), mount


def _unescaped(text: str) -> str:
    """Spaces, tabs, line ends and backslashes are octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)

"""What a directory is on, from lines of ``/proc/self/mountinfo``."""

import os
import sys

import pytest

from optax_offload._ground import file_system

mount_here = file_system.mount_here  # As it is without the fixture of all tests.

LAPTOP = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
23 22 0:22 / /proc rw,nosuid shared:13 - proc proc rw
25 22 0:23 / /dev/shm rw,nosuid,nodev shared:5 - tmpfs tmpfs rw,size=16318076k
26 22 0:40 / /tmp rw,nosuid,nodev shared:6 - tmpfs tmpfs rw,size=16318076k
27 22 0:41 /home /home rw,relatime shared:7 - btrfs /dev/sda3 rw,subvol=/home
28 27 0:42 / /home/a\040b/c\134d rw,relatime - fuse.sshfs me@host:/data rw
29 22 0:43 / /srv/usb ro,relatime - vfat /dev/sdb1 rw
30 22 0:44 / /srv/nfs rw,relatime - nfs4 server:/export rw,vers=4.2
31 22 7:3 / /srv/image rw,relatime - squashfs /dev/loop3 ro
32 22 0:45 / /srv/pool rw,relatime - zfs pool/states rw
"""
CONTAINER = """
612 539 0:95 / / rw,relatime - overlay overlay rw,lowerdir=/a:/b,upperdir=/c,workdir=/d
613 612 0:98 / /proc rw,nosuid - proc proc rw
614 612 0:99 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
616 614 0:100 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
617 612 8:1 /var/states /states rw,relatime - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("mounts", "path", "point", "kind"),
    [
        (LAPTOP, "/", "/", "drive"),
        (LAPTOP, "/var/states", "/", "drive"),
        (LAPTOP, "/dev/shm", "/dev/shm", "memory"),
        (LAPTOP, "/dev/shm/states/7", "/dev/shm", "memory"),
        (LAPTOP, "/dev/shm2", "/", "drive"),
        (LAPTOP, "/tmp/x", "/tmp", "memory"),
        (LAPTOP, "/home/me", "/home", "drive"),
        (LAPTOP, r"/home/a b/c\d/e", r"/home/a b/c\d", "network"),
        (LAPTOP, r"/home/a b/c", "/home", "drive"),
        (LAPTOP, "/srv/nfs/x", "/srv/nfs", "network"),
        (LAPTOP, "/srv/image", "/srv/image", "drive"),
        (LAPTOP, "/srv/pool", "/srv/pool", "drive"),
        (LAPTOP, "/proc/1", "/proc", "unknown"),
        (CONTAINER, "/root/states", "/", "overlay"),
        (CONTAINER, "/states/x", "/states", "drive"),
        (CONTAINER, "/dev/shm/x", "/dev/shm", "memory"),
    ],
)
def test_mounts(mounts, path, point, kind):
    """The nearest above a path, and what it is."""
    mount = file_system.mount_of(path, mounts)
    assert mount is not None
    assert (mount.point, mount.kind) == (point, kind)


@pytest.mark.parametrize(
    ("type_", "kind"),
    [
        ("ramfs", "memory"),
        ("nfs", "network"),
        ("cifs", "network"),
        ("lustre", "network"),
        ("9p", "network"),
        ("fuse.gcsfuse", "network"),
        ("fuse.mergerfs", "unknown"),
        ("fuse.fuse-overlayfs", "overlay"),
        ("zfs", "drive"),
        ("somefs", "unknown"),
    ],
)
def test_types_without_a_device(type_, kind):
    """By the name that the kernel has for them."""
    line = f"22 1 0:50 / / rw - {type_} source rw"
    mount = file_system.mount_of("/x", line)
    assert mount is not None
    assert mount.kind == kind


def test_read_only():
    """The mount, or the file system."""
    for path, expected in [("/srv/usb", True), ("/srv/image", True), ("/", False)]:
        mount = file_system.mount_of(path, LAPTOP)
        assert mount is not None
        assert mount.read_only is expected


def test_mounted_over():
    """As the kernel resolves a path: what is covered does not count."""
    stacked = """
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:9 / /a/b rw - nfs server:/b rw
3 1 8:2 / /a rw - ext4 /dev/sda2 rw
4 1 0:7 / /m rw - tmpfs tmpfs rw
5 4 8:3 / /m rw - xfs /dev/sda3 rw
"""
    kinds = {
        path: mount.source
        for path in ("/a/b/c", "/m/x", "/a")
        if (mount := file_system.mount_of(path, stacked))
    }
    assert kinds == {"/a/b/c": "/dev/sda2", "/m/x": "/dev/sda3", "/a": "/dev/sda2"}


@pytest.mark.parametrize(
    "mounts",
    ["", "\n\n", "x", "1 2", "a b c d e f - g h", "1 0 8:1 / /other rw - ext4 /dev/x"],
)
def test_lines_that_say_nothing(mounts):
    """None, and no error."""
    assert file_system.mount_of("/states", mounts) is None


def test_lines_in_circles():
    """Of a file that somebody wrote: it ends."""
    mounts = "1 9 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / / rw - ext4 /dev/b rw\n"
    mounts += "1 2 8:3 / / rw - ext4 /dev/c rw\n"
    assert file_system.mount_of("/x", mounts) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine(tmp_path, monkeypatch):
    """Through a link, and where there is no such file."""
    mount = mount_here("/proc/self/fd")
    assert mount is not None
    assert mount.type == "proc"
    link = tmp_path / "link"
    link.symlink_to("/proc")
    assert mount_here(link) == mount
    monkeypatch.setattr(file_system, "MOUNTS", "no/such/file")
    assert mount_here("/") is None
    assert os.path.exists("/")

"""`optax-offload doctor --directory`: what it is, and how fast."""

import errno
import json
import os
import pathlib

import pytest
from typer.testing import CliRunner

from optax_offload._ground import file_system
from optax_offload._machine import Saved, diagnose, directory_view, look_at
from optax_offload._machine.directory_view import DirectoryView
from optax_offload.cli import command as cli

GIB = 2**30
MEASURED = {
    "free_bytes": 300 * GIB,
    "total_bytes": 400 * GIB,
    "measured_bytes": GIB,
    "write_bytes_per_second": 1.2e9,
    "read_bytes_per_second": 2.5e9,
}
ROOT = "22 1 {device} / / rw,relatime - {type} {source} rw"
NVME = """\
== sys/dev/block/259:2/uevent
MAJOR=259
MINOR=2
DEVNAME=nvme0n1p2
DEVTYPE=partition
== sys/dev/block/259:2/../device/model
{model}
== sys/dev/block/259:2/../queue/rotational
0
"""
DISK = """\
== sys/dev/block/8:1/uevent
DEVNAME=sda1
DEVTYPE=partition
== sys/dev/block/8:1/../device/model
{model}
== sys/dev/block/8:1/../device/vendor
{vendor}
== sys/dev/block/8:1/../queue/rotational
{turns}
"""
MAPPED = """\
== sys/dev/block/253:0/uevent
DEVNAME=dm-0
DEVTYPE=disk
== sys/dev/block/253:0/slaves/md0/uevent
DEVNAME=md0
DEVTYPE=disk
== sys/dev/block/253:0/slaves/md0/slaves/nvme0n1p3/uevent
DEVNAME=nvme0n1p3
DEVTYPE=partition
== sys/dev/block/253:0/slaves/md0/slaves/nvme1n1p3/uevent
DEVNAME=nvme1n1p3
DEVTYPE=partition
"""
BTRFS = """\
== sys/class/block/nvme0n1p2/uevent
DEVNAME=nvme0n1p2
DEVTYPE=partition
"""
OF_ONE = """\
== sys/dev/block/{device}/uevent
DEVNAME={name}
DEVTYPE=disk
== sys/dev/block/{device}/device/model
{model}
"""


def finding_of(mount, texts="", view=None, path="/states"):
    """The finding about a directory on a machine of texts."""
    seen = MEASURED | {"path": path, "measured_at": path} | (view or {})
    root = ROOT.format(**mount)
    machine = Saved(
        f"== {file_system.MOUNTS}\n{root}\n{texts}\n== directory\n{json.dumps(seen)}\n"
    )
    (found,) = (x for x in diagnose(machine).findings if x.topic == "directory")
    return found


def on(type_, source="source", device="0:50"):
    """A mount at the root."""
    return {"type": type_, "source": source, "device": device}


DRIVE = on("ext4", "/dev/nvme0n1p2", "259:2")
SATA = on("xfs", "/dev/sda1", "8:1")


@pytest.mark.parametrize(
    ("mount", "texts", "level", "seen"),
    [
        (on("tmpfs"), "", "fix", "/states is memory (tmpfs at /)"),
        (on("ramfs"), "", "fix", "/states is memory (ramfs at /)"),
        (DRIVE, NVME.format(model="Samsung 990 PRO"), "good", "NVMe, nvme0n1p2 (Samsu"),
        (
            DRIVE,
            NVME.format(model="Amazon Elastic Block Store"),
            "note",
            "is on a network (ext4 at /, on a cloud's network drive, nvme0n1p2 (Amazon",
        ),
        (
            SATA,
            DISK.format(model="Samsung SSD 870", vendor="ATA     ", turns=0),
            "good",
            "on xfs at /, on SATA, a solid-state drive, sda1 (Samsung SSD 870)",
        ),
        (
            SATA,
            DISK.format(model="ST16000NM", vendor="ATA     ", turns=1),
            "note",
            "on SATA, a hard disk, sda1 (ST16000NM)",
        ),
        (
            SATA,
            DISK.format(model="PersistentDisk", vendor="Google  ", turns=0),
            "note",
            "is on a network (xfs at /, on a cloud's network drive, sda1",
        ),
        (
            on("ext4", "/dev/mapper/vg-root", "253:0"),
            MAPPED,
            "good",
            "on ext4 at /, on NVMe, nvme0n1p3 and NVMe, nvme1n1p3",
        ),
        (
            on("btrfs", "/dev/nvme0n1p2"),
            BTRFS,
            "good",
            "btrfs at /, on NVMe, nvme0n1p2",
        ),
        (
            on("ext4", "/dev/vda", "254:0"),
            OF_ONE.format(device="254:0", name="vda", model=""),
            "good",
            "on a virtual drive, vda, of which the host knows more",
        ),
        (
            on("ext4", "/dev/zram1", "252:1"),
            OF_ONE.format(device="252:1", name="zram1", model=""),
            "fix",
            "/states is memory (ext4 at /, on a block device in memory, zram1)",
        ),
        (
            on("ext4", "/dev/rbd0", "251:0"),
            OF_ONE.format(device="251:0", name="rbd0", model=""),
            "note",
            "on a network (ext4 at /, on a network block device, rbd0)",
        ),
        (
            on("ext4", "/dev/mmcblk0", "179:0"),
            OF_ONE.format(device="179:0", name="mmcblk0", model="SD64G"),
            "good",
            "on mmcblk0 (SD64G)",
        ),
        (on("ext4", "/dev/sdz", "8:99"), "", "unseen", "/states is on ext4 at /;"),
        (on("zfs", "pool/states"), "", "unseen", "/states is on zfs at /;"),
        (on("nfs4", "server:/x"), "", "note", "network (nfs4 at / from server:/x)"),
        (on("fuse.gcsfuse", "b"), "", "note", "network (fuse.gcsfuse at / from b)"),
        (on("overlay"), "", "note", "is in a container's own layer (overlay at /)"),
        (on("somefs"), "", "unseen", "/states is on somefs at /"),
    ],
)
def test_what_it_is(mount, texts, level, seen):
    """Each sort, with what is free, how fast it is, and what that means."""
    found = finding_of(mount, texts)
    assert found.level == level
    assert seen in found.seen
    assert "300.00 GiB are free of 400.00 GiB" in found.seen
    assert "It writes 1.20 GB/s and reads 2.50 GB/s, past the page cache" in found.seen
    assert "a state of 100.00 GiB takes 89 s to park and 43 s to bring back" in (
        found.means
    )
    if level == "fix":
        assert found.sources
        assert found.do


@pytest.mark.parametrize(
    ("view", "level", "seen"),
    [
        ({"error": "OSError: no"}, "fix", "It could not be measured: OSError: no"),
        ({"measured_at": "/"}, "good", "It does not exist yet; / was measured"),
        ({"write_bytes_per_second": 1e7}, "good", "writes 0.01 GB/s"),
        ({"path": 3}, "unseen", "its file system is not known"),
        ({"free_bytes": "much"}, "unseen", "its file system is not known"),
    ],
)
def test_what_was_measured(view, level, seen):
    """Or not; and what is no view says nothing."""
    found = finding_of(DRIVE, NVME.format(model="x"), view)
    assert (found.level, seen in found.seen) == (level, True), found
    if view.get("write_bytes_per_second"):
        assert "takes 179 minutes to park" in found.means


def test_read_only():
    """Nothing can be parked there."""
    mount = DRIVE | {"type": "ext4", "device": "259:2"}
    text = ROOT.format(**mount).replace(" rw,relatime", " ro,relatime")
    seen = json.dumps(MEASURED | {"path": "/states", "measured_at": "/states"})
    machine = Saved(f"== {file_system.MOUNTS}\n{text}\n== directory\n{seen}\n")
    found = next(x for x in diagnose(machine).findings if x.topic == "directory")
    assert (found.level, "is mounted read-only" in found.seen) == ("fix", True)


def test_a_machine_without_a_directory():
    """Has no such finding, and one whose mounts are not known says so."""
    topics = [x.topic for x in diagnose(Saved("== proc/version\n")).findings]
    assert "directory" not in topics
    (found,) = (
        x
        for x in diagnose(Saved("== directory\n{}\n")).findings
        if x.topic == "directory"
    )
    assert found.level == "unseen"


def test_a_view_is_read_again():
    """As JSON, in a saved machine."""
    view = DirectoryView("/x", "/", 1, 2, 3, 4.0, 5.0, "no")
    assert DirectoryView.from_json(view.as_json()) == view
    for text in ("", "{}", "[]", '{"no": 1}', "7", '{"measured_bytes": null}'):
        found = DirectoryView.from_json(text)
        assert (found.path, found.error) == ("", "")


def test_it_is_measured_and_nothing_stays(tmp_path):
    """A small file, past the page cache; with O_DIRECT or without."""
    found = look_at(str(tmp_path / "new" / "states"), 4 * 2**20)
    assert found.path == str(tmp_path / "new" / "states")
    assert found.measured_at == str(tmp_path)
    assert found.measured_bytes == 4 * 2**20
    assert found.write_bytes_per_second
    assert found.read_bytes_per_second
    assert found.error == ""
    assert not list(tmp_path.iterdir())


def test_without_direct_access(tmp_path, monkeypatch):
    """Written, synced, and dropped from the cache."""
    open_, dropped = os.open, []

    def no_direct(path, flags, *args, **kw):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return open_(path, flags, *args, **kw)

    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda *args: dropped.append(args), raising=False
    )
    assert look_at(str(tmp_path), 3 * 2**20).measured_bytes == 3 * 2**20
    assert dropped or not hasattr(os, "O_DIRECT")
    assert not list(tmp_path.iterdir())


def test_a_slow_drive_is_left_early(tmp_path, monkeypatch):
    """After the first blocks: a rate is known, and nothing waits for a GiB."""
    monkeypatch.setattr(directory_view, "_MOST_SECONDS", 0.0)
    found = look_at(str(tmp_path), 20 * 2**20)
    assert found.measured_bytes == 8 * 2 * 2**20
    assert found.write_bytes_per_second
    assert found.read_bytes_per_second


def test_little_space(tmp_path, monkeypatch):
    """A quarter of what is free at most, or nothing."""
    usage = directory_view.shutil.disk_usage(tmp_path)
    for free, measured, error in [
        (9 * 2**20, 2 * 2**20, ""),
        (2**20, 0, "too little space is free to measure"),
    ]:
        monkeypatch.setattr(
            directory_view.shutil,
            "disk_usage",
            lambda _, n=free: usage._replace(free=n),
        )
        found = look_at(str(tmp_path))
        assert (found.measured_bytes, found.error) == (measured, error)


@pytest.mark.parametrize("when", ["open", "pwrite", "preadv"])
def test_a_directory_that_cannot_be_used(tmp_path, monkeypatch, when):
    """Why is a finding, not an error; and nothing stays."""

    def fails(*_, **__):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, when, fails)
        found = look_at(str(tmp_path), 2**20)
    assert "Disk quota exceeded" in found.error
    assert not list(tmp_path.iterdir())


def test_memory_is_not_measured(tmp_path, monkeypatch):
    """It would take a GiB of it."""
    mount = file_system.Mount("/", "tmpfs", "tmpfs", "0:1", False)
    monkeypatch.setattr(file_system, "mount_here", lambda _: mount)
    found = look_at(str(tmp_path))
    assert (found.write_bytes_per_second, found.error) == (None, "")
    assert found.free_bytes


@pytest.fixture
def doctor(monkeypatch):
    """Runs the command; measures little."""
    measure = directory_view._measured
    monkeypatch.setattr(
        directory_view, "_measured", lambda at, n: measure(at, min(n, 2**20))
    )

    def run(*args, code: int | None = None):
        args = ["doctor", "--no-measure-link", *map(str, args)]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, args)
        assert code in (None, result.exit_code), result.output
        return result

    return run


def test_the_command(doctor, tmp_path):
    """Saved and read again it is the same directory."""
    directory, file = tmp_path / "a b", tmp_path / "machine.txt"
    directory.mkdir()
    printed = doctor("--directory", directory, "--save", file).stdout
    assert f"{directory} is " in printed
    assert "a state of 100.00 GiB takes" in printed
    assert doctor("--machine", file).stdout == printed
    found = json.loads(doctor("--directory", directory, "--json").stdout)["findings"]
    assert [x["topic"] for x in found].count("directory") == 1
    assert not list(directory.iterdir())


@pytest.mark.parametrize(
    ("directory", "message"),
    [("", "names no directory"), ("file", "is not a directory"), ("file/x", "is not")],
)
def test_no_directory(doctor, tmp_path, monkeypatch, directory, message):
    """A line, and the code of bad input."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").write_text("")
    assert message in doctor("--directory", directory, code=2).stderr


def test_another_machine_has_its_own(doctor, tmp_path):
    """Nothing of this one is mixed with it."""
    saved = pathlib.Path(__file__).parent / "captured" / "nothing.txt"
    result = doctor("--machine", saved, "--directory", tmp_path, code=2)
    assert "give either --machine, or --directory" in result.stderr

"""States on disk of which several trees, or processes, know: nobody loses one."""

import errno
import fcntl
import functools
import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_trees import files, kinds

import optax_offload as oo
from optax_offload._states import locks, manifest
from optax_offload._states.files import StateFiles

pytest.importorskip("tensorstore", reason="needs the extra disk")

ROOT = Path(__file__).parent.parent.parent
to_disk = functools.partial(oo.offload_states, memory_kind="disk", block=True)
STAYS = r"the files stay in .*state-\w+ \(another tree or process refers to them, or re"


def make(value=1.0):
    """Two leaves."""
    return {"a": jnp.full(3, value), "b": jnp.full(4, value)}


def values(tree):
    """The numbers in it."""
    return {float(v) for x in tree.values() for v in np.unique(np.asarray(x))}


def while_reading(monkeypatch, act):
    """Does something once, as soon as a leaf is about to be read."""
    read, acts = StateFiles.read, [act]

    def acting(*args):
        if acts:
            acts.pop()()
        return read(*args)

    monkeypatch.setattr(StateFiles, "read", acting)


def test_reader_takes_no_state_that_a_tree_has_parked(tmp_path):
    """It gets a copy, and is told so; the owner's reload removes the files."""
    there = to_disk(make(), directory=tmp_path)
    for _ in range(2):
        with pytest.warns(oo.OffloadWarning, match=STAYS):
            copy = oo.reload_states(oo.eval_shape(make), directory=tmp_path)
        assert values(copy) == {1.0}
    assert values(oo.reload_states(there)) == {1.0}
    assert not list(tmp_path.iterdir())


def test_reader_without_an_owner_removes_the_state(tmp_path):
    """As a template is for: its process has ended."""
    there = to_disk(make(), directory=tmp_path)
    del there
    assert values(oo.reload_states(oo.eval_shape(make), directory=tmp_path)) == {1.0}
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="holds no complete state"):
        oo.reload_states(oo.eval_shape(make), directory=tmp_path)


def test_owner_takes_no_state_that_somebody_reads(tmp_path, monkeypatch):
    """Who ends last removes it."""
    there = to_disk(make(), directory=tmp_path)
    back = []

    def reload():
        with pytest.warns(oo.OffloadWarning, match=STAYS):
            back.append(oo.reload_states(there))

    while_reading(monkeypatch, reload)
    copy = oo.reload_states(oo.eval_shape(make), directory=tmp_path)
    assert values(copy) == values(back[0]) == {1.0}
    assert not list(tmp_path.iterdir())


def test_two_readers(tmp_path, monkeypatch):
    """The first to end leaves the files to the second."""
    there = to_disk(make(), directory=tmp_path)
    del there
    template = oo.eval_shape(make)

    def read():
        with pytest.warns(oo.OffloadWarning, match=STAYS):
            assert values(oo.reload_states(template, directory=tmp_path)) == {1.0}

    while_reading(monkeypatch, read)
    assert values(oo.reload_states(template, directory=tmp_path)) == {1.0}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("donate", [True, False])
def test_state_is_replaced_while_somebody_reads_it(tmp_path, monkeypatch, donate):
    """A reader stops no writer, and reads what it began to read."""
    there = to_disk(make(1.0), directory=tmp_path)
    del there
    new = []
    while_reading(
        monkeypatch, lambda: new.append(to_disk(make(2.0), directory=tmp_path))
    )
    template = oo.eval_shape(make)
    old = oo.reload_states(template, directory=tmp_path, donate=donate)
    assert values(old) == {1.0}
    assert len(manifest.states_in(tmp_path)) == (1 if donate else 2)
    assert values(oo.reload_states(new.pop())) == {2.0}
    again = to_disk(make(3.0), directory=tmp_path)
    assert len(manifest.states_in(tmp_path)) == 1
    assert values(oo.reload_states(again)) == {3.0}
    assert not list(tmp_path.iterdir())


def test_state_is_replaced_before_a_reader_shares_it(tmp_path, monkeypatch):
    """Between the manifest and the lock: the new one is read."""
    there = to_disk(make(1.0), directory=tmp_path)
    del there
    share, new = StateFiles.share, []

    def late(files):
        if not new:
            new.append(to_disk(make(2.0), directory=tmp_path))
        share(files)

    monkeypatch.setattr(StateFiles, "share", late)
    with pytest.warns(oo.OffloadWarning, match=STAYS):
        back = oo.reload_states(oo.eval_shape(make), directory=tmp_path)
    assert values(back) == {2.0}


def test_state_goes_while_a_reader_looks(tmp_path, monkeypatch):
    """A manifest that was there a moment ago is gone, and no other kind of file."""
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda self: self.name == manifest.FILE_NAME or exists(self)
    )
    with pytest.raises(FileNotFoundError, match="holds no complete state"):
        oo.reload_states(oo.eval_shape(make), directory=tmp_path)


def test_reader_that_failed_keeps_its_place(tmp_path, monkeypatch):
    """The tree of its error refers to the files; they are removed when that is back."""
    there = to_disk(make(), directory=tmp_path)
    template = oo.eval_shape(make)
    with monkeypatch.context() as patch:
        patch.setattr(StateFiles, "read", lambda *_: 1 / 0)
        with pytest.raises(oo.OffloadError, match="ZeroDivisionError") as caught:
            oo.reload_states(template, directory=tmp_path)
    with pytest.warns(oo.OffloadWarning, match=STAYS):
        oo.reload_states(there)
    assert values(oo.reload_states(caught.value.tree)) == {1.0}
    assert not list(tmp_path.iterdir())


READER = """
import sys, warnings
import jax, jax.numpy as jnp
import optax_offload as oo
from optax_offload._states.files import StateFiles

make = lambda: {"a": jnp.ones(3), "b": jnp.ones(4)}
template = oo.eval_shape(make)
with warnings.catch_warnings(record=True) as warned:
    back = oo.reload_states(template, directory=sys.argv[1])
print(float(back["a"][0] + back["b"][0]), [str(w.message) for w in warned], flush=True)
StateFiles.read = lambda *_: (print("reads", flush=True), sys.stdin.readline())
oo.reload_states(template, directory=sys.argv[1])
"""


def test_another_process_reads_a_parked_state(tmp_path):
    """The trainer does not lose its state, whatever becomes of the reader."""
    there = to_disk(make(), directory=tmp_path)
    env = harness.of_processes() | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    with subprocess.Popen(
        [sys.executable, "-c", READER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    ) as reader:
        assert reader.stdout is not None
        assert re.match(rf"2\.0 \['{STAYS}", reader.stdout.readline())
        assert reader.stdout.readline() == "reads\n"
        with pytest.warns(oo.OffloadWarning, match=STAYS):
            assert values(oo.reload_states(there)) == {1.0}
        assert files(tmp_path)
        reader.send_signal(signal.SIGKILL)
    there = to_disk(make(2.0), directory=tmp_path)
    assert len(manifest.states_in(tmp_path)) == 1, "a lock ends with its process"
    assert values(oo.reload_states(there)) == {2.0}
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("drops", [True, False])
def test_forked_process(tmp_path, drops):
    """As of a data loader: it neither ends a lock of its parent nor prolongs one."""
    there = to_disk(make(), directory=tmp_path)
    (to_child, from_parent), (to_parent, from_child) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        if drops:
            del there
            gc.collect()
        os.write(from_child, b".")
        os.read(to_child, 1)
        os._exit(0)
    os.read(to_parent, 1)
    try:
        with pytest.raises(ValueError, match="that a tree still refers to"):
            to_disk(make(2.0), directory=tmp_path)
        if drops:
            assert values(oo.reload_states(there)) == {1.0}
            assert not list(tmp_path.iterdir())
        else:
            del there
            there = to_disk(make(2.0), directory=tmp_path)
            assert values(oo.reload_states(there)) == {2.0}
    finally:
        os.write(from_parent, b".")
        os.waitpid(child, 0)
        for descriptor in (to_child, from_parent, to_parent, from_child):
            os.close(descriptor)


def test_reading_again_and_again_keeps_no_lock(tmp_path):
    """With donate=False nothing refers to the files when the call has ended."""
    there = to_disk(make(), directory=tmp_path)
    del there
    template = oo.eval_shape(make)
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0
        for _ in range(3):
            oo.reload_states(template, directory=tmp_path, donate=False)
        if before:
            assert len(os.listdir("/proc/self/fd")) == before
        (state,) = manifest.states_in(tmp_path)
        with locks.alone(state) as nobody:
            assert nobody
    finally:
        gc.enable()


def replaced(file, by):
    """Puts what is no lock in the place of one."""
    file.unlink(missing_ok=True)
    if by == "link":
        file.symlink_to(file.parent / "elsewhere")
    elif by == "directory":
        file.mkdir()
    else:
        os.mkfifo(file)


@pytest.mark.parametrize("by", ["link", "directory", "pipe"])
def test_what_is_no_lock(tmp_path, by):
    """Neither followed nor waited for: an error that says what to remove."""
    what = "a symbolic link" if by == "link" else "not a regular file"
    message = rf"it is {what}, and a lock has to be a file of its own\. Remove it, or u"
    replaced(tmp_path / "lock", by)
    tree = make()
    with pytest.raises(OSError, match=message) as caught:
        to_disk(tree, directory=tmp_path)
    assert str(tmp_path / "lock") in str(caught.value)
    assert not tree["a"].is_deleted()
    assert not (tmp_path / "elsewhere").exists()
    assert not manifest.states_in(tmp_path)


@pytest.mark.parametrize("by", ["link", "directory", "pipe"])
@pytest.mark.parametrize("name", ["readers", "lock-0"])
def test_what_is_no_lock_in_a_state(tmp_path, name, by):
    """Nothing is removed that cannot be locked."""
    there = to_disk(make(), directory=tmp_path)
    (state,) = manifest.states_in(tmp_path)
    replaced(state / name, by)
    message = "and a lock has to be a file of its own. Remove it"
    if name == "readers":
        with pytest.raises(OSError, match=message):
            oo.reload_states(oo.eval_shape(make), directory=tmp_path)
    else:
        with pytest.raises(OSError, match=message):
            to_disk(make(2.0), directory=tmp_path)
    with pytest.warns(oo.OffloadWarning, match=f"the files stay in .*{message}"):
        assert values(oo.reload_states(there)) == {1.0}
    assert state.exists()


def test_directory_that_cannot_be_written_to(tmp_path, monkeypatch):
    """A state in it can be read all the same, and it is said that it stays."""
    there = to_disk(make(), directory=tmp_path)
    (state,) = manifest.states_in(tmp_path)
    del there
    (state / locks.READERS).unlink()  # As of a state that an older release wrote.
    open_ = os.open

    def read_only(path, flags, *args, **kw):
        if flags & os.O_CREAT and not os.path.exists(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open_(path, flags, *args, **kw)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.warns(oo.OffloadWarning, match=r"the files stay in .*Read-only file"):
        back = oo.reload_states(oo.eval_shape(make), directory=tmp_path)
    assert values(back) == {1.0}
    with pytest.raises(OSError, match="Read-only file system"):
        to_disk(make(), directory=tmp_path)


def test_file_system_without_locks(tmp_path, monkeypatch):
    """Said before anything is moved."""

    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    tree = make()
    gc.collect()  # What other tests left gives its locks back.
    monkeypatch.setattr(fcntl, "flock", flock)
    message = r"lock cannot be locked \(Function not .* need a file system with locks"
    with pytest.raises(OSError, match=message):
        to_disk(tree, directory=tmp_path)
    assert not tree["a"].is_deleted()


def test_readers_wait_for_who_looks(tmp_path, monkeypatch):
    """To look is to lock; and not for ever."""
    there = to_disk(make(), directory=tmp_path)
    del there
    (state,) = manifest.states_in(tmp_path)
    monkeypatch.setattr(locks, "MOST_SECONDS", 0.0)
    template = oo.eval_shape(make)
    with locks.alone(state) as nobody:
        assert nobody
        with pytest.raises(OSError, match=r"has held .*readers for 0 seconds\. Wait"):
            oo.reload_states(template, directory=tmp_path)
    assert values(oo.reload_states(template, directory=tmp_path)) == {1.0}


def test_directory_that_is_removed_meanwhile(tmp_path):
    """Its lock is not waited for."""
    directory = tmp_path / "states"
    directory.mkdir()
    with (
        pytest.raises(FileNotFoundError, match="it is gone"),
        locks.directory(tmp_path / "none"),
    ):
        pass
    assert locks.share(directory / "state-0123456789abcdef") is None


def test_directories_by_any_name(tmp_path, monkeypatch):
    """A state is in one place, whatever leads there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real dir").mkdir()
    (tmp_path / "link").symlink_to("real dir")
    names = [
        f"/{tmp_path}/slashes",
        f"{tmp_path}//x//slashes/",
        "relative/a b",
        "./relative/../real dir",
        Path("ü%20\n"),
    ]
    for name in names:
        there = to_disk(make(), directory=name)
        assert there["a"].directory == os.path.realpath(name)
        assert values(oo.reload_states(there)) == {1.0}
        assert not list(Path(name).iterdir())
    there = to_disk(make(), directory="link")
    assert to_disk(there, directory="real dir")["a"] is there["a"]
    monkeypatch.chdir("/")
    (tmp_path / "link").unlink()
    assert values(oo.reload_states(there)) == {1.0}


@pytest.mark.parametrize("part", ["x.__lock", "back\\slash", os.fsdecode(b"bad\xff")])
def test_names_that_tensorstore_does_not_write_to(tmp_path, part):
    """Found before anything is made."""
    tree = make()
    message = "tensorstore writes to no directory with .* in its path: it takes backsl"
    with pytest.raises(ValueError, match=message):
        to_disk(tree, directory=tmp_path / part / "states")
    assert not tree["a"].is_deleted()
    assert not list(tmp_path.iterdir())


def test_state_that_cannot_be_made(tmp_path, monkeypatch):
    """Nothing of it stays behind."""
    monkeypatch.setattr(StateFiles, "open", lambda *_, **__: 1 / 0)
    tree = make()
    with pytest.raises(ZeroDivisionError):
        to_disk(tree, directory=tmp_path)
    assert not list(tmp_path.iterdir())
    assert kinds(tree) == {"a": "device", "b": "device"}


def test_tree_that_is_back_already(tmp_path):
    """Its files are removed, and nothing is lost: the words say so."""
    there = to_disk(make() | {"n": 3}, directory=tmp_path)
    part = oo.reload_states(there, "a")
    # Until all is back, a leaf can be read again.
    assert values({"a": oo.reload_states(there, "a")["a"]}) == {1.0}
    oo.reload_states(part)
    for again in (
        lambda: oo.reload_states(there),
        lambda: oo.reload_states(part),
        lambda: oo.offload_states(there),
        lambda: to_disk(there, directory=tmp_path),
    ):
        with pytest.raises(ValueError, match=r"brought back from disk already, and th"):
            again()
    assert not list(tmp_path.iterdir())


def test_all_files_are_gone(tmp_path):
    """All leaves are named, and none is said to be there."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = jax.device_put(make(), sharding)
    there = to_disk(tree, directory=tmp_path / "states")
    (tmp_path / "states").rename(tmp_path / "elsewhere")
    message = r"'a', 'b': on disk, and cannot be read\. If their files are missing or"
    with pytest.raises(oo.OffloadError, match=message) as caught:
        oo.reload_states(there)
    assert "All other leaves" not in str(caught.value)
    (tmp_path / "elsewhere").rename(tmp_path / "states")
    assert values(oo.reload_states(caught.value.tree)) == {1.0}


def test_files_of_leaves_that_were_not_tried(tmp_path, monkeypatch):
    """An error about one leaf says of the others what is true."""
    monkeypatch.setattr("optax_offload._states.states.DISK_WINDOW_BYTES", 1)
    tree = {name: jnp.full(3, float(n)) for n, name in enumerate("abcd")}
    there = to_disk(tree, directory=tmp_path)
    for number in (1, 3):
        (file,) = tmp_path.glob(f"state-*/{number}/c.*")
        file.unlink()
    message = (
        r"Not moved: 3 \('b', 'c', 'd'\)\. 'b', 'd': on disk, and cannot be read\. .* "
        r"take them from a checkpoint\. All other leaves are there"
    )
    with pytest.raises(oo.OffloadError, match=message):
        oo.reload_states(there)

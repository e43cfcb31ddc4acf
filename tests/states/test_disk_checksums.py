"""Files that are whole, and in the wrong place: found, and named."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_manifest import sealed

import optax_offload as oo
from optax_offload._ground import trees
from optax_offload._states import manifest, zarr

pytest.importorskip("tensorstore", reason="needs the extra disk")

to_disk = functools.partial(oo.offload_states, memory_kind="disk", block=True)
FOREIGN = (
    r"c\.[\d.]+ is whole, but not what was written there: it is a part of another leaf"
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(zarr, "MOST_CHUNK_BYTES", 64)


def make(step=0):
    """Leaves of the same shapes, of which no two are the same, in many chunks."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    matrix = jnp.arange(8 * 12.0).reshape(8, 12) + 1000 * step
    return {
        "a": matrix,
        "b": -matrix,
        "key": jax.random.key(step),
        "keys": jax.random.key(step + 100),
        "sharded": jax.device_put(2 * matrix, NamedSharding(mesh, P("x"))),
        "scalar": jnp.float32(step),
    }


def park(directory):
    """A state of now in a directory, one of before beside it, and its template."""
    before = to_disk(make(0), directory=directory)
    shutil.copytree(before["a"].files.path, directory.parent / "before")
    oo.reload_states(before)
    there = to_disk(make(1), directory=directory)
    sharding = {name: x.sharding for name, x in make().items()}
    template = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding[name])
        for name, x in make().items()
    }
    return there, template


def folder(there, name):
    """Where a leaf's files are."""
    return there[name].files.path / str(there[name].entry.number)


def swap(one, other):
    """One gets the name of the other."""
    aside = one.parent / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def of_before(there, name):
    """The same leaf of the older state."""
    return there[name].files.path.parent.parent / "before" / folder(there, name).name


def older_chunk(there, name, number):
    """One chunk of the older state in the place of a newer."""
    file = sorted(folder(there, name).glob("c.*"))[number]
    shutil.copy(of_before(there, name) / file.name, file)


def older_leaf(there, name):
    """All files of the older state."""
    shutil.copytree(of_before(there, name), folder(there, name), dirs_exist_ok=True)


def two_chunks(there, name):
    """Within one leaf."""
    first, *_, last = sorted(folder(there, name).glob("c.*"))
    swap(first, last)


# What is done to the files, and the leaves that are not as they were written.
KINDS = {
    "swapped leaves": (lambda t: swap(folder(t, "a"), folder(t, "b")), "ab"),
    "swapped keys": (
        lambda t: swap(folder(t, "key"), folder(t, "keys")),
        ["key", "keys"],
    ),
    "an older chunk": (lambda t: older_chunk(t, "a", 3), "a"),
    "an older shard": (lambda t: older_chunk(t, "sharded", 5), ["sharded"]),
    "an older leaf": (lambda t: older_leaf(t, "b"), "b"),
    "an older scalar": (lambda t: older_leaf(t, "scalar"), ["scalar"]),
    "an older state": (lambda t: [older_leaf(t, name) for name in make()], make()),
    "swapped chunks": (lambda t: two_chunks(t, "a"), "a"),
    "a chunk of another leaf": (
        lambda t: shutil.copy(folder(t, "b") / "c.1.0.0", folder(t, "a") / "c.1.0.0"),
        "a",
    ),
}


@pytest.mark.parametrize("by", ["placeholder", "template"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_in_the_wrong_place(tmp_path, kind, by):
    """Each chunk is right for itself; what it is a part of is checked too."""
    there, template = park(tmp_path / "states")
    act, wrong = KINDS[kind]
    act(there)
    tree, kw = (there, {})
    if by == "template":
        tree, kw = template, {"directory": tmp_path / "states"}
    for name in make():
        if name in wrong:
            with pytest.raises(oo.OffloadError, match=FOREIGN) as caught:
                oo.reload_states(tree, name, donate=False, **kw)
            assert f"{name!r}: on disk, and cannot be read" in str(caught.value)
        else:
            back = oo.reload_states(tree, name, donate=False, **kw)
            assert bits([back[name]]) == bits([make(1)[name]])
    # All at once: every leaf that is not what it was is named.
    with pytest.raises(oo.OffloadError) as caught:
        oo.reload_states(tree, donate=False, **kw)
    lost = str(caught.value).split(": on disk, and cannot")[0].split(". ")[-1]
    assert lost == trees.listed(sorted(name for name in make() if name in wrong))


def test_only_what_is_read_is_checked(tmp_path):
    """Of a leaf whose other chunks are not asked for here, as on another host."""
    there, _ = park(tmp_path / "states")
    files, entry = there["a"].files, there["a"].entry
    older_chunk(there, "a", 3)
    files.open([entry])
    checksums = files._checksums[entry.number]
    checksums.check([slice(0, 3), slice(None)])
    checksums.check([slice(4, None), slice(None)])
    with pytest.raises(ValueError, match=FOREIGN):
        checksums.check([slice(2, 4), slice(4, 8)])
    checksums.check([slice(3, 3), slice(None)])


def test_equal_content_is_equal(tmp_path):
    """Two leaves of the same numbers may be swapped: nothing is wrong then."""
    tree = {"a": jnp.ones(3), "b": jnp.ones(3) * 1}
    there = to_disk(tree, directory=tmp_path)
    swap(folder(there, "a"), folder(there, "b"))
    np.testing.assert_array_equal(oo.reload_states(there)["a"], np.ones(3))


def test_on_another_mesh(tmp_path):
    """Chunks are checked wherever they go."""
    there, template = park(tmp_path / "states")
    del there
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    for spec in (P("x", "y"), P("y"), P(None, "x"), P()):
        for name in ("a", "sharded"):
            x = template[name]
            template[name] = jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            )
        back = oo.reload_states(template, directory=tmp_path / "states", donate=False)
        assert bits(back) == bits(make(1))


def test_manifest_without_checksums(tmp_path):
    """Of version 1: it is read as that version was, each chunk for itself."""
    there, template = park(tmp_path / "states")
    swap(folder(there, "a"), folder(there, "b"))
    del there
    file = tmp_path / "states" / "manifest.json"
    table = json.loads(file.read_text()) | {"version": 1}
    for leaf in table["leaves"]:
        del leaf["checksums"]
    file.write_text(sealed(table))
    back = oo.reload_states(template, directory=tmp_path / "states")
    np.testing.assert_array_equal(back["a"], make(1)["b"])
    np.testing.assert_array_equal(back["scalar"], make(1)["scalar"])


@pytest.mark.parametrize(
    ("checksums", "message"),
    [
        (None, "it must be hexadecimal digits, 8 for each chunk"),
        ("AB" * 4, "it must be hexadecimal digits, 8 for each chunk"),
        (7, "it must be hexadecimal digits, 8 for each chunk"),
        ("", r"checksums has 0 digits; it must have 8 for each of 8 chunks"),
        ("0" * 65, r"checksums has 65 digits; it must have 8 for each of 8 chunks"),
    ],
)
def test_manifest_of_wrong_checksums(tmp_path, checksums, message):
    """Checked before they are believed."""
    there, template = park(tmp_path / "states")
    del there
    file = tmp_path / "states" / "manifest.json"
    table = json.loads(file.read_text())
    table["leaves"][0]["checksums"] = checksums
    file.write_text(sealed(table))
    with pytest.raises(ValueError, match=rf"damaged: leaves\[0\]\.{message}|{message}"):
        oo.reload_states(template, directory=tmp_path / "states")


def test_manifest_has_them(tmp_path):
    """The last four bytes of each file, in row-major order."""
    there, _ = park(tmp_path / "states")
    table = json.loads((tmp_path / "states" / manifest.FILE_NAME).read_text())
    leaf = next(leaf for leaf in table["leaves"] if leaf["path"] == "sharded")
    rows, columns = (
        n // part for n, part in zip(leaf["shape"], leaf["chunk"], strict=True)
    )
    text = "".join(
        (folder(there, "sharded") / f"c.{i}.{j}.0").read_bytes()[-4:].hex()
        for i in range(rows)
        for j in range(columns)
    )
    assert leaf["checksums"] == text

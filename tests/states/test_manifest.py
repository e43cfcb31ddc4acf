"""What is read from disk is input: a manifest is checked before it is believed."""

import contextlib
import gc
import hashlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_offload as oo

pytest.importorskip("tensorstore", reason="needs the extra disk")


def make():
    """A random key and a matrix."""
    return {"key": jax.random.key(5), "w": jnp.arange(12.0).reshape(3, 4)}


def write_state(directory):
    """A complete state to which no tree refers, and a template of it."""
    tree = oo.offload_states(
        make(), memory_kind="disk", directory=directory, block=True
    )
    del tree
    return oo.eval_shape(make)


def sealed(table):
    """The text of a manifest with the hash that it should have."""
    table = {"version": 1} | table
    table.pop("sha256", None)
    text = json.dumps(table, sort_keys=True)
    return json.dumps(table | {"sha256": hashlib.sha256(text.encode()).hexdigest()})


@contextlib.contextmanager
def manifest_of(directory):
    """A template of a complete state, and its manifest, which may be changed."""
    template = write_state(directory)
    file = directory / "manifest.json"
    table = json.loads(file.read_text())
    yield template, table
    file.write_text(sealed(table))


def everything(directory):
    """What a directory holds, bytes and all."""
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None
        for p in directory.rglob("*")
    }


@pytest.mark.parametrize("state", ["absolute", "..", "../thesis", "", ".", 3, None])
def test_state_that_leads_elsewhere(tmp_path, state):
    """A name that is read never leads out of the directory: nothing is removed."""
    directory, victim = tmp_path / "shared", tmp_path / "thesis"
    victim.mkdir()
    (victim / "chapter1.tex").write_text("years of work")
    template = write_state(directory)
    file = directory / "manifest.json"
    table = json.loads(file.read_text())
    for leaf in table["leaves"]:
        path = directory / table["state"] / str(leaf["number"])
        leaf["number"] = os.path.relpath(path, victim)
    table["state"] = str(victim) if state == "absolute" else state
    file.write_text(sealed(table))
    before = everything(tmp_path)
    message = r"manifest\.json is damaged: state is .*; it must be 'state-' and 16 hex"
    with pytest.raises(ValueError, match=message):
        oo.reload_states(template, directory=directory)
    assert everything(tmp_path) == before


def test_state_that_is_a_link(tmp_path):
    """To another directory: not followed, neither to read nor to remove."""
    directory, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    template = write_state(directory)
    (state,) = directory.glob("state-*")
    state.rename(elsewhere)
    state.symlink_to(elsewhere)
    before = everything(tmp_path)
    with pytest.raises(ValueError, match=r"is damaged: .*state-\w+ is not a directory"):
        oo.reload_states(template, directory=directory)
    # A new state replaces the manifest, and leaves the link and what it names alone.
    there = oo.offload_states(make(), memory_kind="disk", directory=directory)
    oo.reload_states(there)
    after = everything(tmp_path)
    assert {name: after.get(name) for name in before if "elsewhere" in name} == {
        name: content for name, content in before.items() if "elsewhere" in name
    }
    assert state.is_symlink()


@pytest.mark.parametrize("version", [None, 3])
def test_manifest_of_another_version(tmp_path, version):
    """It is not damaged, and nothing of it is guessed or removed."""
    with manifest_of(tmp_path) as (template, table):
        assert table["version"] == 2
        table |= {"version": version}
    before = everything(tmp_path)
    message = (
        rf"manifest\.json is of version {version}, and this optax_offload reads "
        r"versions 1 and 2\. Nothing was read and nothing removed\. Read it with"
    )
    with pytest.raises(ValueError, match=message):
        oo.reload_states(template, directory=tmp_path)
    assert everything(tmp_path) == before


def test_leaf_of_another_directory(tmp_path):
    """A number is a number, not a path to read from."""
    with manifest_of(tmp_path) as (template, table):
        table["leaves"][0]["number"] = "/etc"
    message = r"leaves\[0\]\.number is '/etc'; it must be a whole number, at least 0"
    with pytest.raises(ValueError, match=message):
        oo.reload_states(template, directory=tmp_path)


WRONG = [
    ("path", 3, "must be a string"),
    ("key_path", 3, "must be a string"),
    ("number", -1, "must be a whole number"),
    ("number", True, "must be a whole number"),
    ("number", 0.0, "must be a whole number"),
    ("number", 10**30, "must be below 2"),
    ("number", 0, r"leaves\[1\] has the number of 'key', and is not the same"),
    ("dtype", None, "must be a string"),
    ("dtype", "float99", r"'w' is float99\[3, 4\] there, not"),
    ("global_shape", "34", "must be a list of whole numbers"),
    ("global_shape", [3, -4], "must be a list of whole numbers"),
    ("global_shape", [4, 3], "it must be its global_shape"),
    ("weak_type", 1, "must be true or false"),
    ("key", 7, "must be a string or null"),
    ("key", "fry", r"what it says of 'w' is not how float32\[3, 4\] is stored"),
    ("shape", [3, 4, 1], "it must be its global_shape"),
    ("shape", [True, 4], "must be a list of whole numbers"),
    ("itemsize", 0, "must be a positive number"),
    ("itemsize", 8, r"what it says of 'w' is not how float32\[3, 4\] is stored"),
    ("chunk", [3], "must be a part of its shape"),
    ("chunk", [0, 4], "must be a part of its shape"),
    ("chunk", [3, 2**40], "must be a part of its shape"),
    ("chunk", None, "must be a list of whole numbers"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_wrong_fields(tmp_path, field, value, message):
    """Each is named, with what it is and what it must be; nothing is touched."""
    with manifest_of(tmp_path) as (template, table):
        table["leaves"][1][field] = value
    before = everything(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        oo.reload_states(template, directory=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", "no_such"), ("key", None), ("shape", [3]), ("itemsize", 8)],
)
def test_wrong_fields_of_a_random_key(tmp_path, field, value):
    """Its implementation and its numbers must be those of the template's dtype."""
    with manifest_of(tmp_path) as (template, table):
        entry = table["leaves"][0]
        entry[field] = value
        if field == "shape":
            entry["chunk"] = value
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: "):
        oo.reload_states(template, directory=tmp_path)


@pytest.mark.parametrize("field", [field for field, *_ in WRONG[2:]])
def test_missing_fields(tmp_path, field):
    """Each is named."""
    with manifest_of(tmp_path) as (template, table):
        del table["leaves"][1][field]
    with pytest.raises(ValueError, match=rf"damaged: leaves\[1\]\.{field} is missing"):
        oo.reload_states(template, directory=tmp_path)


DEPTH = 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * DEPTH + "]" * DEPTH, "nested too deeply|it is not JSON"),
        ('{"a":' * DEPTH + "1" + "}" * DEPTH, "nested too deeply|it is not JSON"),
        ('{"leaves": ' + "[" * 800 + "]" * 800 + "}", "its hash|nested too deeply"),
        ("", "it is not JSON"),
        ("\xff", "it is not JSON|its hash"),
        ("3", "it is 3, not an object"),
        ("[]", r"it is \[\], not an object"),
        ("{}", "its hash is not that of what it says"),
        (sealed({}), "state is None; it must be 'state-' and 16 hexadecimal digits"),
        (sealed({"state": "state-" + "0" * 16}), "leaves is None; it must be a list"),
        (
            sealed({"state": "state-" + "0" * 16, "leaves": {"a": 1}}),
            r"leaves is \{'a': 1\}; it must be a list",
        ),
        (
            sealed({"state": "state-" + "0" * 16, "leaves": [None]}),
            r"leaves\[0\] is None; it must be an object",
        ),
    ],
)
def test_texts_that_are_no_manifest(tmp_path, text, message):
    """Whatever is in the file: a ValueError that names it and says what to do."""
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        oo.reload_states(oo.eval_shape(make), directory=tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)
    assert "Nothing was read and nothing removed" in str(caught.value)


def test_a_path_that_is_there_twice(tmp_path):
    """With the same keys: which of the two is not known."""
    with manifest_of(tmp_path) as (template, table):
        table["leaves"].append(table["leaves"][1])
    with pytest.raises(ValueError, match=r"damaged: leaves\[2\]\.path is 'w' again"):
        oo.reload_states(template, directory=tmp_path)


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_manifest_that_is_no_file(tmp_path, kind):
    """Found before anything is moved or waited for."""
    file = tmp_path / "manifest.json"
    file.mkdir() if kind == "directory" else os.mkfifo(file)
    tree = make()
    with pytest.raises(ValueError, match=r"manifest\.json is not a regular file"):
        oo.offload_states(tree, memory_kind="disk", directory=tmp_path)
    with pytest.raises(ValueError, match=r"manifest\.json is not a regular file"):
        oo.reload_states(oo.eval_shape(make), directory=tmp_path)
    assert not tree["w"].is_deleted()


def test_old_state_of_a_damaged_manifest_stays(tmp_path):
    """Until the new one is complete: until then somebody may mend the manifest."""
    template = write_state(tmp_path)
    file = tmp_path / "manifest.json"
    good = file.read_text()
    file.write_text("damaged")
    (old,) = tmp_path.glob("state-*")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(oo.OffloadError):
            oo.offload_states(
                make(), memory_kind="disk", directory=tmp_path, block=True
            )
    assert old.exists()
    file.write_text(good)
    back = oo.reload_states(template, directory=tmp_path, donate=False)
    np.testing.assert_array_equal(back["w"], make()["w"])
    gc.collect()
    file.write_text("damaged")
    there = oo.offload_states(back, memory_kind="disk", directory=tmp_path, block=True)
    assert not old.exists()
    np.testing.assert_array_equal(oo.reload_states(there)["w"], make()["w"])


def test_manifest_of_before_is_read(tmp_path):
    """Without the paths in JAX's notation, which are newer."""
    with manifest_of(tmp_path) as (template, table):
        for leaf in table["leaves"]:
            del leaf["key_path"]
    back = oo.reload_states(template, directory=tmp_path)
    np.testing.assert_array_equal(back["w"], make()["w"])


@pytest.mark.parametrize("directory", ["", "a\0b"])
def test_directory_that_names_nothing(directory):
    """An empty string was the working directory."""
    message = "which names no directory. Give one that holds this state and nothing"
    with pytest.raises(ValueError, match=message):
        oo.offload_states(make(), memory_kind="disk", directory=directory)
    with pytest.raises(ValueError, match=message):
        oo.reload_states(oo.eval_shape(make), directory=directory)


@pytest.mark.parametrize("directory", [3, b"states"])
def test_directory_that_is_no_path(directory):
    """What it must be."""
    with pytest.raises(TypeError, match="it must be a path: a string or a pathlib"):
        oo.offload_states(make(), memory_kind="disk", directory=directory)

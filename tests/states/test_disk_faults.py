"""Damage and failures on disk: a clear error, and nothing lost."""

import functools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import bits
from state_trees import files, kinds, make_tree, on_device, template_of

import optax_offload as oo
from optax_offload._states import transfers

pytest.importorskip("tensorstore", reason="needs the extra disk")

to_disk = functools.partial(oo.offload_states, memory_kind="disk")


def damaged_states(directory):
    """A way to damage each file: a byte flipped at three places, cut, gone."""
    for file in files(directory):
        content = file.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1} if content else ():
            flipped = bytearray(content)
            flipped[place] ^= 1 << random.Random(place).randrange(8)
            yield f"{file.name} flipped at {place}", file, bytes(flipped)
        for length in {0, len(content) // 2, len(content) - 1} if content else ():
            yield f"{file.name} cut to {length}", file, content[:length]
        yield f"{file.name} gone", file, None


def damaged_trees(directory):
    """A state on disk: its bits, a template of it and its placeholders."""
    tree = make_tree()
    tree = {k: x for k, x in tree.items() if isinstance(x, jax.Array) and x.size}
    before, template = bits(tree), template_of(tree)
    there = to_disk(tree, directory=directory, block=True)
    return before, template, there


@pytest.mark.parametrize(
    "by", ["placeholder", pytest.param("template", marks=pytest.mark.slow)]
)
def test_damaged_files(tmp_path, by):
    """Each file in each way: a clear error, or what was written; and mended, again."""
    before, template, there = damaged_trees(tmp_path)
    tree, kw = (
        (there, {}) if by == "placeholder" else (template, {"directory": tmp_path})
    )
    tried = errors = 0
    for name, file, damaged in damaged_states(tmp_path):
        content = file.read_bytes()
        file.unlink() if damaged is None else file.write_bytes(damaged)
        tried += 1
        back = error = None
        try:
            back = oo.reload_states(tree, donate=False, **kw)
        except (oo.OffloadError, ValueError, FileNotFoundError) as e:
            error = e
        file.write_bytes(content)
        if error is None:
            assert bits(back) == before, name
            continue
        errors += 1
        assert str(tmp_path) in str(error), "the error names the file"
        if isinstance(error, oo.OffloadError):
            arrived = [x for x in error.tree.values() if isinstance(x, jax.Array)]
            assert all(bits([x])[0] in before for x in arrived), name
    # Locks are empty, and who has placeholders needs no manifest.
    harmless = tried - errors
    print(f"{by}: {tried} tried, {errors} errors, {harmless} read right")
    assert tried > 150
    assert harmless == {"placeholder": 9, "template": 2}[by]
    if by == "template":
        del there  # As if its process had ended.
    assert bits(oo.reload_states(tree, **kw)) == before
    assert not files(tmp_path)


def test_manifest_that_says_otherwise(tmp_path):
    """Well formed, and not what was written."""
    template = template_of({"v": on_device(jnp.ones(3))})
    there = to_disk({"w": on_device(jnp.ones(3))}, directory=tmp_path, block=True)
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"w"', '"v"'))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: its hash is not"):
        oo.reload_states(template, directory=tmp_path)
    assert kinds(oo.reload_states(there)) == {"w": "device"}


def test_damage_half_way_loses_nothing(tmp_path):
    """The others are back, and the files stay."""
    tree = {f"w{i}": on_device(jnp.full(4, float(i))) for i in range(4)}
    there = to_disk(tree, directory=tmp_path, block=True)
    (file,) = tmp_path.glob("state-*/2/c.*")
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    message = (
        r"(?s)DATA_LOSS.*Not moved: 1 \('w2'\)\. 'w2': on disk, and cannot be read\. "
        r"If its files are missing or damaged it is lost: take it from a checkpoint\."
        r" All other leaves are there: this error's \.tree"
    )
    with pytest.raises(oo.OffloadError, match=message) as caught:
        oo.reload_states(there)
    now = caught.value.tree
    assert kinds(now)["w2"] == "disk"
    file.write_bytes(content)
    back = oo.reload_states(now)
    assert [float(x[0]) for x in back.values()] == [0, 1, 2, 3]
    assert not files(tmp_path)


def test_incomplete_state_is_no_state(tmp_path, monkeypatch):
    """Everything written but the manifest: the old one is what is there."""
    tree = {"w": on_device(jnp.ones(3))}
    template = template_of(tree)
    back = oo.reload_states(to_disk(tree, directory=tmp_path, block=True), donate=False)
    new = {"w": back["w"] + 1}
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no rename"))
        )
        with pytest.raises(oo.OffloadError, match="no rename") as caught:
            to_disk(new, directory=tmp_path, block=True)
    found = oo.reload_states(template, directory=tmp_path, donate=False)
    np.testing.assert_array_equal(found["w"], np.ones(3))
    # The new is not lost, and leaves the old alone when it is back.
    np.testing.assert_array_equal(
        oo.reload_states(caught.value.tree)["w"], np.full(3, 2.0)
    )
    found = oo.reload_states(template, directory=tmp_path)
    np.testing.assert_array_equal(found["w"], np.ones(3))
    assert not files(tmp_path)


def test_failing_in_the_background_gives_back_sources(tmp_path, monkeypatch, caplog):
    """As copies do."""
    monkeypatch.setattr(
        transfers,
        "write",
        lambda place: lambda move: 1 / 0 if place.path == "b" else ok(place, move),
    )

    def ok(place, move):
        wait = place.files.write(place.entry, move.source)
        return lambda: wait() or place

    tree = {"a": jnp.ones(3), "b": jnp.ones(3)}
    there = to_disk(tree, directory=tmp_path)
    with pytest.raises(oo.OffloadError, match=r"Not moved: 'b'\.") as caught:
        oo.reload_states(there)
    assert "offload_states failed for 'b'" in caplog.text
    assert kinds(caught.value.tree) == {"a": "disk", "b": "device"}
    back = oo.reload_states(caught.value.tree)
    np.testing.assert_array_equal(back["a"], np.ones(3))
    assert not files(tmp_path)

"""Public trainers' ways to build, step, save and resume, with and without offload.

Each module beside this one is a trainer, written anew in the manner of a public one.
docs/trainers.md has the lines that each needs.
"""

import pathlib
import re

import easylm
import equinox_loop
import gemma
import jax
import levanter
import lm1b
import maxtext
import nanodo
import numpy as np
import pattern
import pytest
import tunix_like

import optax_offload as oo

TRAINERS = {
    "easylm": easylm.Trainer,
    "equinox": equinox_loop.Trainer,
    "gemma": gemma.Trainer,
    "gemma, Auto axes": gemma.AutoTrainer,
    "levanter": levanter.Trainer,
    "lm1b": lm1b.Trainer,
    "maxtext": maxtext.Trainer,
    "maxtext, pure_nnx": maxtext.NnxTrainer,
    "nanodo": nanodo.Trainer,
    "tunix": tunix_like.Trainer,
}
# One that gives shardings, and two that do not.
QUICK = {"equinox", "maxtext", "tunix"}
ROOT = pathlib.Path(__file__).parent.parent.parent.parent
# Losses with and without offload: a few ulp of a step's fusions.
RTOL = 2e-6


def unchanged(inner, rules, **options):
    """In the place of `oo.offload`."""
    del rules, options
    return inner


def make(name, directory, *, offload=oo.offload, second_line=True):
    """A trainer, new or resumed from the directory."""
    return TRAINERS[name](pattern.Setup(offload, second_line, directory))


def train(trainer, steps):
    """The losses of the steps with these numbers."""
    return [float(trainer.step(pattern.batch(i))) for i in steps]


def check(trainer):
    """What is planned for the host is there, and something is."""
    report = oo.memory_report(trainer.state(), pattern.RULES, under=trainer.under)
    report.check()
    assert report.totals["pinned_host"] >= 2 * 4 * pattern.IN * pattern.OUT


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name in TRAINERS
    ],
)
def test_trains_saves_and_resumes(name, tmp_path):
    """The losses of the plain trainer, and the kinds planned, also after a restart."""
    plain_path, path = tmp_path / "plain", tmp_path / "offloaded"
    plain_path.mkdir()
    path.mkdir()
    plain = make(name, plain_path, offload=unchanged, second_line=False)
    expected = train(plain, range(5))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(plain.state())}
    assert kinds == {"device"}

    trainer = make(name, path)
    check(trainer)
    losses = train(trainer, range(3))
    check(trainer)
    trainer.save()
    resumed = make(name, path)
    check(resumed)
    losses += train(resumed, range(3, 5))
    check(resumed)
    np.testing.assert_allclose(losses, expected, rtol=RTOL)
    assert len(set(losses)) == 5


def test_one_line_is_enough_on_explicit_axes(tmp_path):
    """What NNX and Orbax leave in the memory where it is needs no second line."""
    trainer = make("gemma", tmp_path, second_line=False)
    train(trainer, range(1))
    check(trainer)
    trainer.save()
    resumed = make("gemma", tmp_path, second_line=False)
    train(resumed, range(1, 2))
    check(resumed)


@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "gemma"])
def test_without_the_second_line(name, tmp_path):
    """It is told when the step is traced, at the first or after a restart."""

    def trains_twice():
        trainer = make(name, tmp_path, second_line=False)
        train(trainer, range(1))
        trainer.save()
        train(make(name, tmp_path, second_line=False), range(1, 2))

    told = r"(?s)came to update on the device.*likeliest.*\.(place|state_shardings)\("
    with pytest.raises(oo.MemoryKindError, match=told):
        trains_twice()


@pytest.mark.parametrize(
    ("heading", "module"),
    [
        ("nanodo", nanodo),
        ("Flax: lm1b", lm1b),
        ("Flax: gemma", gemma),
        ("MaxText", maxtext),
        ("EasyLM", easylm),
        ("Levanter", levanter),
        ("tunix: PeftTrainer", tunix_like),
        ("Equinox", equinox_loop),
    ],
)
def test_the_documented_lines_are_those_tested(heading, module):
    """But for the optimizer's; at most three beside it, and no trainer is left out."""
    text = (ROOT / "docs" / "trainers.md").read_text()
    assert text.count("```diff\n-") + text.count("```diff\n+") >= len(TRAINERS)
    section = re.search(
        rf"^## {heading}\n(.*?)(^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    blocks = "".join(re.findall(r"```diff\n(.*?)```", section[1], re.DOTALL))
    added = re.findall(r"^\+(.*)$", blocks, re.MULTILINE)
    others = [line for line in added if "oo.offload(" not in line]
    assert len(others) == len(added) - 1
    assert 1 <= len(others) <= 3
    source = squeezed(pathlib.Path(module.__file__).read_text())
    assert all(squeezed(line) in source for line in others)


def squeezed(code):
    """Without what a formatter decides."""
    return re.sub(r"\s", "", code).replace(",)", ")")

"""Figures that are kept on disk: which programs are taken for the same."""

import dataclasses

import pytest

from optax_offload import aot
from optax_offload.aot import measured
from optax_offload.aot.step_times import Assumption

H100 = aot.Target("h100")
PEAK = aot.Peak(1, 2, 3, 4, 5, 6, 7, 8)
TIME = aot.StepTime(
    1.0, 0.5, 0.25, 0.125, 0.0625, 9, 10, 0.03125, (Assumption("a", "b", "c"),)
)
FITS = aot.Measured(6, PEAK, TIME)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program that is not compiled yet."""

    text: str = "program"
    options: tuple[tuple[str, bool], ...] = ()

    def as_text(self):
        """As of `jax.stages.Lowered`."""
        return self.text


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Measures a program, and says how often any was compiled by then."""
    compiled = []

    def of(lowered=Lowered(), target=H100, link=None, figures=FITS):
        def compiling(*args):
            compiled.append(args)
            return figures

        monkeypatch.setattr(measured, "lower", lambda *_, **__: lowered)
        monkeypatch.setattr(measured, "_measured", compiling)
        found = aot.measure(
            len, target=target, link_bytes_per_second=link, folder=tmp_path
        )
        return found, len(compiled)

    monkeypatch.setattr(
        measured.compilers, "own_options", lambda lowered: dict(lowered.options)
    )
    return of


@pytest.mark.parametrize(
    "figures", [FITS, aot.Measured(7, None, None)], ids=["fits", "refused"]
)
def test_what_was_compiled_is_read(measure, figures):
    """All of its figures, and that it was kept."""
    assert measure(figures=figures) == (figures, 1)
    assert measure(figures=figures) == (dataclasses.replace(figures, was_kept=True), 1)


def test_another_program_is_compiled(measure):
    """What a figure depends on is part of the name under which it is kept."""
    measure()
    others = (
        {"lowered": Lowered("another")},
        {"lowered": Lowered(options=(("xla_an_option", True),))},
        {"target": aot.Target("h200")},
        {"target": aot.Target("h100:2")},
        {"target": aot.Target("h100", memory_bytes=2**30)},
        {"link": 1e9},
        {"link": 2e9},
    )
    for count, other in enumerate(others, 2):
        found, compiled = measure(**other)
        assert not found.was_kept, other
        assert compiled == count, other
    assert measure()[1] == 1 + len(others)


def test_other_compilers_and_flags_compile_anew(measure, monkeypatch):
    """The same program may take another peak there."""
    measure()
    for name, value in (("_versions", ("jax 9",)), ("_own_digest", "0")):
        monkeypatch.setattr(measured, name, lambda value=value: value)
        found, _ = measure()
        assert not found.was_kept, name


def test_a_damaged_file_is_compiled_again(measure, tmp_path):
    """And then is a file that can be read."""
    measure()
    (file,) = tmp_path.iterdir()
    for text in ("", "[]", '{"used_bytes": 6}', file.read_text()[:-9]):
        file.write_text(text)
        assert not measure()[0].was_kept, text
        assert measure()[0].was_kept

"""The page of what was measured: made of all JSONs, and current."""

import json
import pathlib

import pytest

from benchmarks.chip import command, link, overlap, page
from optax_offload import aot
from optax_offload.aot import chips

ROOT = pathlib.Path(__file__).parent.parent.parent
HEAD = {
    "device": "NVIDIA H200",
    "target": "h200",
    "memory_bytes": 141 * 2**30,
    "devices": 1,
    "driver": {"driver_version": "580.1"},
    "host": {"processor": "X", "cores": 16, "total_bytes": 2**37, "numa_nodes": {}},
    "versions": {"jax": "0.11.2"},
    "commit": "abc",
    "date": "2026-11-24",
    "dry": False,
}


def done(**figures):
    """A case that ended well."""
    return {"outcome": "done", "figures": figures}


PEAK = {"predicted_bytes": 2**30, "predicted_host_bytes": 2**29}
TIME = {"predicted_seconds": 0.25, "tokens": 4096, "parameters": 1.3e9}


def test_the_page_is_current():
    """Made of the JSONs that are there: `python -m benchmarks.chip --page`."""
    assert page.PAGE.read_text() == page.text(page.read(command.RESULTS))


def test_what_the_package_takes_is_current():
    """The links of chips that were measured."""
    measured = json.loads(command.MEASURED.read_text())
    assert measured == link.constants(page.read(command.RESULTS))


def test_a_measured_link_is_the_chips():
    """In place of the documented one; with several nodes, the best."""
    fits = [{"bytes_per_second": b, "latency_seconds": 2e-5} for b in (20e9, 55e9)]
    nodes = {
        f"node {i}": done(fit=dict.fromkeys(["load", "store", "both"], fit))
        for i, fit in enumerate(fits)
    }
    found = link.constants(
        [
            {**HEAD, "parts": {"link": nodes}},
            {**HEAD, "target": "b200", "parts": {}},
        ]
    )
    assert found.keys() == {"h200"}
    chip = chips.with_measured(aot.CHIPS["h200"], found)
    assert (chip.link.bytes_per_second, chip.link.latency_seconds) == (55e9, 2e-5)
    assert chip.link_source == "measured on 2026-11-24, docs/on-a-chip.md"
    assert chips.with_measured(aot.CHIPS["h100"], found) is aot.CHIPS["h100"]


def test_the_readme_says_whether_a_step_was_timed():
    """Until a chip's JSON is there, and not a day longer."""
    timed = bool(page.read(command.RESULTS))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        "No step has been run or timed on a GPU" in readme.replace("*", "")
    ) != timed


def test_what_was_not_run_says_so():
    """Beside each prediction, and for each part, as where time was up."""
    parts = {
        "peaks": {"gated/fused": done(**PEAK)},
        "time": {"4096 tokens/fused": done(**TIME)},
        "largest": {
            "plain": done(
                predicted_layers=157,
                predicted_parameters=8.1e9,
                predicted_limit="device",
            ),
        },
    }
    text = page.text([{**HEAD, "parts": parts}])
    assert "## NVIDIA H200\n" in text
    assert "driver 580.1" in text
    assert "| gated | fused | 1024.0 | not run yet | 512.0 | not run yet |" in text
    assert "| 4096 tokens | 1.3 | fused | 250 | not run yet |" in text
    assert "| plain | 8.10 | device | not run yet |" in text
    assert text.endswith("\nNot run yet: Values, Link, Overlap, PyTorch.\n")
    assert page.text([]).endswith("No chip: not run yet.\n")


def test_a_part_is_the_newest_run_that_has_it():
    """A later run of some parts takes their place, and each says its commit."""
    first = {
        "peaks": {"gated/fused": done(**PEAK)},
        "time": {"4096 tokens/fused": done(**TIME, seconds=0.5)},
    }
    again = {"time": {"4096 tokens/fused": done(**TIME, seconds=0.25)}}
    older, newer = {**HEAD, "parts": first}, {**HEAD, "commit": "def", "parts": again}
    text = page.text([older, newer])
    assert text.count("## NVIDIA H200\n") == 1
    assert "2026-11-24, commit `abc`" in text
    assert "2026-11-24, commit `def`, the same versions; 1 device" in text
    _, peaks, time = text.split("\n### ")
    assert "At commit" not in peaks
    assert time.startswith("Time on NVIDIA H200\n\nAt commit `def`.\n")
    assert "| fused | 250 | 250 |" in time
    assert "| fused | 250 | 500 |" not in text
    assert "`def`" not in page.text([older])


def test_measured_beside_predicted():
    """In the units of the page, and what is out of bounds in bold."""
    parts = {
        "values": {
            "fused": done(ulps=3.0, drift=1e-5, bound="32 ulps", within=True),
            "wrong": done(ulps=99.0, bound="32 ulps", within=False),
            "broken": {"outcome": "failed", "reason": "it is\n`broken`"},
        },
        "peaks": {
            "gated/fused": done(
                **PEAK, measured_bytes=2**30 + 2**20, measured_host_bytes=None
            )
        },
        "time": {
            "4096 tokens/fused": done(
                **TIME,
                seconds=0.3,
                ratio=1.2,
                profile={"hidden_share": 0.75},
            )
        },
    }
    text = page.text([{**HEAD, "parts": parts}])
    assert "| fused | 3.00 | 1e-05 | 32 ulps | yes |" in text
    assert "| wrong | 99.00 |  | 32 ulps | **no** |" in text
    assert "- broken: failed: `it is 'broken'`" in text
    assert "| gated | fused | 1024.0 | 1025.0 | 512.0 | not counted |" in text
    assert "| 4096 tokens | 1.3 | fused | 250 | 300 | 1.20 | 75% |" in text


def test_pieces_of_a_turn_are_in_milliseconds_alone_and_in_ratios_together():
    """A column for each; what failed is left out, with its reason."""
    rows = [
        {"pieces": pieces, "seconds": 1e-3 * len(pieces)} for pieces in overlap.TOGETHER
    ]
    parts = {
        "overlap": {
            "slices, as compiled": done(rows=rows, together=overlap.together(rows)),
            "slices, no graphs": {"outcome": "failed", "reason": "no such option"},
        }
    }
    text = page.text([{**HEAD, "parts": parts}])
    assert "| form | load, ms | store | product | load + store | load + product" in text
    assert "| slices, as compiled | 1.00 | 1.00 | 1.00 | 2.00/1.00 |" in text
    assert "- slices, no graphs: failed: `no such option`" in text


def test_toys_are_for_no_page(tmp_path):
    """Where one got among the results, the page is not made."""
    table = {**HEAD, "dry": True, "parts": {}}
    (tmp_path / "cpu-abc.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="figures of toys"):
        page.read(tmp_path)

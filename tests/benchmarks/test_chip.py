"""The command that measures on a chip: parts, limits of time, resuming, all of it."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from harness import of_processes, xla_flags

from benchmarks.chip import command, largest, link, machine, overlap, record, running
from benchmarks.chip.setting import Part, Setting, SkippedError
from benchmarks.chip.training import count

ROOT = pathlib.Path(__file__).parent.parent.parent
SETTING = Setting(
    dry=True,
    target=None,
    memory_bytes=2**30,
    host_bytes=2**30,
)


def failing():
    """A case."""
    raise ValueError("on purpose")


def skipping():
    """A case."""
    raise SkippedError("not here")


def too_large():
    """A case."""
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


CASES = {
    "one": lambda: {"figure": 1},
    "skipped": skipping,
    "failed": failing,
    "large": too_large,
    "two": lambda: {"figure": 2},
}
PART = Part("toy", 1, 60, lambda setting: CASES)


def make_record(folder):
    """An empty one."""
    head = {"device": "toy", "commit": "abc"}
    return record.Record(folder, folder / "results" / "toy.json", head)


def test_cases_end_in_any_way(tmp_path):
    """Figures, a reason, an error; what comes after one is run."""
    lines = tmp_path / "toy.jsonl"
    running.run_cases(PART, SETTING, list(CASES), lines)
    found = record.entries(lines)
    outcomes = {name: entry["outcome"] for name, entry in found.items()}
    assert outcomes == {
        "one": "done",
        "skipped": "skipped",
        "failed": "failed",
        "large": "skipped",
        "two": "done",
    }
    assert found["two"]["figures"] == {"figure": 2}
    assert found["skipped"]["reason"] == "not here"
    assert found["failed"]["reason"] == "ValueError('on purpose')"
    assert found["large"]["reason"].startswith("does not fit: ")


def test_what_failed_or_did_not_end_is_missing(tmp_path):
    """What is done or skipped is not; a line that a kill cut off is none."""
    kept = make_record(tmp_path)
    lines = kept.lines("toy")
    running.run_cases(PART, SETTING, list(CASES)[:4], lines)
    record.append(lines, {"case": "two", "outcome": "started"})
    with lines.open("a") as file:
        file.write('{"case": "one", "outc')
    assert kept.missing("toy", CASES) == ["failed", "two"]
    record.append(lines, {"case": "two", "outcome": "done", "figures": {"figure": 3}})
    assert kept.missing("toy", CASES) == ["failed"]
    kept.save(["toy", "never begun"])
    table = json.loads(kept.path.read_text())
    assert table["parts"].keys() == {"toy"}
    assert table["parts"]["toy"]["two"]["figures"] == {"figure": 3}


class Process:
    """In place of the process of a part: runs cases here, until one is deadly."""

    def __init__(self, deadly=(), ended="its process ended with code -9"):
        self.deadly, self.ended, self.asked = deadly, ended, []

    def __call__(self, part, names, setting, kept, deadline):
        self.asked.append(list(names))
        for name in names:
            if name in self.deadly:
                entry = {"case": name, "outcome": "started"}
                record.append(kept.lines(part.name), entry)
                break
            running.run_cases(part, setting, [name], kept.lines(part.name))
        return self.ended


def test_what_kills_its_process_costs_itself_only(tmp_path, monkeypatch):
    """The cases after it are run in another process, and no case twice."""
    process = Process(deadly={"skipped"})
    monkeypatch.setattr(running, "_in_a_process", process)
    kept = make_record(tmp_path)
    running.run_part(PART, SETTING, kept, 60)
    assert process.asked == [list(CASES), ["failed", "large", "two"]]
    found = record.entries(kept.lines("toy"))
    assert found["skipped"]["outcome"] == "failed"
    assert found["skipped"]["reason"] == "its process ended with code -9"
    assert found["two"]["outcome"] == "done"
    # Once more: what failed, and nothing else.
    process = Process()
    monkeypatch.setattr(running, "_in_a_process", process)
    running.run_part(PART, SETTING, kept, 60)
    assert process.asked == [["skipped", "failed"]]


def test_a_part_that_cannot_begin_ends(tmp_path, monkeypatch):
    """As if its module could not be imported."""
    monkeypatch.setattr(running, "_in_a_process", lambda *_: "no module")
    kept = make_record(tmp_path)
    running.run_part(PART, SETTING, kept, 60)
    found = record.entries(kept.lines("toy"))
    assert {entry["reason"] for entry in found.values()} == {"no module"}
    assert found.keys() == CASES.keys()


def test_each_alone(tmp_path, monkeypatch):
    """A process for each case, but for toys."""
    process = Process()
    monkeypatch.setattr(running, "_in_a_process", process)
    part = Part("toy", 1, 60, lambda setting: CASES, each_alone=True)
    real = Setting(**{**vars(SETTING), "dry": False})
    running.run_part(part, real, make_record(tmp_path), 60)
    assert process.asked == [[name] for name in CASES]


@pytest.mark.parametrize("limit", ["case", "part"])
def test_what_takes_too_long_is_ended(limit, tmp_path):
    """With all that it started: by the limit of a case, or of its part."""
    code = "import subprocess; subprocess.run(['sleep', '614'])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    case_seconds = 0.3 if limit == "case" else 60
    deadline = time.monotonic() + (60 if limit == "case" else 0.3)
    told = running._watch(process, tmp_path / "lines", deadline, case_seconds)
    running._end(process)
    assert told == ("it took longer than 0 s" if limit == "case" else running._NO_TIME)
    assert process.returncode
    wait_for(lambda: not alive(process.pid))


def alive(group):
    """The processes of a group that still run."""
    stats = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats.append(path.read_text().rpartition(")")[2].split())
    return [s for s in stats if int(s[2]) == group and s[0] != "Z"]


def test_environment(monkeypatch):
    """The user's own variables stay; toys never see a device."""
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    options = {"XLA_FLAGS": "--other", "XLA_CLIENT_MEM_FRACTION": "0.9", "NEW": "1"}
    part = Part("toy", 1, 1, lambda setting: {}, environment=options)
    real = Setting(**{**vars(SETTING), "dry": False, "host_bytes": 100 * 2**30})
    found = running.environment(part, real)
    assert found["XLA_FLAGS"] == "--mine"
    assert found["NEW"] == "1"
    assert found["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "100"
    # JAX refuses both names of it.
    assert "XLA_CLIENT_MEM_FRACTION" not in found
    toy = running.environment(part, SETTING)
    assert toy["JAX_PLATFORMS"] == "cpu"
    assert "NEW" not in toy


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA H100 PCIe", "h100"),
        ("cpu", None),
    ],
)
def test_target_of(kind, target):
    """JAX's names of devices."""
    assert machine.target_of(kind) == target


def test_a_link_is_fitted():
    """The bandwidth and the latency that times were made of come out."""
    rows = [
        {"way": way, "nbytes": n, "seconds": 2e-5 + n / 50e9}
        for way in link.WAYS
        for n in link.SIZES
    ]
    found = link.fit(rows)
    for way in link.WAYS:
        assert found[way]["bytes_per_second"] == pytest.approx(50e9)
        assert found[way]["latency_seconds"] == pytest.approx(2e-5)


@pytest.mark.parametrize(("both", "each"), [(27e9, 53e9), (40e9, 40e9), (52e9, 52e9)])
def test_ways_that_take_turns_say_nothing_of_a_link(both, each):
    """Before JAX 0.12 a turn's copies are a chain, and share what one way has (F79)."""
    rates = {"load": 55e9, "store": 53e9, "both": both}
    fits = {way: {"bytes_per_second": rate} for way, rate in rates.items()}
    assert link.each_way(fits)["bytes_per_second"] == each


def test_pieces_together_are_beside_their_longest_and_their_sum():
    """What is side by side takes as long as its longest, what is in turn as the sum."""
    seconds = {"load": 1.0, "store": 2.0, "product": 4.0}
    rows = [
        {
            "pieces": pieces,
            "seconds": max(alone) if "product" in pieces else sum(alone),
        }
        for pieces in overlap.TOGETHER
        for alone in [[seconds[piece] for piece in pieces]]
    ]
    found = overlap.together(rows)
    assert found == {
        "load + store": {"over_longest": 1.5, "over_sum": 1.0},
        "load + product": {"over_longest": 1.0, "over_sum": 0.8},
        "store + product": {"over_longest": 1.0, "over_sum": 4 / 6},
        "load + store + product": {"over_longest": 1.0, "over_sum": 4 / 7},
    }


@pytest.mark.parametrize("fits", [1, 37, 80, 100, 107, 150])
def test_the_largest_is_bisected(fits, monkeypatch):
    """From a prediction of 100 layers: what is found took a step, and is near."""
    tried = []

    def process(function, **options):
        if function is largest.compiled_peaks:
            few, many = options["layers"]
            return {"device": [few, many], "host": [0, 0]}
        tried.append(options["layers"])
        taken = options["layers"] <= fits
        return {"seconds": 1.0} if taken else {"failed": "RESOURCE_EXHAUSTED"}

    monkeypatch.setattr(largest, "in_a_process", process)
    monkeypatch.setattr(largest, "TRIALS", 30)
    real = Setting(**{**vars(SETTING), "dry": False, "memory_bytes": 112})
    found = largest.search(real, "plain")
    assert found["predicted_layers"] == tried[0] == 100
    assert found["layers"] <= fits < found["failed_layers"]
    assert fits - found["layers"] <= max(1, 0.05 * fits)
    assert len(tried) <= 20
    assert found["parameters"] == count(largest.workload(found["layers"], False, False))


def test_unknown_parts_and_no_accelerator():
    """Both say what to do."""
    with pytest.raises(SystemExit, match="no part nothing; there are values, peaks"):
        command.main(["--dry", "--only=nothing"])
    with pytest.raises(SystemExit, match=r"JAX finds no accelerator here .* --dry"):
        command.main(["--only=link"])


def test_parts_fit_their_time():
    """Each at most 8 minutes, the most valuable first."""
    assert list(command.PARTS) == [
        *("values", "peaks", "link", "overlap", "time", "largest", "others")
    ]
    assert all(part.minutes <= 8 for part in command.PARTS.values())


def dry(folder, *options):
    """The command, as a user calls it, on one device; what it compiles, fast."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.chip", "--dry", f"--out={folder}", *options],
        cwd=ROOT,
        env={**os.environ, **of_processes(), "XLA_FLAGS": xla_flags(1)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(lines):
    """The cases that are done."""
    return {n for n, e in record.entries(lines).items() if e["outcome"] == "done"}


@pytest.mark.slow
def test_dry(tmp_path):
    """All parts at toy size, though a part is killed twice before."""
    killed_and_resumed(tmp_path)
    check_figures(tmp_path)


def killed_and_resumed(tmp_path):
    """What was done is kept, in the JSON too, and not done again."""
    lines, kept, before = tmp_path, set(), set()
    for _ in range(2):
        process = dry(tmp_path, "--only=values")
        (lines,) = wait_for(lambda: [*tmp_path.glob("cpu-*/values.jsonl")])
        wait_for(lambda lines=lines, kept=kept: len(ended(lines) - kept) > 1)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 143
        (table,) = tmp_path.glob("cpu-*.json")
        cases = json.loads(table.read_text())["parts"]["values"]
        assert ended(lines) == {n for n, e in cases.items() if e["outcome"] == "done"}
        assert kept < ended(lines)
        before, kept = kept, ended(lines)
    for name in before:
        began = f'"case": "{name}", "outcome": "started"'
        assert lines.read_text().count(began) == 1


def wait_for(condition):
    """Its value, once it is true."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def check_figures(tmp_path):
    """Nothing fails, and the figures are what they should be."""
    process = dry(tmp_path)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    (path,) = tmp_path.glob("cpu-*.json")
    parts = json.loads(path.read_text())["parts"]
    assert parts.keys() == command.PARTS.keys()
    figures = {
        part: {name: e["figures"] for name, e in cases.items() if "figures" in e}
        for part, cases in parts.items()
    }
    for name, found in figures["values"].items():
        assert found["within"], (name, found)
        assert found.get("as_called", True), (name, found)
        assert found.get("moved", 2) > 1
    assert all(found["finite"] for found in figures["peaks"].values())
    assert all(found["predicted_seconds"] for found in figures["time"].values())
    assert all(found["seconds"] > 0 for found in figures["time"].values())
    assert figures["largest"]["fused"]["layers"] > 0
    assert figures["link"]["any node"]["fit"]["both"]["bytes_per_second"] > 0
    for found in figures["overlap"].values():
        assert all(row["seconds"] > 0 for row in found["rows"])
        assert all(over["over_sum"] > 0 for over in found["together"].values())
    page = (tmp_path / "on-a-chip.md").read_text()
    assert "these figures mean nothing" in page
    assert "| residuals on the host |" in page
    assert "| slices, copies outside of graphs |" in page

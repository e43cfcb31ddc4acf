"""Random train steps, offloaded and fused, against plain `jax.jit`: any number of them.

`python tests/lib/fuzz.py --seeds 0:1000 --jobs 2` runs them and prints what became of
them: fused, not fused (and why), refused, chaotic, without a program, or FAILED. Each
failure is a line that runs it again:

`python tests/lib/fuzz.py --program "seed=7; modes=auto; scan=nested; ..."`

With ``--shrink`` what can be made simpler of a failure is. With ``--results FILE`` each
outcome is a line of that file, and seeds that are in it are not run again.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
# A process compiles so many seeds, then another one takes over: nothing is freed.
SEEDS_OF_A_PROCESS = 40
MOST_SECONDS = 120.0


def outcomes_of(seeds: Iterable[int], modes: int) -> Iterator[dict[str, Any]]:
    """Runs seeds in processes of their own, which may end as they like."""
    left = list(seeds)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 "
        "--xla_cpu_parallel_codegen_split_count=1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)]),
    }
    while left:
        some = left[:SEEDS_OF_A_PROCESS]
        command = [sys.executable, __file__, "--modes", str(modes), "--run"]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*command, *map(str, some)],
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            watch = threading.Timer(MOST_SECONDS * len(some), process.kill)
            watch.start()
            assert process.stdout is not None
            rest = some
            for line in process.stdout:
                if line.startswith('{"seed"'):
                    outcome = json.loads(line)
                    rest = some[some.index(outcome["seed"]) + 1 :]
                    yield outcome
            process.wait()
            watch.cancel()
            errors.seek(0)
            last = " ".join(errors.read().split())[-300:]
        if process.returncode:  # It came to its end in the first that is left.
            detail = f"the process ended with {process.returncode}: {last}"
            yield {"seed": rest[0], "kind": "FAILED", "detail": detail} | {
                "program": f"seed={rest[0]}"
            }
        left = [*rest[1:], *left[len(some) :]]


def run_here(seeds: Iterable[int], modes: int) -> None:
    """Runs seeds in this process, a line of JSON for each outcome."""
    import fuzz_compare
    import fuzz_programs
    import jax

    for seed in seeds:
        for found in fuzz_compare.run(fuzz_programs.draw(seed, modes)):
            line = {"seed": seed, "kind": found.kind, "detail": found.detail}
            print(json.dumps(line | {"program": found.drawn.text()}), flush=True)
        jax.clear_caches()


def run_program(text: str, shrink: bool) -> bool:
    """Runs one program as it was printed; whether it is as the plain one."""
    import fuzz_compare
    from fuzz_programs import Drawn

    good = True
    for found in fuzz_compare.run(Drawn.of_text(text)):
        print(found, flush=True)
        good = good and found.kind != "FAILED"
        if found.kind == "FAILED" and shrink:
            for simpler in fuzz_compare.shrink(found):
                print(simpler, flush=True)
    return good


def restarted(arguments: list[str]) -> int:
    """The command again, with the settings that JAX reads when it starts."""
    return subprocess.run([sys.executable, __file__, *arguments]).returncode


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0:100", help="as 0:1000")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--modes", type=int, default=2, help="of each seed")
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--program", help="one program, as a failure's line has it")
    parser.add_argument("--run", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_here(options.run, options.modes)
        return 0
    if options.program:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        sys.path.insert(0, str(HERE.parent.parent))
        return 0 if run_program(options.program, options.shrink) else 1
    first, end = map(int, options.seeds.split(":"))
    known: list[dict[str, Any]] = []
    if options.results and options.results.exists():
        lines = options.results.read_text().splitlines()
        known = [json.loads(line) for line in lines]
        known = [x for x in known if first <= x["seed"] < end]
    done = {x["seed"] for x in known}
    left = [seed for seed in range(first, end) if seed not in done]
    shares = [left[i :: options.jobs] for i in range(options.jobs)]
    found = list(known)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:

        def work(seeds: list[int]) -> None:
            for outcome in outcomes_of(seeds, options.modes):
                found.append(outcome)
                if options.results:
                    with options.results.open("a") as file:
                        file.write(json.dumps(outcome) + "\n")

        for each in [pool.submit(work, share) for share in shares]:
            each.result()
    return summarize(found, options.shrink)


def summarize(found: list[dict[str, Any]], shrink: bool) -> int:
    """Prints counts, why nothing was fused, and each failure."""
    print(f"{len({x['seed'] for x in found})} seeds, {len(found)} programs:")
    for kind, count in collections.Counter(x["kind"] for x in found).most_common():
        print(f"  {count:5} {kind}")
    for kind in ("not fused", "refused", "no program"):
        details = collections.Counter(
            x["detail"][:100] for x in found if x["kind"] == kind
        )
        for detail, count in details.most_common():
            print(f"  {count:5} {kind}: {detail}")
    failed = [x for x in found if x["kind"] == "FAILED"]
    for x in failed:
        print(f"FAILED: {x['detail']}\n  python {__file__} --program '{x['program']}'")
        if shrink:
            restarted(["--shrink", "--program", x["program"]])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

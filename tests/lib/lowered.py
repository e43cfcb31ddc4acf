"""The lowered text of every case: what it was, for what it is to be compared with.

`PYTHONPATH=.:tests/lib:examples python tests/lib/lowered.py` writes the digests of
today's code for the versions (of JAX, optax, Flax) that run it. They are to change only
with a commit that says what in the programs changes, and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from importlib import metadata
from typing import Any

FILE = pathlib.Path(__file__).parent / "lowered.json"
PLATFORMS = {"cpu": "v5e", "v5e": "v5e", "h100": "h100"}
LOWERED_FOR = {"cpu": "cpu", "v5e": "tpu", "h100": "cuda"}


def digest(case: Any, platform: str) -> str:
    """The digest of a case's step, lowered; no compiler is loaded."""
    import jax

    from optax_offload import aot

    chip = PLATFORMS[platform]
    grids = {1: chip, 4: f"{chip}:2x2", 8: f"{chip}:2x4"}
    numbers = {1: chip, 4: f"{chip}:4", 8: f"{chip}:8"}
    names = numbers if chip == "h100" else grids
    mesh = aot.Target(names[case.devices]).mesh()
    train = case.training()
    carry, batch = case.templates(train, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = case.jit(train.step, carry).trace(carry, batch)
        lowered = traced.lower(lowering_platforms=(LOWERED_FOR[platform],))
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


def versions() -> str:
    """The packages that have a part in what is lowered, as installed."""
    return ", ".join(f"{x} {metadata.version(x)}" for x in ("jax", "optax", "flax"))


def known() -> dict[str, str]:
    """The digests for these versions; {} if they were made for none of them."""
    return json.loads(FILE.read_text()).get(versions(), {})


def main() -> None:
    """Writes the digests of today's code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from cases import CASES

    found = {
        f"{platform}/{name}": digest(case, platform)
        for name, case in CASES.items()
        for platform in PLATFORMS
    }
    table = json.loads(FILE.read_text())
    FILE.write_text(
        json.dumps(table | {versions(): found}, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    main()

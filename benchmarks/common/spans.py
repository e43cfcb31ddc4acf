"""Spans of time in which transfers and kernels run, as a profile of a GPU has them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import jax

from optax_offload.aot._timeline import Span, length


def of_profile(log_dir: Path) -> dict[str, float] | None:
    """The seconds in which transfers ran, kernels ran, and both did.

    From the events on the streams of a GPU; None where a profile has none of them. A
    kernel that reaches into host memory itself counts as a kernel.
    """
    (path,) = log_dir.glob("**/*.xplane.pb")
    spans: dict[str, list[Span]] = {"load": [], "store": [], "kernel": []}
    with warnings.catch_warnings():
        # "builtin type event_stats has no __module__ attribute"
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    details = dict(event.stats).get("memcpy_details")
                    for kind in kinds_of(event.name, str(details or "")):
                        end = event.start_ns + event.duration_ns
                        spans[kind].append((event.start_ns / 1e9, end / 1e9))
    return None if not any(spans.values()) else shares(spans)


def kinds_of(name: str, details: str) -> list[str]:
    """What an event on a stream is: a load, a store, both, or a kernel.

    By the memories that the profiler says it moves between, not by its name: XLA copies
    slices to and from host memory with the call for copies within the device.
    """
    ends = dict(re.findall(r"kind_(src|dst):(\w+)", details))
    if ends:
        on_host = {k: v in ("pinned", "pageable") for k, v in ends.items()}
        kinds = ["load"] * on_host.get("src", False)
        kinds += ["store"] * on_host.get("dst", False)
        return kinds or ["kernel"]
    if name.startswith(("MemcpyH2D", "MemcpyD2H")):
        return ["load" if name.startswith("MemcpyH2D") else "store"]
    return [] if name.startswith("Memcpy") else ["kernel"]


def shares(spans: dict[str, list[Span]]) -> dict[str, float]:
    """Sums the spans: of each kind, of transfers, and of those beside kernels."""
    transfers = spans["load"] + spans["store"]
    found = {f"{kind}_seconds": length(own) for kind, own in spans.items()}
    found["transfer_seconds"] = length(transfers)
    found["both_ways_seconds"] = (
        found["load_seconds"] + found["store_seconds"] - length(transfers)
    )
    found["hidden_seconds"] = (
        length(transfers)
        + found["kernel_seconds"]
        - length(transfers + spans["kernel"])
    )
    if transfers:
        found["hidden_share"] = found["hidden_seconds"] / found["transfer_seconds"]
    return found

"""Measuring the link: the arithmetic, on devices whose memory is the host's."""

import itertools

import jax
import pytest

import optax_offload as oo
from optax_offload._host import link


def test_a_cpu_has_no_link():
    """What to do instead."""
    with pytest.raises(ValueError, match=r"needs an attached GPU or TPU; .* Leave the"):
        oo.measure_link()


def test_the_median_without_the_first_round(monkeypatch):
    """Bytes each way over the median second; rounding loses no array."""
    seconds = iter([100.0, 3.0, 1.0, 2.0])
    ends = itertools.chain.from_iterable((0.0, s) for s in seconds)
    monkeypatch.setattr(link.time, "perf_counter", lambda: next(ends))
    found = link._bytes_per_second(jax.local_devices()[0], 2**16, 4, 3)
    assert found == 2**16 / 2.0


def test_arrays_really_move(monkeypatch):
    """Each is loaded and stored once a round."""
    moved = []
    device_put = jax.device_put

    def noted(x, sharding):
        moved.append(sharding.memory_kind)
        return device_put(x, sharding)

    monkeypatch.setattr(link.jax, "device_put", noted)
    assert link._bytes_per_second(jax.local_devices()[0], 4096, 2, 1) > 0
    assert moved == ["pinned_host", *["device", "pinned_host"] * 4]

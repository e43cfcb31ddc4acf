"""Bytes, written for a person and read from one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_offload._ground import units


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (units.MIB, "1.00 MiB"),
        (15 * units.GIB + 3 * units.GIB // 4, "15.75 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**60, "1048576.00 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_size_text(size_bytes, text):
    """The largest unit that the number fills, up to TiB; two decimals."""
    assert units.size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1000000B", 10**6),
        ("0 B", 0),
        ("12 B", 12),
        ("70GiB", 70 * 2**30),
        ("70gib", 70 * 2**30),
        ("70Gi", 70 * 2**30),
        (" 24 GB ", 24 * 10**9),
        ("24G", 24 * 10**9),
        ("1.5KiB", 1536),
        ("0.5 T", 5 * 10**11),
        ("9007199254740993b", 2**53 + 1),
    ],
)
def test_parse_size(text, size_bytes):
    """Powers of 1024 with an i, of 1000 without; whole bytes to the last one."""
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "inf", "70 XB", "7 0", "70GiB more", "1.5.1", "i"]
)
def test_text_that_is_no_size(text):
    """What came, and how to write it."""
    with pytest.raises(ValueError, match=r"is not a size; write it as 70GiB \(2\*\*30"):
        units.parse_size(text)


@pytest.mark.parametrize("text", ["70", " 0 ", "1.5"])
def test_a_size_needs_a_unit(text):
    """With the lines to write: 70 bytes are seldom meant."""
    with pytest.raises(ValueError, match=rf"unit; write {text.strip()}GiB .*GB .*B$"):
        units.parse_size(text)


@settings(deadline=None)
@given(st.integers(0, 2**60))
def test_sizes_come_back(size_bytes):
    """To within the two decimals that are shown."""
    back = units.parse_size(units.size_text(size_bytes))
    assert abs(back - size_bytes) <= 0.005 * max(size_bytes, 1) + 1

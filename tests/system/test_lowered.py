"""Programs change when they are meant to, and not when code is moved about."""

import lowered
import pytest
from cases import CASES

pytestmark = pytest.mark.usefixtures("rank_promotion")


@pytest.mark.parametrize("name", CASES)
def test_lowered_text_is_what_it_was(name):
    """For the CPU, a v5e and an H100, in the versions that there are digests of."""
    known = lowered.known()
    if not known:
        pytest.skip(f"no digests of lowered text with {lowered.versions()}")
    got = {p: lowered.digest(CASES[name], p) for p in lowered.PLATFORMS}
    assert got == {p: known[f"{p}/{name}"] for p in lowered.PLATFORMS}, (
        "the program of this case is another one: if that is meant, say why in the "
        "commit, and write the digests anew (tests/lib/lowered.py)"
    )

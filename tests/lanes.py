"""Which tests run when: three lanes, `--lane fast`, `default` and `nightly`.

Marks and sizes for tests: `nightly` marks a test or parameters that only the nightly lane runs, `cases` says how many
cases hypothesis makes. The default lane makes few and always the same, the nightly lane many at random.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from shardviz.versions import package_version
from tests.contract import recording

if TYPE_CHECKING:
    from collections.abc import Iterable

LANES = ("fast", "default", "nightly")
FEWEST = 10
"""Cases of a generated test in the default lane."""
PART = 15
"""Of the nightly lane's cases, one in this many is made in the default lane."""
NIGHTLY_ROOMS = ("bugs", "frameworks")
"""Rooms that only the nightly lane reads: they take ten minutes, or import what the others do not require."""
FAST_ROOMS = ("check", "commands", "dump", "layout", "picture", "relate", "stamping")
NOT_FAST = ("test_cli.py", "test_display.py", "test_layout_against_torch.py", "test_layout_on_ranks.py")
"""Files that import torch, or start interpreters or ranks; the rooms that are not fast do so throughout."""
IN_A_BROWSER = "test_in_a_browser"
TORCH = tuple(map(int, re.findall("[0-9]+", package_version("torch"))[:2]))
"""The installed torch's version; tests of the offline half do not import it."""

nightly = pytest.mark.nightly
recorded = pytest.mark.recorded
"""A test of how a dump is judged, of which the contract has the dump and its verdict: by day that is judged again, and
ranks write the dump anew at night and when the contract is recorded."""


def load_profile(lane: str) -> None:
    """Let hypothesis make as many cases as the lane has time for. No machine is too slow: there are no deadlines."""
    settings.register_profile("default", deadline=None, derandomize=True, max_examples=FEWEST, print_blob=True)
    settings.register_profile("nightly", deadline=None, max_examples=PART * FEWEST, print_blob=True)
    settings.load_profile("nightly" if lane == "nightly" else "default")
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if lane != "nightly" and hasattr(providers, "_get_local_constants"):
        # Hypothesis reads all modules for numbers to try: seconds in each worker, and other cases after each edit.
        providers._get_local_constants = lambda: providers._local_constants


def cases(number: int) -> settings:
    """Let hypothesis make this many cases in the nightly lane, and a part of them in the others."""
    is_nightly = not settings().derandomize
    return settings(max_examples=number if is_nightly else max(FEWEST, number // PART))


def at_night(values: Iterable[Any], mark: pytest.MarkDecorator = nightly) -> list[Any]:
    """Return values for `parametrize` that only the nightly lane tries; a tuple is one for each of its names."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]


def since_torch(major: int, minor: int) -> pytest.MarkDecorator:
    """Skip a test of what torch can do since a version, if the installed one is older."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"needs torch {major}.{minor} or newer")


def is_read(path: Path, tests: Path, lane: str) -> bool:
    """Whether a lane has anything to do with a file or folder of tests."""
    below = path.relative_to(tests).parts if path.is_relative_to(tests) else ()
    if not below or lane == "nightly":
        return True
    if lane == "default":
        return below[0] not in NIGHTLY_ROOMS
    return (below[0] in FAST_ROOMS or path.is_file()) and path.name not in NOT_FAST


def is_of(item: pytest.Item, lane: str) -> bool:
    """Whether a test belongs to a lane. What hypothesis makes belongs to each: the nightly lane makes other cases."""
    is_recorded = item.get_closest_marker(recorded.name) is not None
    is_nightly = item.get_closest_marker(nightly.name) is not None or (is_recorded and not recording.is_on())
    if lane == "nightly":
        return is_nightly or getattr(getattr(item, "obj", None), "is_hypothesis_test", False) or _is_proof(item)
    if lane == "default":
        return not is_nightly
    return not is_nightly and item.get_closest_marker("mesh") is None and not item.name.startswith(IN_A_BROWSER)


def _is_proof(item: pytest.Item) -> bool:
    tests = Path(__file__).parent
    return item.path.is_relative_to(tests) and item.path.relative_to(tests).parts[0] in NIGHTLY_ROOMS

"""Every public bug is scored as it is written down, and its right twin stays quiet."""

from collections import Counter
from pathlib import Path

import pytest

from tests.bugs.public.catalogue import PUBLIC
from tests.bugs.public.running import outcomes_of

pytestmark = pytest.mark.bugs

IDS = [f"{public.reference}: {public.case.name}" for public in PUBLIC]
REFERENCE = Path(__file__).parents[3] / "demos" / "reference" / "README.md"


@pytest.mark.parametrize("public", PUBLIC, ids=IDS)
def test_a_public_bug_is_scored_as_written_down_and_its_right_twin_is_quiet(public, tmp_path):
    bug, twin = outcomes_of(public.case, tmp_path)
    assert twin.is_quiet != bool(public.known_alarm), f"{public.known_alarm}\n{twin.text}"
    assert bug.score == public.score, f"{public.known_gap}\n{bug.complaints}\n{bug.text}"


def test_what_is_not_named_says_what_is_not_seen():
    assert [public.reference for public in PUBLIC if (public.score != "named") != bool(public.known_gap)] == []


def test_the_reference_has_the_score():
    text = " ".join(REFERENCE.read_text().split())
    scores = Counter(public.score for public in PUBLIC)
    found = scores.total() - scores["missed"]
    assert f"Of {scores.total()} cases {found} are found, {scores['named']} of them rightly named" in text
    assert [public.case.name for public in PUBLIC if public.known_gap and f"| {public.case.name} |" not in text] == []

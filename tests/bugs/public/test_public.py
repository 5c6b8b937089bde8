"""Every public bug is scored as it is written down, and its right twin stays quiet."""

import pytest

from tests.bugs.public.catalogue import PUBLIC
from tests.bugs.public.running import outcome_of

pytestmark = pytest.mark.bugs

IDS = [f"{public.reference}: {public.case.name}" for public in PUBLIC]


@pytest.mark.parametrize("public", PUBLIC, ids=IDS)
def test_a_public_bug_is_found_and_named_as_written_down(public, tmp_path):
    outcome = outcome_of(public.case, tmp_path, right=False)
    assert outcome.score == public.score, f"{public.known_gap}\n{outcome.complaints}\n{outcome.text}"


@pytest.mark.parametrize("public", PUBLIC, ids=IDS)
def test_its_right_twin_gives_no_finding(public, tmp_path):
    outcome = outcome_of(public.case, tmp_path, right=True)
    assert outcome.is_quiet, outcome.text


def test_what_is_not_named_says_what_is_not_seen():
    assert [public.reference for public in PUBLIC if (public.score != "named") != bool(public.known_gap)] == []

"""One verdict on a tensor wherever it is told, with one glyph."""

from __future__ import annotations

from typing import get_args

import pytest

from shardviz.check.verdicts import WORDS, Verdict, worst
from shardviz.picture.text.terminal import ASCII, UNICODE, Glyphs


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_every_verdict_has_a_glyph_and_a_word_of_its_own(glyphs: Glyphs) -> None:
    verdicts = get_args(Verdict)
    assert tuple(WORDS) == verdicts
    assert len({glyphs.of(verdict) for verdict in verdicts}) == len({*WORDS.values()}) == len(verdicts)


def test_what_is_wrong_counts_more_than_what_is_not_known_and_that_more_than_order() -> None:
    assert worst(["good", "unknown", "error", "warning"]) == "error"
    assert worst(["good", "unknown", "good"]) == "unknown"
    assert worst(["pending", "pending"]) == "pending"
    assert worst([]) == "good"

"""Names that differ while the values are equal: in all tensors, or in some."""

from __future__ import annotations

import pytest

from shardviz.checkpoint.comparing.all_tensors.moves import changed_words


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a.b.w", "a.module.b.w"), ("", "module.")),
        (("module.a.w", "a.w"), ("module.", "")),
        (("a.q.w", "a.query.w"), ("q.", "query.")),
        (("a.a.w", "a.a.a.w"), ("", "a.")),
    ],
)
def test_the_words_that_names_differ_by(names, words):
    assert changed_words(*names) == words

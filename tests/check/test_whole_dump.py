"""Intended layouts that cannot be read."""

from __future__ import annotations

import re

import pytest

from shardviz.errors import NotationError
from shardviz.live.dumping import check_intended


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[*] order 0: 0 2", "'0 2' does not name every block from 0 once"),
        ("[*] order 0: view(2, 3).transpose(1, 2)", "transposes dim 2 of 2"),
        ("[*] order 0: backwards", "'backwards' does not name every block from 0 once"),
    ],
)
def test_an_order_that_cannot_be_read_is_refused_before_a_run(text: str, why: str) -> None:
    with pytest.raises(NotationError, match=re.escape(why)):
        check_intended({"w": text})

"""`pytest -p tests.contract.asserted tests/testing`: writes which test proves a cause that only failed assertions have.

It stands in front of what writes the text of a failed assertion, in this process and on the ranks of tests, whose fork
server imports it, too. `asserted.txt` gets each cause that no recorded case has, with the first test that is told it.
"""

from __future__ import annotations

import os
import tempfile
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardviz.testing.assertions.message as message
from shardviz.explain.pages import CATALOGUE
from shardviz.live import world
from tests.contract.__main__ import ASSERTED, asserted, causes_of_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.explain.finding import Finding

SEEN = "SHARDVIZ_ASSERTED"
"""The file to which every rank adds the causes that it is told."""

tests: dict[str, str] = {}
"""The first test that was told each cause."""

_in_words = message.in_words


@wraps(_in_words)
def in_words(dump: Any, whole: Sequence[Finding], *args: Any, **named: Any) -> str:
    """Add the causes of what is told to the file; return the text."""
    with Path(os.environ.get(SEEN, os.devnull)).open("a") as file:
        file.writelines(f"{finding.explanation.id}\n" for finding in whole)
    return _in_words(dump, whole, *args, **named)


if SEEN in os.environ:  # on ranks
    message.in_words = in_words


def pytest_configure() -> None:
    os.environ[SEEN] = tempfile.mkstemp()[1]
    message.in_words = in_words
    world.prepare("spawn", also=(__name__,))


def pytest_runtest_logfinish(nodeid: str) -> None:
    for cause in Path(os.environ[SEEN]).read_text().splitlines():
        tests.setdefault(cause, nodeid.partition("[")[0].removeprefix("tests/"))


def pytest_sessionfinish() -> None:
    told = asserted() | tests
    alone = sorted(told.keys() & CATALOGUE.keys() - causes_of_cases())
    ASSERTED.write_text("".join(f"{cause}: {told[cause]}\n" for cause in alone))

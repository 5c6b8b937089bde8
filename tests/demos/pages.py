"""Pages whose commands are run: a fence of a page says what to type and what that prints, or what stands in a file.

    ```console            each line after `$ ` is a command; what follows is what it prints, stdout and stderr together
    ```console needs X    the same, run by the nightly lane, if the library X is installed
    ```ipython            cells, `In [1]: ...`, that a kernel runs one after the other; what follows is what it answers
    ```python model.py    the file model.py, whole; it is there before the commands that follow

A picture of the page is what its commands write under that name. Other fences are for reading only. Seconds, rounding
errors, addresses and torch's version vary from run to run, and may differ from the page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FENCE = re.compile(r"^```(console(?: needs \w+)?|ipython|python [\w.]+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ (.*)\n", re.MULTILINE)
CELL = re.compile(r"^(In \[[0-9]+\]: .*\n(?: +\.{3,}:.*\n)*)", re.MULTILINE)
PROMPT = re.compile(r"^(?:In \[[0-9]+\]| +\.{3,}): ?", re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^):]+\.svg)\)")
VARIES = (
    (re.compile(r"\btorch \d+\.\d+\.\d+[\w.+]*"), "torch VERSION"),
    (re.compile(r"\b\d+\.\d+ ?s\b"), "SECONDS"),
    (re.compile(r"\bwithin (0|\d+(\.\d+)?e-\d+)\b"), "within ROUNDING"),
    (re.compile(r"\b0x[0-9a-f]+\b"), "ADDRESS"),
    (re.compile(r"\bDeviceMesh\(.*\)$", re.MULTILINE), "MESH"),  # torch 2.6 shows one otherwise
    (re.compile(r"=+ warnings summary =+\n.*\n.*DTensor random operators(.*\n)+?-- Docs: .*\n"), ""),  # as 2.6 warns
    (re.compile(r"(?<=passed), 1 warning(?= in)"), ""),
)


@dataclass(frozen=True, slots=True)
class Step:
    """What a reader does: types a command, runs a cell, or looks at a file.

    Attributes:
        command: A line for a shell; empty for the others.
        file: The file's name; empty for the others.
        text: What the page says that the command or the cell prints, or that stands in the file.
        needs: The library that the command needs besides what tests need; empty for none.
        cell: The cell with its prompts; empty for the others.
    """

    command: str
    file: str
    text: str
    needs: str = ""
    cell: str = ""

    @property
    def code(self) -> str:
        """The Python of a cell."""
        return PROMPT.sub("", self.cell)

    @property
    def typed(self) -> str:
        """The line or the cell that is typed, as the page has it; empty for a file."""
        return f"$ {self.command}\n" if self.command else self.cell


def steps(page: str) -> list[Step]:
    """Return what a reader of the page does, in its order."""
    return [step for kind, body in FENCE.findall(page) for step in _steps(kind, body)]


def pictures(page: str) -> list[str]:
    """Return the paths of the pictures in a page, as it gives them."""
    return PICTURE.findall(page)


def rewritten(page: str, texts: Iterable[str]) -> str:
    """Return the page with these texts for its steps, in its order; its own where they differ only in what varies."""
    new = iter(texts)

    def text_of(step: Step) -> str:
        text = next(new)
        return step.text if same(step.text, text) else text

    def fence(found: re.Match[str]) -> str:
        own = _steps(found[1], found[2])
        body = "".join(step.typed + text_of(step) for step in own)
        return f"```{found[1]}\n{body}```"

    return FENCE.sub(fence, page)


def same(one: str, other: str) -> bool:
    """Whether two outputs are the same but for what varies."""
    return without_what_varies(one) == without_what_varies(other)


def without_what_varies(text: str) -> str:
    """Return an output with words in place of what varies from run to run."""
    for pattern, word in VARIES:
        text = pattern.sub(word, text)
    return text


def _steps(kind: str, body: str) -> Iterator[Step]:
    if kind.startswith("python"):
        yield Step("", kind.partition(" ")[2], body)
        return
    is_cells = kind == "ipython"
    before, *found = (CELL if is_cells else COMMAND).split(body)
    assert not before, f"a fence of {kind} begins with what is typed, not with {before!r}"
    for typed, text in zip(found[::2], found[1::2], strict=True):
        yield Step("", "", text, cell=typed) if is_cells else Step(typed, "", text, kind.partition(" needs ")[2])

"""The text of a failed assertion, always in one form: what is wrong, claimed / held / intended, a picture, the fix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.testing.assertions import current
from shardviz.text import fold, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.finding import Finding
    from shardviz.dump.dump import Dump, Tensor

MAX_TOLD = 3
"""Findings that are told in full; of the others, the names."""
WIDTH = 100
INDENT = 2
COLUMN = 10


class ShardAssertionError(AssertionError):
    """An assertion about where numbers are does not hold. Its text is the whole story."""

    __module__ = "shardviz.testing"


def raise_for(dump: Dump | None, findings: Sequence[Finding]) -> None:
    """Raise if there are findings; in a job of the user's own, on all ranks but the first in a line.

    Args:
        dump: What they are about, for the pictures.
        findings: Worst first.

    Raises:
        ShardAssertionError: There are findings.
    """
    __tracebackhide__ = True
    if findings:
        text = tell(dump, findings)
        rank = _rank_in_job()
        raise ShardAssertionError(text if not rank else f"{text.splitlines()[0]} (rank 0 tells the whole)")


def _rank_in_job() -> int:
    """Return the rank of this process in a job of the user's own; 0 where pytest runs ranks, or there are none."""
    distributed = sys.modules.get("torch.distributed")
    if current.is_told_once.get() or distributed is None or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


def tell(dump: Dump | None, findings: Sequence[Finding]) -> str:
    """Return the text for findings: the first ones in full, those of identical layers once."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_alike(finding), []).append(finding)
    told = list(groups.values())
    parts = [_told(dump, group) for group in told[:MAX_TOLD]]
    if rest := [finding.tensor for group in told[MAX_TOLD:] for finding in group]:
        parts.append(f"and {len(rest)} more: {_names(rest)}")
    return "\n\n".join(parts)


def _alike(finding: Finding) -> tuple[object, ...]:
    name = finding.tensor
    texts = (finding.summary, finding.cause, finding.fix, *finding.also)
    layouts = (finding.claimed, finding.held, finding.intended)
    return finding.kind, finding.ranks, *layouts, *(text.replace(name, "") if name else text for text in texts)


def _told(dump: Dump | None, group: Sequence[Finding]) -> str:
    first = group[0]
    names = _names([finding.tensor for finding in group]) if first.tensor else first.kind
    lines = [f"{names}: {printable(first.summary)}"]
    rows = (
        ("ranks", _ranks(first)),
        ("claimed", first.claimed),
        ("held", first.held),
        ("intended", first.intended),
    )
    lines += [f"{'':{INDENT}}{title:<{COLUMN}}{printable(text)}" for title, text in rows if text]
    if picture := _picture(dump, first.tensor):
        lines += ["", *picture, ""]
    others = [("or", text) for text in first.also]
    advice = (("cause", first.cause), ("fix", first.fix), *others, ("see", ", ".join(first.refs)))
    lines += [f"{'':{INDENT}}{title:<{COLUMN}}{printable(text)}" for title, text in advice if text]
    return "\n".join(lines)


def _picture(dump: Dump | None, name: str) -> list[str]:
    """Draw a tensor as `shardviz show` does, where there is something to draw."""
    tensor = _find(dump, name) if dump is not None and name else None
    if dump is None or tensor is None or not (tensor.claimed or tensor.moment == "stamped"):
        return []
    from shardviz.picture.model.subject import of_tensor
    from shardviz.picture.text.page import picture_lines
    from shardviz.picture.text.terminal import Terminal

    terminal = Terminal(WIDTH)
    try:
        text = terminal.render(picture_lines(of_tensor(dump, tensor, name), terminal))
    except ShardvizError as error:
        return [f"{'':{INDENT}}no picture: {error.message}"]
    return [f"{'':{INDENT}}{line}".rstrip() for line in text.rstrip().splitlines()]


def _find(dump: Dump, name: str) -> Tensor | None:
    return next((tensor for tensor in dump.tensors if name in tensor.names), None)


def _names(names: Sequence[str]) -> str:
    ordered = sorted(names, key=natural_key)
    return printable(", ".join(str(folded) for folded, _ in fold((name, None) for name in ordered)))


def _ranks(finding: Finding) -> str:
    from shardviz.picture.model.holders import mask_of, ranks_text

    return ranks_text(mask_of(finding.ranks)) if finding.ranks else ""

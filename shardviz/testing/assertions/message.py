"""The text of a failed assertion: the mistake, then claimed / held / intended, a picture, and the fix."""

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

MAX_IN_FULL = 3
"""Number of findings that are reported in full; the others are only named."""
WIDTH = 100
INDENT = 2
COLUMN = 10


class ShardAssertionError(AssertionError):
    """A failed assertion about layouts or values. Its text is the full report."""

    __module__ = "shardviz.testing"


def raise_for(dump: Dump | None, findings: Sequence[Finding]) -> None:
    """Raise if there are findings; in a user's own job, in one line on all ranks except rank 0.

    Args:
        dump: The dump that findings refer to, for the pictures.
        findings: Worst first.

    Raises:
        ShardAssertionError: There are findings.
    """
    __tracebackhide__ = True
    if findings:
        text = report(dump, findings)
        rank = _rank_in_job()
        raise ShardAssertionError(text if not rank else f"{text.splitlines()[0]} (see rank 0 for the full report)")


def _rank_in_job() -> int:
    """Return this process's rank in a user's own job; 0 if pytest runs the ranks, or there are none."""
    distributed = sys.modules.get("torch.distributed")
    if current.is_told_once.get() or distributed is None or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


def report(dump: Dump | None, findings: Sequence[Finding]) -> str:
    """Return the text for findings: the first ones in full, and identical layers once."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_alike(finding), []).append(finding)
    distinct = list(groups.values())
    parts = [_in_full(dump, group) for group in distinct[:MAX_IN_FULL]]
    if rest := [finding.tensor for group in distinct[MAX_IN_FULL:] for finding in group]:
        parts.append(f"and {len(rest)} more: {_names(rest)}")
    return "\n\n".join(parts)


def _alike(finding: Finding) -> tuple[object, ...]:
    name = finding.tensor
    texts = (finding.summary, finding.cause, finding.fix, *finding.also)
    layouts = (finding.claimed, finding.held, finding.intended)
    return finding.kind, finding.ranks, *layouts, *(text.replace(name, "") if name else text for text in texts)


def _in_full(dump: Dump | None, group: Sequence[Finding]) -> str:
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
    """Draw a tensor as `shardviz show` does, if there is something to draw."""
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

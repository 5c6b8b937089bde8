"""A lockfile of layouts: sorted text for reviewers, a line for each folded tensor and send.

Identical layers are one line, and so are identical experts in them: `layers.[0-31].experts.[0-7].w1.weight`.

    # shardviz layouts 1: mesh (fsdp=2, tp=4)
    param up.weight: float32[24/tp/fsdp, 12], 144 bytes per rank
    sent all_gather along fsdp, forward: 2 ranks, 324 bytes

A line's name is all before its colon: two files are compared by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.groups import in_groups
from shardviz.layout.notation import write
from shardviz.plan.counting import PlanBytes, fold_again, kind_of, sent_collectives, unfold, where_text
from shardviz.text import bytes_text, counted, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from shardviz.dump.plan import PlannedRanks

HEAD = "# shardviz layouts 1: mesh "

_VERSION = re.compile(r"# shardviz layouts (?P<number>[0-9]+):")

_BYTES = re.compile(r"[0-9]+(?= bytes per rank$)")

_LINE = re.compile(r"(?P<name>(param|buffer|sent) .+?): (?P<text>.+, (?P<bytes>[0-9]{1,18}) bytes( per rank)?)")

DAMAGED = "take the file from version control, or give --force to write it again"

KINDS = {"parameters": "param", "buffers": "buffer"}


@dataclass(frozen=True, slots=True)
class LockLine:
    """One line of a lockfile.

    Attributes:
        name: What it is about.
        text: What it says.
        bytes: Bytes of the fullest rank that it is about.
    """

    name: str
    text: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def lock_lines(ranks: PlannedRanks) -> list[LockLine]:
    """Return the lines of a plan's lockfile, sorted."""
    lines: dict[str, LockLine] = {}
    for _, held in PlanBytes(ranks).held:
        for amount in held:
            if amount.role in KINDS:
                most = int(amount.bytes.max())
                layout = (
                    write(amount.layout, amount.body.dtype)
                    if amount.layout
                    else f"{amount.body.dtype}{list(amount.body.shape)} plain"
                )
                line = LockLine(
                    f"{KINDS[amount.role]} {printable(amount.name)}", f"{layout}, {most} bytes per rank", most
                )
                lines[line.name] = max(lines.get(line.name, line), line, key=lambda line: line.bytes)
    return _folded([*lines.values(), *_of_step(ranks)])


def _of_step(ranks: PlannedRanks) -> Iterator[LockLine]:
    """Yield what a step sends; groups of several sizes within one axis share a line."""
    by_name = in_groups(
        (f"sent {sending.op} {where_text(sending)}, {sending.when}", sending) for sending in sent_collectives(ranks)
    )
    for name, same in by_name.items():
        sizes = " and ".join(map(str, sorted({one.size for one in same}, reverse=True)))
        received = sum(one.received for one in same)
        yield LockLine(name, f"{sizes} ranks, {received} bytes", received)


def _folded(lines: Iterable[LockLine]) -> list[LockLine]:
    """Fold lines that differ in one number only, again and again: experts, then modules."""
    before = sorted(lines, key=lambda line: natural_key(line.name))
    folds = fold_again((line.name, (line.text, line.bytes)) for line in before)
    if len(folds) == len(before):
        return before
    return _folded(
        LockLine(name, _BYTES.sub(str(size * count), text), size * count) for name, (text, size), count in folds
    )


def lock_text(ranks: PlannedRanks) -> str:
    """Return a plan's lockfile."""
    return "\n".join([f"{HEAD}{ranks.mesh}", *map(str, lock_lines(ranks)), ""])


def read_lock(path: Path) -> tuple[str, dict[str, LockLine]]:
    """Read a lockfile: its mesh as text, and its lines by name.

    Raises:
        ShardvizError: It cannot be read, or is not a lockfile.
    """
    try:
        first, *numbered_lines = path.read_text(encoding="utf-8-sig").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise ShardvizError(f"cannot read {path}: {error}", "shardviz plan ... --lock FILE writes it") from None
    version = _VERSION.match(first)
    if version and version["number"] != "1":
        text = f"{path} is a lockfile of version {version['number']}, and this shardviz reads version 1"
        raise ShardvizError(text, "install the shardviz that wrote it, or give --force to write it again")
    if not first.startswith(HEAD):
        text = f"{path} is not a lockfile: it begins with {printable(first[:40])!r}"
        raise ShardvizError(text, f"its first line begins with {HEAD!r}")
    lines: dict[str, LockLine] = {}
    for number, text in enumerate(numbered_lines, 2):
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ShardvizError(f"line {number} of {path} is damaged: {printable(text[:60])!r}", DAMAGED)
        if match["name"] in lines:
            raise ShardvizError(f"{path} has two lines for {printable(match['name'])}", DAMAGED)
        lines[match["name"]] = LockLine(match["name"], match["text"], int(match["bytes"]))
    return first.removeprefix(HEAD), lines


def layouts_of(path: Path) -> dict[str, str]:
    """Return a lockfile's layouts of parameters and buffers, in the form `assert_layout` takes.

    Raises:
        ShardvizError: It cannot be read, or is not a lockfile.
    """
    layouts: dict[str, str] = {}
    for line in read_lock(path)[1].values():
        kind, _, name = line.name.partition(" ")
        if kind in KINDS.values():
            layouts |= dict.fromkeys(unfold(name), line.text.rpartition(", ")[0].removesuffix(" plain"))
    return layouts


def lock_changes(path: Path, ranks: PlannedRanks) -> list[str]:
    """Return what differs between a lockfile and a plan, two lines for each change and its cost.

    Raises:
        ShardvizError: The lockfile cannot be read.
    """
    mesh, lines = read_lock(path)
    before = {line.name: line for line in _folded(lines.values())}  # as an older shardviz wrote them, too
    after = {line.name: line for line in lock_lines(ranks)}
    texts = [f"- mesh {mesh}", f"+ mesh {ranks.mesh}"] if mesh != str(ranks.mesh) else []
    for was, now in _pairs(before, after):
        if was != now:
            texts += [f"- {was}{'' if now else _cost(was, None)}"] if was else []
            texts += [f"+ {now}{_cost(was, now)}"] if now else []
    return texts


def same_text(path: Path) -> str:
    """Say what a plan has that is as in a lockfile.

    Raises:
        ShardvizError: The lockfile cannot be read.
    """
    lines = read_lock(path)[1]
    sent = sum(name.startswith("sent ") for name in lines)
    collectives = f" and {counted(sent, 'collective')}" if sent else ""
    return f"✓ {counted(len(lines) - sent, 'layout')}{collectives} as in {printable(str(path))}"


def _pairs(before: dict[str, LockLine], after: dict[str, LockLine]) -> list[tuple[LockLine | None, LockLine | None]]:
    """Pair the lines of two files by name, or by kind if only layer numbers differ."""
    pairs = {name: (before.get(name), after.get(name)) for name in {*before, *after}}
    gone, new = _by_kind(before, after), _by_kind(after, before)
    for kind in gone.keys() & new.keys():
        if len(gone[kind]) == len(new[kind]) == 1:
            (was,), (now,) = gone[kind], new[kind]
            pairs[now.name] = was, now
            del pairs[was.name]
    return [pairs[name] for name in sorted(pairs, key=natural_key)]


def _by_kind(lines: dict[str, LockLine], others: dict[str, LockLine]) -> dict[str, list[LockLine]]:
    """Return the lines that only one file has, by their names without numbers."""
    alone = [(*name.partition(" "), line) for name, line in lines.items() if name not in others]
    return in_groups((f"{kind} {kind_of(tensor)}", line) for kind, _, tensor, line in alone)


def _cost(was: LockLine | None, now: LockLine | None) -> str:
    more = (now.bytes if now else 0) - (was.bytes if was else 0)
    what = "received" if any(one and one.name.startswith("sent ") for one in (was, now)) else "per rank"
    return f"  ({'+' if more > 0 else '-'}{bytes_text(abs(more))} {what})" if more else ""

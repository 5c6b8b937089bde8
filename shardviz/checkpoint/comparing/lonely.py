"""Tensors that one of two checkpoints lacks, or has in a file that is missing or another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.outcome import SIDES, Outcome
from shardviz.checkpoint.findings import copied_files
from shardviz.explain.checkpoints.files import FileCopiedOver, StaleFileIndex, UnreadableFile
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.checkpoint.comparing.outcome import Verdict
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint


def lonely_outcomes(pairs: Sequence[Pair], checkpoints: tuple[Checkpoint, Checkpoint]) -> list[tuple[Outcome, Pair]]:
    """Return the outcomes of tensors that one checkpoint lacks, or that are in a missing file of it."""
    copies = [copied_files(checkpoint) for checkpoint in checkpoints] if pairs else []
    outcomes = []
    for pair in pairs:
        at = pair.second is None
        file = checkpoints[at].indexed.get(pair.name, "")
        outcome = _of_file(pair, checkpoints[at], file, copies[at]) if file else lonely_outcome(pair, SIDES[not at])
        outcomes.append((outcome, pair))
    return outcomes


def _of_file(pair: Pair, checkpoint: Checkpoint, file: str, copies: Mapping[str, str]) -> Outcome:
    """Return the outcome of a tensor that is not in the file in which a checkpoint's index says that it is."""
    is_gone = checkpoint.file_sizes[file] is None
    twin = "" if is_gone else copies.get(file, "")
    has = "does not exist" if is_gone else f"has the tensors of {twin} instead" if twin else "does not have it"
    cause = FileCopiedOver(printable(file), printable(twin)) if twin else StaleFileIndex()
    why = f"{checkpoint.folder / file} {has}, and the index says that it is there"
    return Outcome(pair.name, "", "unreadable").became("unreadable", why, UnreadableFile() if is_gone else cause)


def lonely_outcome(pair: Pair, which: str) -> Outcome:
    """Return the outcome of a tensor that only one side has: `which` says which one."""
    verdict: Verdict = "missing" if pair.second is None else "added"
    more = f"; as the map says, {pair.lacking}" if pair.lacking else ""
    return Outcome(pair.name, "", verdict, f"only the {which} has it{more}")

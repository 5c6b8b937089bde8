"""Whether all tensors that differ are those of one file, where files have whole tensors, as safetensors do.

A boundary of files is nowhere else a boundary of the model, so that what stops just there is most likely the file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.elsewhere.one_file import FEWEST, LONE, SAME, SIDES, is_open
from shardviz.checkpoint.records import Saved
from shardviz.explain.files import WholeFileDiffers
from shardviz.text import printable

if TYPE_CHECKING:
    from shardviz.checkpoint.comparing.elsewhere.one_file import Found
    from shardviz.checkpoint.comparing.outcome import Outcome


def with_whole_file(found: Found) -> Found:
    """Say of tensors that differ that they are all those of one file."""
    for at in (1, 0):
        name, small = _whole_file(found, at)
        if name:
            whole = WholeFileDiffers(printable(name), SIDES[at], small)
            return [(_named(outcome, whole), pair) for outcome, pair in found]
    return found


def _whole_file(found: Found, at: int) -> tuple[str, int]:
    """Return the file of a side that has all tensors that differ, and how many of it do not; empty without one.

    Equal scales and biases in it say nothing: they may be all ones or zeros in every save.
    """
    same: Counter[str] = Counter()
    small: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for outcome, pair in found:
        own = (pair.one, pair.other)[at]
        if outcome.verdict in LONE or not isinstance(own, Saved):
            continue
        if len(own.files) != 1 or not (_differs(outcome) or outcome.verdict in (*SAME, "cast")):
            return "", 0
        counts = odd if _differs(outcome) else same if len(own.shape) > 1 else small
        counts[own.files[0]] += 1
    name = next(iter(odd), "")
    is_whole = len(odd) == 1 and odd[name] >= FEWEST and not same[name] and same.total() >= FEWEST
    return (name, small[name]) if is_whole else ("", 0)


def _differs(outcome: Outcome) -> bool:
    return is_open(outcome) or outcome.verdict == "stale"


def _named(outcome: Outcome, whole: WholeFileDiffers) -> Outcome:
    if not _differs(outcome):
        return outcome
    return outcome.became(outcome.verdict, outcome.why, replace(whole, rest=outcome.explanation or whole.rest))

"""Objects of DCP folders and torch.save's files other than tensors, such as a step or a learning rate: by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.formats.archive import read_object
from shardviz.checkpoint.formats.pickled import Made
from shardviz.checkpoint.formats.torch_file import BY_ITSELF
from shardviz.checkpoint.optimizer import is_setting, state_names
from shardviz.errors import DumpError
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardviz.checkpoint.records import Checkpoint

LONGEST = 60
"""Characters of a value that are shown."""

MAX_NAMES = 3
PIECE = "/shard_"
"""Megatron saves objects in pieces, whose names have their number: another mesh has other ones."""


def compare_objects(before: Checkpoint, after: Checkpoint, *, renamed: bool) -> tuple[list[Outcome], list[str]]:
    """Return what became of objects that differ, and notes on those that are not compared.

    Args:
        before: The first checkpoint.
        after: The second.
        renamed: Whether names of the first stand for others of the second: then an object may have another name, too.
    """
    both = [name for name in _names(before) if name in _names(after)]
    outcomes = [one for name in both if (one := _compared(name, before, after)) is not None]
    notes: list[str] = []
    for at, (own, other) in enumerate(((before, after), (after, before))):
        lone = [name for name in _names(own) if name not in _names(other)]
        kept = [] if renamed or not both else list(_lost(lone, other))
        side = ("first", "second")[at]
        outcomes += [
            Outcome(name, "", "added" if at else "missing", f"only the {side} has it, an object") for name in kept
        ]
        rest = [name for name in lone if name not in kept]
        if rest:
            some = listed(map(printable, rest), MAX_NAMES)
            notes.append(f"not compared: {counted(len(rest), 'object')} that only the {side} has, such as {some}")
    if files := list(dict.fromkeys([*before.unread, *after.unread])):
        some = listed(map(printable, files), MAX_NAMES)
        notes.append(f"not compared: files next to the weights ({some}): {BY_ITSELF}")
    return outcomes, notes


def _names(checkpoint: Checkpoint) -> dict[str, None]:
    return dict.fromkeys([*checkpoint.objects, *checkpoint.values])


def _lost(names: Collection[str], other: Checkpoint) -> Iterator[str]:
    """Yield the objects that another checkpoint should have, too: no pieces, and settings only beside states."""
    has_states = bool(state_names(other))
    for name in names:
        if PIECE not in name and (has_states or not is_setting(name)):
            yield name


def _compared(name: str, before: Checkpoint, after: Checkpoint) -> Outcome | None:
    """Return what became of an object that both have; None if it is the same."""
    if _bytes_of(before, name) == _bytes_of(after, name) is not None:
        return None
    outcome = Outcome(name, name, "other")
    try:
        old, new = _value(before, name), _value(after, name)
    except DumpError as error:
        return outcome.became("not-compared", f"an object whose bytes differ: {error.message}")
    if _has_types(old) or _has_types(new):
        differs = "whose bytes differ, and " if name in before.objects and name in after.objects else ""
        return outcome.became("not-compared", f"an object {differs}that has more than plain values")
    return (
        None if old == new or repr(old) == repr(new) else outcome.became("other", f"{_short(old)} became {_short(new)}")
    )


def _bytes_of(checkpoint: Checkpoint, name: str) -> bytes | None:
    place = checkpoint.objects.get(name)
    try:
        if place is None:
            return None
        with (checkpoint.folder / place.file).open("rb") as file:
            file.seek(place.start)
            return file.read(place.size)
    except OSError:
        return None


def _value(checkpoint: Checkpoint, name: str) -> Any:
    if name in checkpoint.values:
        return checkpoint.values[name]
    place = checkpoint.objects[name]
    return read_object(checkpoint.folder / place.file, place.start, place.size, name)


def _has_types(value: Any) -> bool:
    """Whether an object has more than numbers, words, lists and dicts."""
    if type(value) in (list, tuple):
        return any(map(_has_types, value))
    if type(value) is dict:
        return any(_has_types(one) for pair in value.items() for one in pair)
    return isinstance(value, Made) or type(value) not in (int, float, str, bool, bytes, type(None))


def _short(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

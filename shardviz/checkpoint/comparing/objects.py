"""Objects of two checkpoints other than tensors, such as a step, a learning rate or an optimizer's groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.formats.archive import read_object
from shardviz.checkpoint.formats.torch_file import BY_ITSELF
from shardviz.checkpoint.optimizer import is_setting, state_names
from shardviz.checkpoint.records import DamagedFileError, refuse_cut
from shardviz.errors import DumpError
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardviz.checkpoint.records import Checkpoint

GROUP_LISTS = ("params", "param_names")
"""The lists of an optimizer's group that have an entry for each of its parameters."""

LONGEST = 60
"""Characters of a value that are shown."""


PIECE = "/shard_"
"""Megatron saves objects in pieces, whose names have their number: another mesh has other ones."""


def compare_objects(before: Checkpoint, after: Checkpoint, *, renamed: bool) -> tuple[list[Outcome], list[str]]:
    """Return what became of objects that differ, and notes on those that are not compared.

    Args:
        renamed: Whether names of the first stand for others of the second: then an object may have another name, too.
    """
    shared_names = [name for name in _object_names(before) if name in _object_names(after)]
    outcomes = [outcome for name in shared_names if (outcome := _compared_object(name, before, after)) is not None]
    notes: list[str] = []
    for at, (checkpoint, counterpart) in enumerate(((before, after), (after, before))):
        lone = [name for name in _object_names(checkpoint) if name not in _object_names(counterpart)]
        lost = [] if renamed or not shared_names else list(_lost_objects(lone, counterpart))
        side = ("first", "second")[at]
        outcomes += [
            Outcome(name, "", "added" if at else "missing", f"only the {side} has it, an object") for name in lost
        ]
        unnamed = [name for name in lone if name not in lost]
        if unnamed:
            some = listed(map(printable, unnamed))
            notes.append(f"not compared: {counted(len(unnamed), 'object')} that only the {side} has, such as {some}")
    if files := list(dict.fromkeys([*before.unread, *after.unread])):
        some = listed(map(printable, files))
        notes.append(f"not compared: files next to the weights ({some}): {BY_ITSELF}")
    return outcomes, notes


def _object_names(checkpoint: Checkpoint) -> dict[str, None]:
    return dict.fromkeys([*checkpoint.objects, *checkpoint.values])


def _lost_objects(names: Collection[str], second: Checkpoint) -> Iterator[str]:
    """Yield the objects that the second checkpoint lacks: no pieces; settings only with states."""
    has_states = bool(state_names(second))
    for name in names:
        if PIECE not in name and (has_states or not is_setting(name)):
            yield name


def _compared_object(name: str, before: Checkpoint, after: Checkpoint) -> Outcome | None:
    """Return what became of an object that both have; None if it is the same."""
    if _bytes_of(before, name) == _bytes_of(after, name) is not None:
        return None
    outcome = Outcome(name, name, "other")
    try:
        old, new = _value_of(before, name), _value_of(after, name)
    except DamagedFileError as error:
        return outcome.failed(error)
    except DumpError as error:
        return outcome.became("not-compared", f"an object whose bytes differ: {error.message}")
    if _has_types(old) or _has_types(new):
        differs = ", whose bytes differ" if name in before.objects and name in after.objects else ""
        return outcome.became("not-compared", f"an object with more than plain values{differs}")
    if old == new or repr(old) == repr(new):
        return None
    if _with_sorted_names(name, old, before) == _with_sorted_names(name, new, after):
        return None
    return outcome.became("other", f"{_short_text(old)} became {_short_text(new)}")


def _with_sorted_names(name: str, value: Any, checkpoint: Checkpoint) -> Any:
    """Return an object whose lists of an optimizer group's parameters are sorted, if they have names.

    A state that has its parameter's name belongs to it at every place of the list. Numbers count places.
    """
    head, _, key = name.rpartition(".")
    if key not in GROUP_LISTS or not is_setting(name):
        return _with_sorted_groups(value)
    params = f"{head}.params"
    has_params = params in checkpoint.values or params in checkpoint.objects
    group = {"params": _value_of(checkpoint, params) if has_params else (), key: value}
    return _with_sorted_groups(group)[key]


def _with_sorted_groups(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_with_sorted_groups, value))
    if type(value) is not dict:
        return value
    is_named = _are_names(value.get("params"))
    return {
        key: sorted(item) if is_named and key in GROUP_LISTS and _are_names(item) else _with_sorted_groups(item)
        for key, item in value.items()
    }


def _are_names(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(type(name) is str for name in value)


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


def _value_of(checkpoint: Checkpoint, name: str) -> Any:
    if name in checkpoint.values:
        return checkpoint.values[name]
    place = checkpoint.objects[name]
    refuse_cut(checkpoint.folder, place, name)
    return read_object(checkpoint.folder / place.file, place.start, place.size, name)


def _has_types(value: Any) -> bool:
    """Whether an object has more than numbers, words, lists and dicts."""
    if type(value) in (list, tuple):
        return any(map(_has_types, value))
    if type(value) is dict:
        return any(_has_types(one) for pair in value.items() for one in pair)
    return type(value) not in (int, float, str, bool, bytes, type(None))


def _short_text(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

"""The names of a checkpoint, for the patterns of a map.

What stands before all names of a checkpoint, such as `app.model.` in a folder of DCP, does not have to be in the map.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.maps.language import NOTHING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

SAMPLE = 512
"""Names that are looked at for what stands before all of them."""

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")


@dataclass(frozen=True)
class Named:
    """The names of a checkpoint, without what stands before all of them.

    Attributes:
        path: What the checkpoint is called in messages.
        tensors: Its tensors by the names that maps have for them; for a left side, anything by those names.
        full: Their names.
    """

    path: str
    tensors: Mapping[str, Any]
    full: Mapping[str, str]

    @cached_property
    def numbered(self) -> Mapping[str, set[tuple[int, ...]]]:
        """The numbers in its names, by the names with `*` for each of them."""
        numbers: dict[str, set[tuple[int, ...]]] = {}
        for name in self.tensors:
            numbers.setdefault(_NUMBER.sub("*", name), set()).add(tuple(map(int, _NUMBER.findall(name))))
        return numbers

    @cached_property
    def _after(self) -> dict[tuple[str, int], dict[tuple[int, ...], set[int]]]:
        return {}

    def numbers_after(self, pattern: str) -> set[int]:
        """Return the numbers that names have in the place of a pattern's first `*`."""
        starred = _NUMBER.sub("*", pattern)
        before = tuple(map(int, _NUMBER.findall(pattern.partition("*")[0])))
        key = starred, len(before)
        if key not in self._after:
            known: dict[tuple[int, ...], set[int]] = {}
            for numbers in self.numbered.get(starred, ()):
                known.setdefault(numbers[: len(before)], set()).add(numbers[len(before)])
            self._after[key] = known
        return self._after[key].get(before, set())


@lru_cache(maxsize=4096)
def pattern_of(text: str) -> re.Pattern[str]:
    """Return the expression that fits what a pattern with `*` fits."""
    return re.compile("(.*?)".join(map(re.escape, text.split("*"))))


def filled(pattern: str, words: Sequence[str]) -> str:
    """Return a pattern with words for its first stars.

    Example:
        >>> filled("layers.*.experts.*.w1", ["3"])
        'layers.3.experts.*.w1'
    """
    pieces = pattern.split("*")
    put = [*words, *["*"] * len(pieces)][: len(pieces) - 1]
    return "".join(piece + word for piece, word in zip(pieces, [*put, ""], strict=True))


def named(path: str, tensors: Mapping[str, Any], patterns: Collection[str]) -> Named:
    """Return tensors by their names without the beginning behind which most of them fit a map's patterns."""
    before = _beginning(tensors, patterns)
    full = {name.removeprefix(before): name for name in tensors if name.startswith(before)}
    return Named(path, {short: tensors[name] for short, name in full.items()}, full)


def _beginning(names: Collection[str], patterns: Collection[str]) -> str:
    used_patterns = [pattern for pattern in patterns if pattern != NOTHING]
    if not used_patterns or not names:
        return ""
    either = "|".join(f"(?:{pattern_of(pattern).pattern})" for pattern in used_patterns)
    whole = re.compile(either)
    some = list(names)[:: max(1, len(names) // SAMPLE)]
    if any(whole.fullmatch(name) for name in names):
        return ""
    behind = re.compile(f"((?:[^.*]+[.])+?)(?:{either})")
    counts = Counter(found[1] for name in some if (found := behind.fullmatch(name)))
    best = [before for before, count in counts.most_common(2) if not re.search(r"(?:^|\.)[0-9]+\.", before)]
    return best[0] if best else ""

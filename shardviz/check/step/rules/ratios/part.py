"""Which gradients of a step have a factor: all of them, or a part, and what that part has in common.

What all gradients come from, as the loss, cannot give a factor to a part. A part of one module, or all that an axis
splits, is where to look.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.ratios.factors import splits
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from fractions import Fraction

    from shardviz.check.step.compared import Compared

MAX_LISTED = 4


@dataclass(frozen=True)
class Part:
    """The gradients of a step that have a factor, and the others.

    Attributes:
        have: Those that have it.
        others: Those that have not, zeros left out, which have any.
    """

    have: tuple[Compared, ...]
    others: tuple[Compared, ...]

    @property
    def is_all(self) -> bool:
        """Whether all gradients have it."""
        return not self.others

    @property
    def is_beside_right(self) -> bool:
        """Whether any other gradient is right, so that nothing that all come from is wrong."""
        return any(not one.wrong for one in self.others)

    @cached_property
    def text(self) -> str:
        """How many have it, and what only they have in common; empty if all do."""
        if self.is_all:
            return ""
        common = [text for text, has in self._traits() if all(map(has, self.have)) and not any(map(has, self.others))]
        which = " and ".join(common) or listed((one.name for one in self.have), MAX_LISTED)
        have = "has" if len(self.have) == 1 else "have"
        return f"{len(self.have):,} of {len(self.have) + len(self.others):,} gradients {have} this factor: {which}"

    def _traits(self) -> Iterator[tuple[str, Callable[[Compared], bool]]]:
        if inside := _module_of(self.have):
            yield f"all those of {inside}", lambda result: result.name.startswith(f"{inside}.")
        last = self.have[0].name.rpartition(".")[2]
        yield f"all those named {last}", lambda result: result.name.rpartition(".")[2] == last
        for axis in self.have[0].mesh.axes:
            split = {result.name for result in (*self.have, *self.others) if splits(result, axis)}
            yield f"all that {axis} splits", partial(_is_among, split)
            yield f"all that are whole along {axis}", partial(_is_not_among, split)
        yield "all plain tensors", lambda result: result.claimed is None
        yield "all DTensors", lambda result: result.claimed is not None


@dataclass(frozen=True)
class Parts:
    """The gradients of a step by the factor that they have; gradients of one factor share their part.

    Attributes:
        gradients: Every gradient of the step that can be compared.
        ratios: The factor of each, by name.
    """

    gradients: Sequence[Compared]
    ratios: Mapping[str, Fraction | None]

    def part_with(self, result: Compared) -> Part:
        """Return the gradients that have the factor that one of them has."""
        ratio = self.ratios.get(result.name)
        return self._by_ratio[ratio] if ratio in self._by_ratio else self._alone(result)

    @cached_property
    def _known(self) -> tuple[Compared, ...]:
        return tuple(one for one in self.gradients if np.any(one.wanted))

    @cached_property
    def _by_ratio(self) -> Mapping[Fraction | None, Part]:
        ratios = dict.fromkeys(ratio for one in self._known if (ratio := self.ratios[one.name]) is not None)
        return {
            ratio: Part(
                tuple(one for one in self._known if self.ratios[one.name] == ratio),
                tuple(one for one in self._known if self.ratios[one.name] != ratio),
            )
            for ratio in ratios
        }

    def _alone(self, result: Compared) -> Part:
        """Return the part of a gradient that has no factor, or none that another one has."""
        at = self._positions.get(result.name, len(self._known))
        return Part((result,), self._known[:at] + self._known[at + 1 :])

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {one.name: position for position, one in enumerate(self._known)}


def _is_among(names: set[str], result: Compared) -> bool:
    return result.name in names


def _is_not_among(names: set[str], result: Compared) -> bool:
    return result.name not in names


def _module_of(have: Sequence[Compared]) -> str:
    """Return the innermost module that all are in; empty if that is the model."""
    modules = [one.name.split(".")[:-1] for one in have]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in alike)

"""Inference of the map between two checkpoints with different names, from their contents.

What most tensors of a family show counts for all of them, so that a wrong one is compared and not mapped around. Names
decide nothing but which of equal contents is which, and only if those beside them are known.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.by_content.families import Family, FamilyMatch, families_of, links
from shardviz.checkpoint.by_content.solving import Recipe, Strips, View, are_in_place, are_near, constant_of, recipes
from shardviz.checkpoint.findings import EMBEDDINGS, HEADS
from shardviz.checkpoint.optimizer import state_of
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.by_content.families import Link, Numbers
    from shardviz.checkpoint.records import Tensor

MOST_ALONE = 128
"""Tensors of both sides together that are looked for one by one, each in all others; of more, none is."""

MOST_RENUMBERED = 256
"""Tensors of a family among which one is looked for under any number."""

QUERIES_KEYS_VALUES = ("q", "k", "v")
NEARLY = "its values are nearly the same"
BESIDE = "as that of its module"
NUMBERED = "the same tensors under other numbers"
BY_SETTINGS = "by the groups of heads in config.json; its values are in {} blocks"


def pair_by_content(first: Iterable[Tensor], second: Iterable[Tensor]) -> tuple[list[FamilyMatch], dict[str, str]]:
    """Pair the tensors of two checkpoints by their contents.

    Args:
        first: Tensors of the first that the second lacks by their names.
        second: Tensors of the second that the first lacks.

    Returns:
        What was found; and tensors whose content several have, by their names, each with the reason.
    """
    work = _Matcher(([], []))
    for side, tensors in enumerate((first, second)):
        for family in families_of(tensors):
            (work.alike if _constants(family) else work.free)[side].append(family)
    work.by_content()
    work.by_other_numbers()
    work.by_nearness()
    if sum(len(family.members) for side in work.free for family in side) <= MOST_ALONE:
        work.free = tuple([one for family in side for one in family.alone()] for side in work.free)  # type: ignore[assignment]
        work.by_content()
    work.by_modules()
    work.by_constants()
    return work.choices, work.ambiguous


def with_groups_of_heads(choices: Iterable[FamilyMatch], settings: Mapping[str, int]) -> list[FamilyMatch]:
    """Interleave queries, keys and values by the number of key heads that a model's settings have.

    Values show in how many blocks the conversion joined them. The settings say how many the model reads.

    Args:
        settings: The numbers next to the checkpoints: `kv_heads`, `head_dim`.
    """
    return [_with_groups(choice, settings) for choice in choices]


def _with_groups(choice: FamilyMatch, settings: Mapping[str, int]) -> FamilyMatch:
    recipe, groups = choice.recipe, settings.get("kv_heads", 0)
    if not groups or not recipe.blocks or not _are_heads(recipe, settings):
        return choice
    if recipe.blocks == groups:
        return replace(choice, is_by_settings=True)
    blocks = groups if groups > 1 else 0
    why = BY_SETTINGS.format(recipe.blocks)
    return replace(choice, recipe=replace(recipe, blocks=blocks), why=why, is_by_settings=True)


def _are_heads(recipe: Recipe, settings: Mapping[str, int]) -> bool:
    """Whether parts have the names of queries, keys and values, and the rows of so many heads."""
    words = [link.family.pattern.rpartition(".")[0].rpartition(".")[2].lower() for link in recipe.links]
    rows = [link.family.shape[recipe.dim] for link in recipe.links]
    keys = settings["kv_heads"] * settings.get("head_dim", 0)
    queries = settings.get("heads", 0) * settings.get("head_dim", 0)
    letters = [letter for word in words for letter in QUERIES_KEYS_VALUES if letter in word]
    is_named = len(letters) == len(words) and {"k", "v"} <= set(letters) <= set(QUERIES_KEYS_VALUES)
    return is_named and rows == [queries if letter == "q" else keys for letter in letters]


def _constants(family: Family) -> tuple[float, ...]:
    """Return the constants that a family is filled with; empty if a member isn't constant."""
    constants = [constant_of(family.members[numbers]) for numbers in family.some]
    return () if None in constants else tuple(sorted({one for one in constants if one is not None}))


@dataclass
class _Matcher:
    """Matches the families of two checkpoints, and holds those that are still unmatched.

    Attributes:
        alike: Those of which each tensor is a single number.
    """

    free: tuple[list[Family], list[Family]]
    alike: tuple[list[Family], list[Family]] = field(default_factory=lambda: ([], []))
    strips: Strips = field(default_factory=Strips)
    choices: list[FamilyMatch] = field(default_factory=list)
    ambiguous: dict[str, str] = field(default_factory=dict)

    def choose(self, side: int, whole: Family, recipe: Recipe, why: str = "") -> None:
        """Settle a family, and those that it is made of."""
        self.choices.append(FamilyMatch(side, whole, recipe, why))
        self._take(side, [whole])
        self._take(1 - side, [link.family for link in recipe.links])

    def _take(self, side: int, families: Sequence[Family]) -> None:
        """Hold some families of a side no longer."""
        for some in (self.free, self.alike):
            some[side][:] = [one for one in some[side] if one not in families]

    def by_content(self) -> None:
        """Choose families with equal values; of several, the one that is left over by the others."""
        options: dict[tuple[int, Family], list[Recipe]] = {}
        for side in (0, 1):
            for whole in self.free[side]:
                if possible := self._recipes(side, whole):
                    options[side, whole] = possible
        while options:
            key, recipe, why = self._clearest(options)
            if recipe is None:
                self._say_ambiguous(options)
                return
            self.choose(*key, recipe, why)
            options = self._free_options(options)

    def _free_options(self, options: dict[tuple[int, Family], list[Recipe]]) -> dict[tuple[int, Family], list[Recipe]]:
        """Return the options whose tensors are all free."""
        free_options = {}
        for (side, whole), every in options.items():
            free = {*self.free[1 - side], *self.alike[1 - side]}
            ok = [one for one in every if all(link.family in free for link in one.links)]
            if ok and whole in self.free[side]:
                free_options[side, whole] = ok
        return free_options

    def _clearest(
        self, options: dict[tuple[int, Family], list[Recipe]]
    ) -> tuple[tuple[int, Family], Recipe | None, str]:
        """Return a tensor with only one option, or one singled out by name; no recipe otherwise."""
        single = [key for key, every in options.items() if len(every) == 1]
        if single:
            key = min(single, key=lambda key: key[1].pattern.endswith(HEADS))
            return key, options[key][0], ""
        for key, every in options.items():
            for endings in (EMBEDDINGS, HEADS):
                same = [one for one in every if one.links[0].family.pattern.endswith(endings)]
                if key[1].pattern.endswith(endings) and len(same) == 1:
                    return key, same[0], "by its name, of several with its values"
        key = next(iter(options))
        names = {one.links[0].family.pattern for one in options[key]}
        if not any(
            names & {link.family.pattern for one in every for link in one.links}
            for competitor, every in options.items()
            if competitor != key
        ):
            return key, options[key][0], f"or any of {_names_text(sorted(names))}: all have its values"
        return key, None, ""

    def _say_ambiguous(self, options: dict[tuple[int, Family], list[Recipe]]) -> None:
        for (side, whole), every in options.items():
            others = [link.family for one in every for link in one.links]
            twins = [other for key, each in options.items() for other in (key[1],) if key[0] == side and each]
            self._set_aside(side, [whole], _why_ambiguous(others, side))
            self._set_aside(1 - side, others, _why_ambiguous(twins, 1 - side))

    def _set_aside(self, side: int, families: Sequence[Family], why: str) -> None:
        for family in families:
            for tensor in family.members.values():
                self.ambiguous.setdefault(tensor.name, f"which tensor it is: {why}")
        self._take(side, families)

    def _recipes(self, side: int, whole: Family) -> list[Recipe]:
        """Return how most tensors of a family are made; several recipes if sources are equal."""
        size = math.prod(whole.shape)
        near = [one for one in (*self.free[1 - side], *self.alike[1 - side]) if math.prod(one.shape) <= size]
        sources = [link for part in near if _may_be_part(whole, part) for link in links(whole, part)]
        votes: Counter[Recipe] = Counter()
        for numbers in whole.some if sources else ():
            votes.update(dict.fromkeys(recipes(whole.members[numbers], numbers, sources, self.strips), 1))
        most = max(votes.values(), default=0)
        recipe_of: dict[frozenset[Family], Recipe] = {}
        for recipe in sorted(votes, key=lambda recipe: -votes[recipe]):
            is_renamed = len(recipe.links) == 1 and not (recipe.padded or recipe.joined or recipe.stacks)
            if votes[recipe] == most and not (side and is_renamed):  # the first side has found that
                recipe_of.setdefault(frozenset(link.family for link in recipe.links), recipe)
        return list(recipe_of.values())

    def by_other_numbers(self) -> None:
        """Choose families whose tensors are only renumbered, which the comparison reports."""
        for whole, link, turned in list(self._alike_pairs()):
            members = [one for parts in link.parts.values() for one in parts.values()]
            some = [whole.members[numbers] for numbers in whole.some]
            if len(members) <= MOST_RENUMBERED and any(
                self._has_values(one, it, turned) for one in some for it in members
            ):
                self._choose_pair(whole, link, turned, NUMBERED)

    def by_nearness(self) -> None:
        """Choose families of nearly equal values, as of a different step, if the choice is unique."""
        near_links: dict[Family, list[tuple[Link, bool]]] = {}
        for whole, link, turned in self._alike_pairs():
            if state_of(whole.pattern) or state_of(link.family.pattern):
                continue  # the states of different weights may be alike
            some = [numbers for numbers in whole.some if numbers in link.parts]
            matches = [are_near(View(whole.members[at], (), turned), View(link.parts[at][()])) for at in some]
            if 2 * sum(matches) > len(matches):
                near_links.setdefault(whole, []).append((link, turned))
        for whole, every in near_links.items():
            if len({link.family for link, _ in every}) == 1:
                self._choose_pair(whole, *every[0], NEARLY)

    def _alike_pairs(self) -> Iterator[tuple[Family, Link, bool]]:
        """Yield families of both sides that have one shape, or that of the other turned."""
        for whole in self.free[0]:
            for second in self.free[1]:
                for turned in (False, True)[: len(whole.shape)]:
                    shape = second.shape if not turned else (*second.shape[:-2], *second.shape[:-3:-1])
                    for link in links(whole, second) if shape == whole.shape else ():
                        if not link.extra:
                            yield whole, link, turned

    def _choose_pair(self, whole: Family, link: Link, turned: bool, why: str) -> None:
        if whole in self.free[0] and link.family in self.free[1]:
            self.choose(0, whole, Recipe((link,), turned=turned), why)

    def _has_values(self, tensor: Tensor, other: Tensor, turned: bool) -> bool:
        places = self.strips.places(View(other), View(tensor, (), turned), 0)
        return places is not None and are_in_place(places, np.arange(other.shape[0]))

    def by_modules(self) -> None:
        """Match the rest of a matched module by the last word of a name: a bias like its weight."""
        for choice in list(self.choices):
            module, dot, leaf = choice.whole.pattern.rpartition(".")
            for whole in [*self.free[choice.side], *self.alike[choice.side]] if dot else ():
                second_module, _, second_leaf = whole.pattern.rpartition(".")
                if (
                    second_module == module
                    and second_leaf != leaf
                    and (recipe := self._as_beside(choice, whole, second_leaf)) is not None
                ):
                    self.choose(choice.side, whole, recipe, BESIDE)

    def _as_beside(self, choice: FamilyMatch, whole: Family, leaf: str) -> Recipe | None:
        """Adapt the recipe of a matched tensor to a family in its module; None if shapes don't fit."""
        there = {one.pattern: one for some in (self.free, self.alike) for one in some[1 - choice.side]}
        parts: list[Link] = []
        for link in choice.recipe.links:
            second = there.get(f"{link.family.pattern.rpartition('.')[0]}.{leaf}")
            every = links(whole, second) if second is not None else iter(())
            same = next((one for one in every if one.extra == link.extra and one.is_direct == link.is_direct), None)
            if same is None:
                return None
            parts.append(same)
        recipe = replace(choice.recipe, links=tuple(parts))
        ndim = len(whole.shape) - recipe.stacks
        if ndim < 2:
            recipe = replace(recipe, turned=False)
        if ndim < 1 or recipe.dim >= ndim or any(len(one.family.shape) != ndim for one in parts):
            return None
        size = whole.shape[recipe.stacks + recipe.dim]
        sizes = [one.family.shape[recipe.dim] * _count(one, recipe) for one in parts]
        return replace(recipe, padded=size if recipe.padded else 0) if recipe.padded or sum(sizes) == size else None

    def by_constants(self) -> None:
        """Match constant tensors that are unique in shape and numbers; call the others ambiguous."""
        classes: dict[tuple[object, ...], tuple[list[Family], list[Family]]] = {}
        for side in (0, 1):
            for family in self.alike[side]:
                key = _constants(family), family.shape, tuple(sorted(family.members))
                classes.setdefault(key, ([], []))[side].append(family)
        for (values, *_), (firsts, seconds) in classes.items():
            what = f"all {'or '.join(f'{one:g} ' for one in values)}".rstrip()  # type: ignore[attr-defined]
            if len(firsts) == len(seconds) == 1:
                link = next(iter(links(firsts[0], seconds[0])))
                self.choose(0, firsts[0], Recipe((link,)), f"{what}, the only one of its shape and numbers")
            elif firsts and seconds:
                self._set_aside(0, firsts, f"it is {what}, and so are {_names_text(one.pattern for one in seconds)}")
                self._set_aside(1, seconds, f"it is {what}, and so are {_names_text(one.pattern for one in firsts)}")


def _may_be_part(whole: Family, segment: Family) -> bool:
    """Whether the shapes allow one tensor to be part of another: at most one dim differs."""
    sizes = Counter(segment.shape) - Counter(whole.shape)
    return sum(sizes.values()) <= 1 and len(segment.shape) <= len(whole.shape)


def _count(link: Link, recipe: Recipe) -> int:
    parts: dict[Numbers, Tensor] = dict(next(iter(link.parts.values())))
    return len({key[recipe.stacks :] for key in parts}) if recipe.joined else 1


def _names_text(patterns: Iterable[str]) -> str:
    return listed(map(printable, dict.fromkeys(patterns)))


def _why_ambiguous(rivals: Iterable[Family], side: int) -> str:
    names = _names_text(rival.pattern for rival in rivals)
    return f"{names} of the {('second', 'first')[side]} have its values, each of them"

"""Choice among ways to assemble a job's tensor: the one that matches the other job's.

Where none does, the two differ there, and the tensor is put together as in other layers, or as its forward side is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardviz.check.step.trace.calls import NUMBER
from shardviz.check.step.trace.judging import Judging

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.check.step.jobs.whole_job import Choice
    from shardviz.check.step.trace.traces import Point
    from shardviz.dump.records.trace import Place
    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh

    Choices = Mapping[Place, Sequence[Choice]]

GOOD = ("right", "pending", "moved")


@dataclass
class _Choosing:
    """The choice in the making.

    Attributes:
        choices: Every way, by place.
        judging: Both jobs, with what was chosen so far.
        ways: The way that was chosen, by place.
    """

    choices: Choices
    judging: Judging
    ways: dict[Place, Placements] = field(default_factory=dict)

    def settle(self, place: Place, choice: Choice) -> None:
        """Take one way."""
        self.ways[place], self.whole[place] = choice

    @property
    def whole(self) -> dict[Place, Point]:
        """What was chosen."""
        assert isinstance(self.judging.whole, dict)
        return self.judging.whole

    def is_good(self, place: Place, choice: Choice) -> bool:
        """Whether the other job has the same, put together in this way."""
        self.whole[place] = choice[1]
        judgment = self.judging.judged(place)
        return judgment is not None and all(state in GOOD for state in judgment.state.values())

    def alike(self, place: Place) -> Iterator[Placements]:
        """Yield the ways of the same place in other layers, and of its forward side."""
        kind = NUMBER.sub("*", place.module), place.what, place.tensor
        yield from (way for at, way in self.ways.items() if (NUMBER.sub("*", at.module), at.what, at.tensor) == kind)
        if place.forward in self.ways:
            yield self.ways[place.forward]


def chosen(choices: Choices, ranks: Mapping[int, Mapping[Place, Point]], mesh: Mesh) -> dict[Place, Point]:
    """Choose how to assemble a job's values at every place, guided by the other job's ranks.

    Args:
        choices: Every way to put it together.
        ranks: What ranks of the other job have.
        mesh: The other job's mesh.
    """
    nonempty = {place: ways for place, ways in choices.items() if ways}
    if all(len(ways) == 1 for ways in nonempty.values()):
        return {place: ways[0][1] for place, ways in nonempty.items()}
    choosing = _Choosing(nonempty, Judging({}, ranks, mesh))
    forward = [place for place in nonempty if not place.what.startswith("gradient")]
    backward = [place for place in nonempty if place.what.startswith("gradient")]
    _choose(choosing, forward)
    for place in backward:  # scales come from gradients: each is put together as its forward side is, to begin with
        choosing.settle(place, _default(choosing, place))
    _choose(choosing, backward)
    return choosing.whole


def _choose(choosing: _Choosing, places: Sequence[Place]) -> None:
    undecided = []
    for place in places:
        good = next((one for one in choosing.choices[place] if choosing.is_good(place, one)), None)
        if good is None:
            undecided.append(place)
        else:
            choosing.settle(place, good)
    for place in undecided:
        choosing.settle(place, _default(choosing, place))


def _default(choosing: _Choosing, place: Place) -> Choice:
    ways = choosing.choices[place]
    by_way = dict(ways)
    return next(((way, by_way[way]) for way in choosing.alike(place) if way in by_way), ways[0])

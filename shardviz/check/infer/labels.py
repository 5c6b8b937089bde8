"""A layout fits what is held, but it is another than the claimed one: what the difference is called, and the label
that would be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.chain import JOIN
from shardviz.check.advice import CATALOGUE
from shardviz.check.infer.explanation import Explanation, Shape
from shardviz.notation import write
from shardviz.placements import spell

if TYPE_CHECKING:
    from shardviz.chain import Chain
    from shardviz.layout import Layout

NO_LABEL = "no placements (torch has none for this layout: split the tensor anew)"


def explain_label(claimed: Layout, held: Layout) -> Explanation:
    """Name the difference between the claimed and the held layout."""
    name = shape_of_difference(claimed, held)
    own, fits = write(claimed), write(held)
    fix = CATALOGUE[name].fix.format(placements=right_label(held))
    return Explanation(name, f"{_SENTENCES[name]}: claimed {own}, held {fits}", fix, fits, held)


_SENTENCES: dict[Shape, str] = {
    "another-order": "the axes split the dim in another order",
    "segments": "the dim is split segment by segment",
    "across-segments": "the dim is split across its segments",
    "one-factor": "the label cuts all parts at once where the axes cut one after the other",
    "another-dim": "another dim is split",
    "replicated": "copies are held where shards are claimed",
    "split": "shards are held where copies are claimed",
    "another-layout": "the tensor is split in another way",
}


def right_label(held: Layout) -> str:
    """Return torch's spelling of the placements that say what is held."""
    placements = held.placements()
    return spell(placements) if placements is not None else NO_LABEL


def shape_of_difference(claimed: Layout, held: Layout) -> Shape:
    """Return the name of the difference between two layouts of one tensor on one mesh."""
    ours, theirs = _axes_by_dim(claimed), _axes_by_dim(held)
    if set(held.split_axes) < set(claimed.split_axes) and not _numbers(held):
        return "replicated"
    if set(held.split_axes) > set(claimed.split_axes) and not _numbers(held):
        return "split"
    if set(held.split_axes) != set(claimed.split_axes):
        return "another-layout"
    if [set(axes) for axes in ours] != [set(axes) for axes in theirs]:
        return "another-dim"
    if any(JOIN in chain for chain in claimed.chains) and not _numbers(held):
        return "one-factor"
    if _numbers(claimed) and not _numbers(held):
        return "across-segments"
    if _numbers(held) != _numbers(claimed):
        return "segments"
    return "another-order" if ours != theirs else "another-layout"


def _axes_by_dim(layout: Layout) -> list[list[str]]:
    """Return each dim's splitting axes in order; axes of one rank split nothing."""
    return [
        [link for link in chain if isinstance(link, str) and link != JOIN and layout.mesh.axis_size(link) > 1]
        for chain in layout.chains
    ]


def _numbers(layout: Layout) -> list[Chain]:
    return [chain for chain in layout.chains if any(isinstance(link, int) for link in chain)]

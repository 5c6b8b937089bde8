"""How the first view shares its lines between the map and the finding below it: by what each needs."""

from __future__ import annotations

AROUND_MAP = 4
"""Lines of a map's box that draw nothing of it: the sides, the columns' names, and the element in words."""
LEAST_MAP = 3
"""Lines of a map beside a finding that a table shows."""
LEAST_MAP_SEEN = 10
"""Lines of a map that shows what is wrong."""
MOST_FOR_TREE = 0.4
"""The part of the view that a long list of tensors keeps."""


def most_of_card(height: int, tensors: int, *, borders: int, has_table: bool, least: int = 0) -> int:
    """Return the most lines that the finding's box may take: the map and the list keep what they need.

    Args:
        height: Lines of the view.
        tensors: How many tensors are listed, each on a line.
        borders: Lines of the borders around the map.
        has_table: Whether the finding is seen by a table, and not by the map alone.
        least: Lines of the card down to the end of the finding's fix: for these the map gets smaller.
    """
    for_map = AROUND_MAP + (LEAST_MAP if has_table else LEAST_MAP_SEEN)
    for_tree = min(tensors, int(height * MOST_FOR_TREE) - borders)
    most = height - borders - max(for_map, for_tree)
    return max(most, min(least + borders, height - borders - AROUND_MAP - LEAST_MAP), 1)

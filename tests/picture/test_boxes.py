"""The painter of boxes: lines where neighbors differ, and labels within them."""

import numpy as np

from shardviz.picture.text.panels import CellBlocks, paint_boxes


def _rows(boxes):
    return ["".join(row) for row in boxes.chars.tolist()]


def test_equal_neighbors_are_one_box():
    boxes = paint_boxes(np.array([[0, 1], [0, 0]]), CellBlocks.of_sizes([1, 1]), CellBlocks.of_sizes([2, 3]))
    assert _rows(boxes) == ["┌──┬───┐", "│  │   │", "│  └───┤", "│      │", "└──────┘"]


def test_rows_that_are_not_ruled_stand_close():
    boxes = paint_boxes(np.array([[0], [1]]), CellBlocks.of_sizes([1, 1], ruled=False), CellBlocks.of_sizes([1]))
    assert _rows(boxes) == ["┌─┐", "│ │", "│ │", "└─┘"]


def test_a_label_stands_in_the_middle_of_its_room():
    boxes = paint_boxes(np.array([[0]]), CellBlocks.of_sizes([1]), CellBlocks.of_sizes([8]))
    boxes.write_centred(1, 1, 8, "tp=1")
    assert _rows(boxes)[1] == "│  tp=1  │"


def test_a_label_is_cut_at_the_edge_of_the_picture():
    boxes = paint_boxes(np.array([[0]]), CellBlocks.of_sizes([1]), CellBlocks.of_sizes([3]))
    boxes.write(1, -2, "12345678")
    assert _rows(boxes)[1] == "34567"

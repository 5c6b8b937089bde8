"""Why a sharded step raises, by what the exception says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.check.run import check_dump
from shardviz.dump.records.step import RaisedRecord
from tests.check.checking import check_made, only
from tests.check.records import change_rank

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "cause", "text"),
    [
        (
            "shape '[2, 16, 4, 8]' is invalid for input of size 512",
            "view-of-whole",
            "1024 elements; a rank has 1/2 of them, 512, over tp",
        ),
        ("shape '[2, 16, 4, 8]' is invalid for input of size 500", "uneven-shapes", ""),
        (
            "a and b must have same reduction dim, but got [32, 16] X [32, 32].",
            "unlike-splits",
            "[32, 32]; o.weight is [8/tp, 8]",
        ),
        ("aten.nll_loss_backward.default got mixed torch.Tensor and DTensor", "backward-of-loss-parallel", ""),
        ("aten.nll_loss_forward.default got mixed torch.Tensor and DTensor", "mixed-dtensor", ""),
    ],
)
def test_shapes_that_do_not_fit_are_named_by_what_is_known_of_them(
    tmp_path: Path, error: str, cause: str, text: str
) -> None:
    check_made(tmp_path, "tp=2", {"o.weight": "[8/tp, 8]"})
    for rank in range(2):
        raised = RaisedRecord("step", f"rank 0 raised RuntimeError in forward (m.py:3), in module o: {error}", "o")
        change_rank(tmp_path / "made.shardviz", rank, raised=(raised,))
    finding = only(check_dump(tmp_path / "made.shardviz"))
    assert finding.cause_id == cause
    assert text in f"{finding.summary} {finding.cause}".replace(",024", "024")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 1", "unlike-sizes"),
        ("The size of tensor a (8) must match the size of tensor b (10) at non-singleton dimension 1", "uneven-shapes"),
        ("mat1 and mat2 shapes cannot be multiplied (9x16 and 8x16)", "unlike-sizes"),
        ("mat1 and mat2 shapes cannot be multiplied (9x16 and 64x16)", "uneven-shapes"),
        ("Expected size for first two dimensions of batch2 tensor to be: [2, 8] but got: [2, 16].", "unlike-sizes"),
        ("Expected size for first two dimensions of batch2 tensor to be: [4, 8] but got: [2, 16].", "uneven-shapes"),
        ("Sizes of tensors must match except in dimension 1. Expected size 4 but got size 8 for", "uneven-shapes"),
        ("Expected input batch_size (6) to match target batch_size (12).", "unlike-sizes"),
    ],
)
def test_two_sizes_of_which_one_is_an_axis_times_the_other_are_those_of_a_part_and_a_whole(
    tmp_path: Path, error: str, cause: str
) -> None:
    check_made(tmp_path, "tp=2", {"o.weight": "[8/tp, 8]"})
    text = f"rank 0 raised RuntimeError in forward (m.py:3), in module block: {error}"
    for rank in range(2):
        change_rank(tmp_path / "made.shardviz", rank, raised=(RaisedRecord("step", text, "block"),))
    assert only(check_dump(tmp_path / "made.shardviz")).cause_id == cause


@pytest.mark.parametrize(
    ("error", "is_unequal"),
    [
        ("a and b must have same reduction dim, but got [6, 33] X [32, 16].", True),
        ("The size of tensor a (11) must match the size of tensor b (10) at non-singleton dimension 1", True),
        ("shape '[2, 6, -1, 8]' is invalid for input of size 132", True),
        ("The size of tensor a (16) must match the size of tensor b (8) at non-singleton dimension 1", False),
        ("shape '[2, 6, -1, 8]' is invalid for input of size 100", False),
        ("shape '[2, 7, -1, 8]' is invalid for input of size 132", False),
        ("index 11 is out of bounds", False),
    ],
)
def test_sizes_of_parts_that_an_axis_does_not_divide_are_named(tmp_path: Path, error: str, is_unequal: bool) -> None:
    check_made(tmp_path, "tp=3", {"o.weight": "[32/tp, 8]", "p.weight": "[24/tp, 8]"})
    for rank in range(3):
        change_rank(tmp_path / "made.shardviz", rank, raised=(("step", f"rank 0 raised RuntimeError: {error}"),))
    finding = only(check_dump(tmp_path / "made.shardviz"))
    assert (finding.cause_id == "unequal-parts") is is_unequal
    if is_unequal:
        assert "tp doesn't divide a dim of 32: its parts are 11, 11, 10" in finding.cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("shape '[4, 10, -1, 8]' is invalid for input of size 160", "cut-heads"),
        ("unflatten: Provided sizes [-1, 8] don't multiply up to the size of dim 2 (12) in the input", "cut-heads"),
        ("shape '[4, 10, -1, 8]' is invalid for input of size 170", "uneven-shapes"),
        ("shape '[-1, 4, 8]' is invalid for input of size 160", "uneven-shapes"),
        ("shape '[-1]' is invalid for input of size 160", "uneven-shapes"),
        (
            "unflatten: Provided sizes [-1, 3, 8] don't multiply up to the size of dim 2 (32) in the input",
            "uneven-shapes",
        ),
    ],
)
def test_a_rank_without_a_whole_number_of_heads_is_named(tmp_path: Path, error: str, cause: str) -> None:
    check_made(tmp_path, "tp=4", {"o.weight": "[16/tp, 8]"})
    change_rank(tmp_path / "made.shardviz", 0, raised=(("step", f"rank 0 raised RuntimeError: {error}"),))
    assert only(check_dump(tmp_path / "made.shardviz")).cause_id == cause


def test_unequal_parts_of_another_module_explain_nothing(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=3", {"o.weight": "[32/tp, 8]", "p.weight": "[24/tp, 8]"})
    text = "rank 0 raised RuntimeError in forward (m.py:3), in module p: The size of tensor a (11) must match 10"
    change_rank(tmp_path / "made.shardviz", 0, raised=(RaisedRecord("step", text, "p"),))
    assert only(check_dump(tmp_path / "made.shardviz")).cause_id == "uneven-shapes"

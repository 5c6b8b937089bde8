"""Parts that code cut by hand and FSDP splits again, on a mesh that does not have the axis of the cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, GatherRecord, LayoutRecord, MeshRecord, Stamp, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardviz.dump.dump import Dump

RANKS = (0, 1, 2, 3)  # dp=2, tp=2
MESH = MeshRecord(("dp", "tp"), (2, 2), RANKS)
WHOLE = (16, 8)
ROWS = {0: (0, 4), 1: (8, 12), 2: (4, 8), 3: (12, 16)}
"""Rank 1 has the second half over tp, and of that the first over dp."""


def cut(
    path: Path,
    rows: Mapping[int, tuple[int, int]],
    own_axes: tuple[str, ...] = ("dp",),
    gradient: tuple[LayoutRecord, tuple[int, int]] | None = None,
) -> Dump:
    """Hold rows of a weight, labeled as a tensor of the part's shape that dp splits, and maybe its gradient."""
    folder = prepare_folder(path / "run")
    stamp = Stamp("up.weight", 1, WHOLE)
    write_run(folder, RunRecord(1, "test", "none", 4, mesh=MESH, stamps=(stamp,)))
    layouts = [LayoutRecord(0, ("Shard(0)", "Replicate()"), (8, 8), own_axes=own_axes)]
    layouts += [gradient[0]] if gradient else []
    for rank, span in rows.items():
        bodies = [Body("param", "stamped", (8, 8), (4, 8), "float32", layout=0, held=((span,), ((0, 8),)))]
        bodies += [Body("grad", "step", (8, 8), gradient[1], "float32", layout=1)] if gradient else []
        other = rows.get(rank ^ 2, span)
        whole = (min(span[0], other[0]), max(span[1], other[1]))
        write_rank(
            folder,
            RankRecord(
                1,
                rank,
                4,
                "testhost",
                meshes=(MESH,),
                layouts=tuple(layouts),
                bodies=tuple(bodies),
                tensors=tuple(TensorRecord("up.weight", number) for number in range(len(bodies))),
                gathered=(GatherRecord("up.weight", "full_tensor", held=((whole,), ((0, 8),))),),
            ),
        )
    return dump_of(read_files(folder, strict=len(rows) == 4))


def test_a_part_of_a_hand_cut_weight_has_the_layout_of_the_whole(tmp_path: Path) -> None:
    dump = cut(tmp_path, ROWS)
    claimed = dump.stamped["up.weight"].claimed
    assert claimed is not None
    assert write(claimed) == "[16/tp/dp, 8]"
    assert report_on(dump).findings == ()


def test_parts_in_another_order_than_ranks_are_plain_and_no_finding(tmp_path: Path) -> None:
    dump = cut(tmp_path, {0: (8, 12), 1: (0, 4), 2: (12, 16), 3: (4, 8)})
    assert dump.stamped["up.weight"].claimed is None
    assert report_on(dump).findings == ()


@pytest.mark.parametrize(
    "rows",
    [
        {0: (0, 4), 1: (8, 12), 2: (4, 8), 3: (8, 12)},  # rank 3 has the rows of rank 1
        {0: (4, 8), 1: (8, 12), 2: (0, 4), 3: (8, 12)},
    ],
)
def test_rows_that_two_ranks_have_and_rows_that_none_has_are_findings(
    tmp_path: Path, rows: Mapping[int, tuple[int, int]]
) -> None:
    assert {finding.kind for finding in report_on(cut(tmp_path, rows)).findings} == {"duplicated", "missing"}


def test_a_label_on_the_whole_mesh_is_wrong_where_it_says_replicate(tmp_path: Path) -> None:
    (finding,) = report_on(cut(tmp_path, ROWS, own_axes=())).findings
    assert finding.kind == "wrong-shape"


@pytest.mark.parametrize(
    ("placements", "local", "text"),
    [
        (("Shard(0)", "Replicate()"), (4, 8), "[16/tp/dp, 8]"),
        (("Replicate()", "Replicate()"), (8, 8), "[16/tp, 8]"),
        (("Partial()", "Replicate()"), (8, 8), "[16/tp, 8] +dp"),
    ],
)
def test_a_gradient_of_a_part_keeps_its_own_placements(
    tmp_path: Path, placements: tuple[str, str], local: tuple[int, int], text: str
) -> None:
    gradient = LayoutRecord(0, placements, (8, 8), own_axes=("dp",)), local
    claimed = cut(tmp_path, ROWS, gradient=gradient).by_name("step", "grad")["up.weight"].claimed
    assert claimed is not None
    assert write(claimed) == text


def test_a_rank_that_is_missing_leaves_parts_what_they_are(tmp_path: Path) -> None:
    dump = cut(tmp_path, {rank: span for rank, span in ROWS.items() if rank != 3})
    claimed = dump.stamped["up.weight"].claimed
    assert claimed is not None
    assert write(claimed) == "[16/tp/dp, 8]"

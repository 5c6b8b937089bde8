"""A checkpoint's tensors as pictures: which file holds which part. Golden files are looked at before they change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from shardviz.check.report import Report
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.records import ByteRange, Checkpoint, Chunk, StoredTensor
from shardviz.errors import DumpError
from shardviz.picture.html.stored import stored_html
from shardviz.picture.model import stored as drawing
from shardviz.picture.model.stored import checkpoint_subject, number_files
from shardviz.picture.svg.stored import stored_svg
from tests.picture.golden import check_golden
from tests.picture.test_html import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path

NAME = "layers.0.weight"
Parts = list[tuple[tuple[int, ...], tuple[int, ...], "str | None"]]
ROWS: Parts = [((0, 0), (3, 8), "a-10"), ((3, 0), (3, 8), "a-9"), ((6, 0), (2, 8), "a-2")]
GRID: Parts = [((row, col), (4, 4), f"f{row // 4}{col // 4}") for row in (0, 4) for col in (0, 4)]
CASES: dict[str, tuple[tuple[int, ...], Parts]] = {
    "rows": ((8, 8), ROWS),
    "grid": ((8, 8), GRID),
    "gap": ((8, 8), ROWS[:2]),
    "nowhere": ((8, 8), [*ROWS[:2], ((6, 0), (2, 8), None)]),
    "overlap": ((8, 8), [*ROWS, ((5, 0), (2, 8), "b")]),
    "line": ((6,), [((0,), (2,), "a"), ((2,), (4,), "b")]),
    "number": ((), [((), (), "a")]),
    "empty": ((0, 4), [((0, 0), (0, 4), "a")]),
    "experts": ((4, 6, 8), [((at, 0, 4 * half), (1, 6, 4), f"r{at}{half}") for at in range(4) for half in (0, 1)]),
    "many": ((60, 4), [((at, 0), (1, 4), f"model-{at:05}.safetensors") for at in range(60)]),
}


def made(folder: Path, shape: tuple[int, ...], parts: Parts, name: str = NAME) -> Checkpoint:
    """Return a checkpoint of one tensor, in files of a kilobyte."""
    chunks = tuple(
        Chunk(offsets, sizes, ByteRange(file, 64 * at, 32) if file is not None else None)
        for at, (offsets, sizes, file) in enumerate(parts)
    )
    for _, _, file in parts:
        if file is not None:
            (folder / file).write_bytes(bytes(1024))
    return Checkpoint(folder, "DCP", {name: StoredTensor(name, shape, "float32", chunks, folder)})


def drawn(checkpoint: Checkpoint) -> str:
    (one,) = checkpoint.tensors.values()
    return stored_svg(checkpoint_subject(one, number_files(checkpoint)))


@pytest.mark.parametrize("case", ["rows", "grid", "gap", "overlap", "many", "experts"])
def test_the_bytes_of_a_picture_are_stable(case: str, tmp_path: Path) -> None:
    check_golden(f"stored_{case}", drawn(made(tmp_path, *CASES[case])), "svg")


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_drawn_well_formed(case: str, tmp_path: Path) -> None:
    root = ElementTree.fromstring(drawn(made(tmp_path, *CASES[case])))
    texts = [node.text or "" for node in root.iter() if node.tag.endswith("}text")]
    assert texts[0] == NAME
    assert not any("rank" in text for text in texts)


def test_files_are_numbered_by_their_names_and_named_beside_the_map(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, *CASES["rows"])
    assert number_files(checkpoint) == {"a-2": 0, "a-9": 1, "a-10": 2}
    picture = drawn(checkpoint)
    assert "[0:3, 0:8]: file 2" in picture
    assert "[0:3, 0:8]  file 2, bytes 0 to 32" in picture


def test_what_no_file_holds_and_what_two_hold_is_reported(tmp_path: Path) -> None:
    assert "[6:8, 0:8]: no file" in drawn(made(tmp_path, *CASES["gap"]))
    assert "[6:8, 0:8]  in no file" in drawn(made(tmp_path, *CASES["nowhere"]))
    assert re.search(r"\[5:6, 0:8\]: files 1,3", drawn(made(tmp_path, *CASES["overlap"])))


def test_chunks_that_cannot_be_drawn_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "MOST_DRAWN", 8)
    outside = made(tmp_path, (4, 4), [((2, 0), (4, 4), "a")])
    with pytest.raises(DumpError, match=r"its chunk \[2:6, 0:4\] reaches out of \[4, 4\]"):
        drawn(outside)
    many = made(tmp_path, (9, 1), [((at, 0), (1, 1), "a") for at in range(9)])
    with pytest.raises(DumpError, match="9 chunks, more than 8 are not drawn"):
        drawn(many)


def test_a_page_has_findings_files_with_sizes_and_maps(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, *CASES["gap"])
    page = stored_html(checkpoint, check_checkpoint(checkpoint))
    assert "✗ 1 finding" in page
    assert page.index('id="findings"') < page.index('id="files"') < page.index('id="tensors"')
    assert "1 KiB" in page
    assert "no file" in page


def test_names_of_strangers_are_never_markup(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, (8, 8), [((0, 0), (8, 8), "a'\"><b>")], HOSTILE)
    for text in (drawn(checkpoint), stored_html(checkpoint, Report(1, 1))):
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "<b>" not in text
        assert "\x1b" not in text

"""A job drawn beside a checkpoint: what differs is marked on both sides, and the bytes named are those of the part."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.live_job.compare import compare_with_job
from shardviz.checkpoint.live_job.job import job_of
from shardviz.checkpoint.open import open_checkpoint
from shardviz.checkpoint.records import extents
from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.region import Region
from shardviz.picture.model.drawing import draw
from shardviz.picture.model.stored import comparison_subject, number_files
from tests.checkpoint.jobs import Held, job
from tests.checkpoint.saving import FORMATS


def weight(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def made(tmp_path, tensors, saved, mesh="fsdp=2,tp=2"):
    """Write a job and a checkpoint, and return both and what became of each tensor."""
    folder = job(tmp_path / "job.shardviz", mesh, tensors)
    save_file({name: np.ascontiguousarray(one) for name, one in saved.items()}, tmp_path / "ckpt.safetensors")
    sides = job_of(dump_of(read_files(folder))), open_checkpoint(tmp_path / "ckpt.safetensors")
    found = compare_with_job(*sides)
    return sides, {one.name: one for one in found.outcomes}


def marked(one):
    """Return the rows and columns of the blocks that are marked."""
    (panel,) = draw(one.sides, one.shape).panels
    return {
        (str(row), str(col))
        for row, line in zip(panel.rows, panel.differs, strict=True)
        for col, differs in zip(panel.cols, line, strict=True)
        if differs
    }


def test_parts_of_ranks_that_hold_something_else_are_marked_with_what_it_is_and_where_it_should_come_from(tmp_path):
    w = weight(24, 16)
    (own, checkpoint), found = made(tmp_path, {"w": Held(w, "[24/fsdp/tp, 16]", "[24/tp/fsdp, 16]")}, {"w": w})
    one = comparison_subject(found["w"], own, checkpoint, number_files(checkpoint))
    assert marked(one) == {("6:12", "0:16"), ("12:18", "0:16")}
    wrong = [(row.title, row.cells[1].text) for row in one.exhibit.rows if row.cells[1].is_wrong]
    assert wrong == [("rank 1", "[12:18, 0:16]"), ("rank 2", "[6:12, 0:16]")]
    start, stop = (
        int(text.replace(",", ""))
        for text in re.search(r"bytes ([\d,]+) to ([\d,]+)", one.exhibit.rows[0].cells[2].text).groups()
    )
    assert (tmp_path / "ckpt.safetensors").read_bytes()[start:stop] == w[6:12].tobytes()


def test_of_copies_only_the_wrong_one_is_named(tmp_path):
    w = weight(8, 6)
    (own, checkpoint), found = made(tmp_path, {"w": Held(w, "[8, 6/tp]", of_rank={3: weight(8, 3, seed=1)})}, {"w": w})
    one = comparison_subject(found["w"], own, checkpoint, number_files(checkpoint))
    assert marked(one) == {("0:8", "3:6")}
    assert [row.title for row in one.exhibit.rows if row.cells[1].is_wrong] == ["rank 3"]
    assert one.exhibit.rows[0].cells[2].text.startswith("within bytes ")


@pytest.mark.parametrize("claimed", [None, "[8/fsdp/tp, 6]", "[8, 6/tp]"])
def test_what_is_equal_has_no_mark(tmp_path, claimed):
    w = weight(8, 6)
    (own, checkpoint), found = made(tmp_path, {"w": Held(w, claimed)}, {"w": w})
    one = comparison_subject(found["w"], own, checkpoint, number_files(checkpoint))
    assert not marked(one)
    assert not any(cell.is_wrong for row in one.exhibit.rows for cell in row.cells)


def test_another_shape_is_drawn_by_itself_and_what_one_side_lacks_is_said(tmp_path):
    tensors = {"w": Held(weight(8, 6), "[8/tp, 6]"), "mine": Held(weight(3))}
    (own, checkpoint), found = made(tmp_path, tensors, {"w": weight(9, 6), "theirs": weight(4, 4)})
    ones = {name: comparison_subject(one, own, checkpoint, number_files(checkpoint)) for name, one in found.items()}
    assert ones["w"].why == "it is [8, 6] in the job and [9, 6] in the checkpoint"
    assert not ones["w"].sides.has_held
    assert (ones["mine"].why, ones["theirs"].why) == ("only the job has it", "only the checkpoint has it")
    assert not ones["theirs"].sides.has_claimed


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("half", "moved")])
@pytest.mark.parametrize("region", [Region((((3, 9),), ((2, 5),))), Region.whole((24, 16))], ids=str)
def test_bytes_of_a_part_are_where_its_elements_are_in_every_format(saved, name, region):
    checkpoint = open_checkpoint(saved / name)
    tensor = next(one for one in checkpoint.tensors.values() if one.name.endswith("0.weight") and one.shape == (24, 16))
    values = {int(one) for one in tensor.read(region).reshape(-1)}
    where = list(extents(tensor, region))
    parts = [(checkpoint.folder / one.file).read_bytes()[one.start : one.stop] for one in where]
    assert values <= {int(one) for part in parts for one in np.frombuffer(part, "<u4")}
    assert all(one.is_full for one in where) == (sum(map(len, parts)) == 4 * region.size)


def test_diff_writes_a_page_and_a_picture(saved, tmp_path, capsys):
    sides = str(saved / "job.shardviz"), str(saved / "moved")
    assert main(["diff", *sides, "-o", str(tmp_path / "x.html")]) == 1
    page = (tmp_path / "x.html").read_text()
    assert "3 equal, 1 permuted" in page
    assert page.index("0.weight") < page.index("0.bias")
    assert main(["diff", *sides, "-o", str(tmp_path / "x.svg")]) == 1
    picture = (tmp_path / "x.svg").read_text()
    ElementTree.fromstring(picture)
    assert "the job, by rank" in picture
    assert "(not what the checkpoint has)" in picture
    assert main(["diff", *sides, "0.bias", "-o", str(tmp_path / "same.svg")]) == 1
    assert "(not what" not in (tmp_path / "same.svg").read_text()
    capsys.readouterr()


def test_a_picture_of_something_else_is_refused_in_one_line(saved, tmp_path, capsys):
    dump, moved = str(saved / "job.shardviz"), str(saved / "moved")
    assert main(["diff", moved, str(saved / "half"), "-o", str(tmp_path / "x.svg")]) == 2
    assert "a picture compares a job with a checkpoint, and these are two checkpoints" in capsys.readouterr().err
    assert main(["diff", dump, dump, "--format", "html"]) == 2
    assert "these are two dumps" in capsys.readouterr().err
    assert main(["diff", dump, moved, "0.weigth", "-o", str(tmp_path / "x.svg")]) == 2
    assert "did you mean 0.weight?" in capsys.readouterr().err
    assert main(["diff", dump, str(saved / "whole"), "-o", str(tmp_path / "x.svg")]) == 2
    assert "an SVG shows one tensor, and 4 tensors fit" in capsys.readouterr().err
    assert main(["diff", dump, moved, "0.weight"]) == 2
    assert "a tensor is named for an SVG, and this is text" in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()


def test_names_of_strangers_are_text(tmp_path, capsys):
    name = "<script>x</script>\x1b[31m\nw"
    made(tmp_path, {name: Held(weight(4, 4), "[4/tp, 4]", "[4, 4/tp]")}, {name: weight(4, 4)})
    for ending in ("html", "svg"):
        path = tmp_path / f"x.{ending}"
        assert main(["diff", str(tmp_path / "job.shardviz"), str(tmp_path / "ckpt.safetensors"), "-o", str(path)]) == 1
        assert "<script>x" not in path.read_text()
        assert "\x1b" not in path.read_text()
    capsys.readouterr()

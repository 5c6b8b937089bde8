"""A job beside a checkpoint in the viewer: what differs first, wrong parts marked on both maps, in words below."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.cli import main
from shardviz.errors import DumpError
from shardviz.tui.app import view
from shardviz.tui.screens.compare_view import CompareView
from shardviz.tui.widgets.tensor_map import TensorMap
from tests.checkpoint.jobs import Held, job
from tests.tui.driving import walk, walk_on


def weight(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """A job that has one weight in another order, and a checkpoint with a tensor that the job lacks."""
    folder = tmp_path_factory.mktemp("beside")
    right, wrong = weight(8, 6), weight(24, 16, seed=1)
    tensors = {"right": Held(right, "[8/tp, 6]"), "wrong": Held(wrong, "[24/fsdp/tp, 16]", "[24/tp/fsdp, 16]")}
    job(folder / "job.shardviz", "fsdp=2,tp=2", tensors)
    save_file({"right": right, "wrong": wrong, "theirs": weight(3)}, folder / "ckpt.safetensors")
    return folder / "job.shardviz", folder / "ckpt.safetensors"


def test_the_viewer_opens_on_what_differs_with_marks_on_both_maps_and_what_ranks_hold(sides):
    walks = walk_on(sides[0], {"opened": (), "theirs": ["down"], "right": ["down"]}, other=sides[1])
    shown = walks["opened"]
    lines = [line for line in shown.text.splitlines() if line.startswith("│  ")]
    assert [line[3:12].strip() for line in lines if line[3] in "≠<>=?"] == ["≠ wrong", "> theirs", "= right"]
    assert "the job, by rank" in shown.text
    assert "✗ 1" in shown.text
    assert "✗ 2" in shown.text
    assert "✗ 0" in shown.text
    assert "✗ [12:18, 0:16]" in shown.text
    assert "of ckpt.safetensors" in shown.text
    assert "only the checkpoint has it" in walks["theirs"].text
    for unmarked in ("theirs", "right"):
        assert not any("≠" in line for line in walks[unmarked].text.splitlines()[13:])


def test_the_cursor_moves_on_both_maps_and_the_mouse_is_told_rank_and_file(sides):
    def look(app):
        maps = list(app.query(TensorMap))
        beside = [one for one in maps if one.id in ("here", "there")]
        return [one.place for one in beside], beside[0].describe((7, 0)), app.query_one(CompareView).picture()

    places, said, picture = walk(sides[0], "tab", "end", other=sides[1], look=look).result
    assert places == [(23, 15), (23, 15)]
    assert said == "[7, 0] ✗\nclaimed by rank 1\nin ckpt.safetensors"
    assert "(not what the checkpoint has)" in picture


def test_a_checkpoint_that_cannot_be_read_is_said_and_the_dump_stays(sides, tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x00" * 3)
    shown = walk(sides[0], "1", other=bad, look=lambda app: app.note)
    assert shown.exited is None
    assert "bad.safetensors" in shown.result
    with pytest.raises(DumpError, match=r"bad\.safetensors"):
        view(sides[0], other=bad)


def test_view_prints_what_diff_does_in_a_pipe_in_either_order(sides, capsys):
    for order in (sides, sides[::-1]):
        assert main(["view", *map(str, order)]) == 0
        assert "permuted  wrong" in capsys.readouterr().out

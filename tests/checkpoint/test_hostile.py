"""Metadata, names and files that were made to mislead: refused in one line, or findings; no memory, no waiting."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.errors import DumpError, ShardvizError
from shardviz.picture.model.stored import checkpoint_subject, number_files
from shardviz.picture.text.checkpoint import tensor_lines
from shardviz.reference.files import open_reference
from tests.checkpoint.hostile import KIB, chunk, edited, kinds, look, place, refused, tensor
from tests.lanes import nightly

MANY = 17_000
"""Chunks of a tensor that are more than a map has room for."""


HUGE = (1 << 50, 1 << 50)


@pytest.mark.parametrize(
    "change",
    [
        tensor(size=HUGE),
        chunk(sizes=HUGE),
        place(length=1 << 50),
        place(offset=1 << 50),
        lambda metadata: (tensor(size=HUGE)(metadata), chunk(sizes=HUGE)(metadata)),
    ],
)
def test_huge_sizes_are_findings_and_take_no_memory(small, tmp_path, change):
    assert kinds(edited(small, tmp_path, change))


@nightly
def test_twenty_thousand_chunks_are_counted_in_a_moment(small, tmp_path):
    def change(metadata):
        one = metadata.state_dict_metadata["model.w"]
        one.size = torch.Size((400_000, 6))
        one.chunks = [type(one.chunks[0])(torch.Size((4 * at, 0)), torch.Size((4, 6))) for at in range(20_000)]

    folder = edited(small, tmp_path, change)
    assert "missing" in [one.kind for one in check_checkpoint(open_checkpoint(folder)).findings]


def test_a_reference_with_a_gap_is_refused_before_it_is_used(small, tmp_path):
    folder = edited(small, tmp_path, chunk(sizes=torch.Size((3, 6))))
    with pytest.raises(DumpError, match=r"does not have all of model\.w"):
        open_reference(folder)
    assert open_reference(small / "dcp").find("model.w") is not None


@pytest.mark.parametrize(
    "name",
    ["\x1b[31mup\x1b[0m", "<script>alert(1)</script>", "[bold]up[/bold]", "up\ndown", "\u202eup", "", "a" * 100_000],
)
def test_names_with_escapes_and_markup_are_drawn_as_text(small, tmp_path, name):
    def change(metadata):
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop("model.w")
        info = metadata.storage_data.pop(MetadataIndex("model.w", [0, 0]))
        metadata.storage_data[MetadataIndex(name, [0, 0])] = info

    kinds(edited(small, tmp_path, change))
    with suppress(ShardvizError):
        look(edited(small, tmp_path, place(relative_path="<b>\x1b[1m")))


def test_many_chunks_are_listed_and_their_map_is_refused(small, tmp_path):
    def change(metadata):
        one = metadata.state_dict_metadata["model.w"]
        one.size = torch.Size((MANY, 6))
        piece = type(one.chunks[0])
        one.chunks = [piece(torch.Size((at, 0)), torch.Size((1, 6))) for at in range(MANY)]

    folder = edited(small, tmp_path, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = open_checkpoint(folder)
    with pytest.raises(DumpError, match="17,000 chunks, more than 16,384 are not drawn"):
        checkpoint_subject(found.tensors["model.w"], number_files(found))
    assert len(tensor_lines(found.tensors["model.w"])) < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 * KIB


def test_loops_of_links_are_not_followed(small, tmp_path):
    os.symlink("loop.safetensors", tmp_path / "loop.safetensors")
    assert not refused(tmp_path)
    assert not open_checkpoint(tmp_path).tensors
    folder = edited(small, tmp_path, place(relative_path="round.distcp"))
    os.symlink("round.distcp", folder / "round.distcp")
    assert "incomplete" in kinds(folder)
    (tmp_path / "self").mkdir()
    os.symlink(tmp_path / "self", tmp_path / "self" / "self")
    os.symlink("..", tmp_path / "self" / ".metadata")
    assert refused(tmp_path / "self")


def test_a_pipe_is_not_waited_for(small, tmp_path):
    folder = edited(small, tmp_path, place(relative_path="pipe"))
    os.mkfifo(folder / "pipe")
    assert "incomplete" in kinds(folder)
    (tmp_path / "hf").mkdir()
    os.mkfifo(tmp_path / "hf" / "model.safetensors")
    assert not refused(tmp_path / "hf")
    assert not open_checkpoint(tmp_path / "hf").tensors
    os.mkfifo(tmp_path / ".metadata")
    assert ".metadata is missing" in refused(tmp_path)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, ending, order, capsys):
    save_file({"w": np.ones(4)}, tmp_path / "right.safetensors")
    os.mkfifo(tmp_path / f"pipe.{ending}")
    paths = [str(tmp_path / f"pipe.{ending}"), str(tmp_path / "right.safetensors")]
    assert main(["diff", *paths[::order]]) == 2
    assert "is neither a file nor a folder" in capsys.readouterr().err

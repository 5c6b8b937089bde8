"""Files of ranks that each have a part of every tensor, without a word on how the parts are joined."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from shardviz.checkpoint.formats.headers import of_ranks
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.errors import DumpError
from tests.checkpoint.maps import weight

WHOLE = {"up": weight(8, 4), "down": weight(4, 8, seed=1), "norm": weight(4, seed=2)}


def part(rank):
    return {"up": WHOLE["up"].chunk(2)[rank], "down": WHOLE["down"].chunk(2, 1)[rank], "norm": WHOLE["norm"]}


def written(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: one.clone() for name, one in tensors.items()}
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save({"model": tensors}, path)
    return path


@pytest.mark.parametrize(
    "name", ["tp_rank_{:02d}.safetensors", "model-rank{}.safetensors", "tp_rank_{:02d}.pt", "consolidated.{:02d}.pth"]
)
def test_files_of_ranks_are_not_taken_for_one_checkpoint(tmp_path, capsys, name):
    files = [written(tmp_path / "tp" / name.format(rank), part(rank)) for rank in range(2)]
    assert main(["check", str(tmp_path / "tp")]) == 2
    assert "has the parts of 2 ranks" in capsys.readouterr().err
    assert main(["check", str(files[1])]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"it has one rank's parts, of 2 ({name.format(0)}, {name.format(1)})" in out
    assert "✓ the file has one rank's parts of 3 tensors" in out
    whole = written(tmp_path / f"whole{files[0].suffix}", WHOLE)
    for sides in ((whole, files[1]), (files[1], whole)):
        assert main(["diff", *map(str, sides)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "1 equal, 2 not-compared" in out
        assert "one rank's part of it, of 2: join the ranks' files first" in out


@pytest.mark.parametrize("again", [False, True])
def test_files_that_are_not_of_ranks_are_read_as_before(tmp_path, again):
    """Stages of a pipeline have their own tensors; two copies of one file are a finding of check."""
    names = ("pp_rank_0", "pp_rank_1") if not again else ("model", "copy")
    for at, name in enumerate(names):
        mine = WHOLE if again else {f"layers.{at}.{key}": one for key, one in WHOLE.items()}
        written(tmp_path / "folder" / f"{name}.safetensors", mine)
    checkpoint = open_checkpoint(tmp_path / "folder")
    assert len(checkpoint.tensors) == (3 if again else 6)
    assert main(["check", str(tmp_path / "folder")]) == again


def test_the_only_file_of_a_folder_is_read(tmp_path, capsys):
    for rank in range(2):
        written(tmp_path / f"iter_1/mp_rank_{rank:02d}/model_optim_rng.pt", part(rank))
    assert main(["check", str(tmp_path / "iter_1" / "mp_rank_01")]) == 0
    assert "it has one rank's parts, of 2 (mp_rank_00, mp_rank_01)" in capsys.readouterr().out
    written(tmp_path / "one" / "pytorch_model.bin", WHOLE)
    assert not open_checkpoint(tmp_path / "one").ranks
    written(tmp_path / "one" / "other.bin", WHOLE)
    with pytest.raises(DumpError, match="each a whole checkpoint or a part of one"):
        open_checkpoint(tmp_path / "one")


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["mp_rank_00", "mp_rank_01", "latest"], ["mp_rank_00", "mp_rank_01"]),
        (["frank_1.pt", "frank_2.pt"], []),
        (["rank_0.pt"], []),
        (["low_rank_8.pt", "low_rank_16.pt"], []),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], []),
    ],
)
def test_names_of_ranks(names, ranks):
    assert of_ranks(names) == ranks

"""A file of all weights next to an index of several files: transformers reads the file, others the index."""

from __future__ import annotations

import json

from safetensors.torch import save_file

from shardviz.cli import main
from tests.checkpoint.maps import weight

TENSORS = {"gate": weight(8, 8), "up": weight(8, 8, seed=1), "norm": weight(8, seed=2)}


def test_an_index_that_names_the_file_itself_has_one_set(tmp_path, capsys):
    folder = tmp_path / "one"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["check", str(folder)]) == 0
    assert "not checked" not in capsys.readouterr().out

"""A file of all weights next to an index of several files: transformers reads the file, others the index."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file

from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from tests.checkpoint.maps import weight

TENSORS = {"gate": weight(8, 8), "up": weight(8, 8, seed=1), "norm": weight(8, seed=2)}
SECOND = {
    "the same": (TENSORS, 0),
    "exchanged": ({**TENSORS, "gate": TENSORS["up"], "up": TENSORS["gate"]}, 2),
    "another dtype": ({**TENSORS, "up": TENSORS["up"].half()}, 1),
    "one more": ({**TENSORS, "bias": weight(8)}, 1),
    "one less": ({name: TENSORS[name] for name in ("gate", "up")}, 1),
}


def folder_of(path, stem, second):
    path.mkdir()
    files = {name: f"{stem}-{name}.safetensors" for name in TENSORS}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, path / file)
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if second is not None:
        save_file(second, path / f"{stem}.safetensors")
    return path


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("case", SECOND)
def test_a_second_set_of_other_weights_is_a_finding(tmp_path, capsys, case, stem):
    second, odd = SECOND[case]
    folder = folder_of(tmp_path / "two", stem, second)
    plain = folder_of(tmp_path / "one", stem, None)
    assert open_checkpoint(folder).second_set == f"{stem}.safetensors"
    assert main(["check", str(folder)]) == bool(odd)
    out = " ".join(capsys.readouterr().out.split())
    num = len({*TENSORS, *second})
    if odd:
        assert f"{odd} tensor{'s' if odd > 1 else ''} of {num} differ{'' if odd > 1 else 's'} there" in out
    else:
        assert f"? not checked: {stem}.safetensors, which transformers reads before the index" in out
    assert main(["diff", str(plain), str(folder)]) == bool(odd)
    assert main(["diff", str(folder), str(plain)]) == bool(odd)
    assert (
        f"in the first, {stem}.safetensors is next to the index" in " ".join(capsys.readouterr().out.split()) or not odd
    )


def test_an_index_that_names_the_file_itself_has_one_set(tmp_path, capsys):
    folder = tmp_path / "one"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["check", str(folder)]) == 0
    assert "not checked" not in capsys.readouterr().out

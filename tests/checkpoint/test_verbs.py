"""What the verbs print and exit with for a checkpoint."""

from __future__ import annotations

import json
import re

import pytest

from shardviz.cli import main
from tests.checkpoint.saving import HAS_HF


def run(capsys, *args):
    code = main(list(map(str, args)))
    out, err = capsys.readouterr()
    return code, out, err


def test_check_of_a_checkpoint_that_lacks_a_file_exits_with_1(copied, capsys):
    folder = copied("dcp")
    (folder / "__1_0.distcp").unlink()
    code, out, _ = run(capsys, "check", folder)
    assert code == 1
    assert "incomplete" in out
    assert "__1_0.distcp is missing" in out
    assert re.search(r"✗ 1 finding in [1-9]+ of 16 tensors, 4 files\n$", out)
    code, out, _ = run(capsys, "check", folder, "--format", "json")
    assert (code, [one["kind"] for one in json.loads(out)["findings"]]) == (1, ["incomplete"])
    code, out, _ = run(capsys, "check", folder, "--format", "github")
    assert (code, out.startswith("::error title=shardviz%3A incomplete")) == (1, True)
    code, out, _ = run(capsys, "check", folder, "--format", "junit")
    assert (code, 'name="app.model.0.weight"' in out) == (1, True)


@pytest.mark.parametrize("verb", ["show", "view"])
def test_tensors_are_listed_with_their_chunks_and_files(saved, capsys, verb):
    code, out, _ = run(capsys, verb, saved / "dcp")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("app.")}
    assert rows["app.model.0.weight"] == ["float32[24,", "16]", "4", "4", "1.5", "KiB"]
    assert out.splitlines()[-1].startswith("DCP: 16 tensors of ")


@pytest.mark.skipif(not HAS_HF, reason="needs a torch that writes Hugging Face's format")
def test_a_tensor_is_shown_with_its_bytes(saved, capsys):
    code, out, _ = run(capsys, "show", saved / "hf", "0.bias")
    assert code == 0
    assert "[12:18]  shard-00002-model-00001-of-00001.safetensors" in out
    code, _, err = run(capsys, "show", saved / "hf", "0.bais")
    assert (code, "did you mean 0.bias?" in err) == (2, True)
    code, _, err = run(capsys, "show", saved / "dcp", "exp_avg")
    assert (code, "4 tensors end in 'exp_avg'" in err, "exp_avg, or '*.exp_avg' for all of" in err) == (2, True, True)


@pytest.mark.parametrize("option", [["--memory"], ["--comms"], ["--schedule"]])
def test_what_only_a_run_has_is_refused(saved, capsys, option):
    code, _, err = run(capsys, "show", saved / "dcp", *option)
    assert (code, "dcp is a checkpoint, which has no" in err) == (2, True)


def test_names_of_strangers_are_printed_as_text(tmp_path, capsys):
    header = json.dumps({"a\u001b[31m\nb": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)
    for verb in ("check", "show"):
        _, out, err = run(capsys, verb, tmp_path)
        assert "\x1b[31m" not in out + err
    _, out, _ = run(capsys, "diff", tmp_path, tmp_path)
    assert "1 tensor compared, all equal" in out

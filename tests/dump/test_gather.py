"""Parts of one dump, each from a machine with a disk of its own: put together, or refused in one line that says why."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from shardviz.check.run import report_on
from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.gather import read_parts
from shardviz.dump.read import arrays_of, read_files
from shardviz.dump.write import TRACE_FOLDER
from shardviz.errors import DumpError
from tests.dump.samples import put, spoil, write_sample

RUN_ID = "0123456789abcdef"


def write_run_of(folder: Path, run_id: str = RUN_ID) -> Path:
    write_sample(folder)
    for file in folder.glob("*.json"):
        spoil(file, put(run_id, "run_id"))
    return folder


def part(folder: Path, rank: int, run_id: str = RUN_ID) -> Path:
    """Write the folder of the machine of one of two ranks, with the trace of a step."""
    for written in (folder, folder / TRACE_FOLDER):
        write_run_of(written, run_id)
        for file in written.glob(f"rank_0000{1 - rank}.*"):
            file.unlink()
    spoil(folder / "run.json", put(["torchrun", "--node-rank", str(rank)], "command"))
    return folder


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [part(tmp_path / f"node_{rank}.shardviz", rank) for rank in (1, 0)]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_parts_together_are_the_dump_that_one_machine_writes(parts, tmp_path, capsys):
    whole = write_run_of(tmp_path / "whole.shardviz")
    write_run_of(whole / TRACE_FOLDER)
    spoil(whole / "run.json", put(["torchrun", "--node-rank", "0"], "command"))
    output = tmp_path / "all.shardviz"
    assert main(["gather", *map(str, parts), "-o", str(output)]) == 0
    assert "2 ranks of 2 parts" in capsys.readouterr().err
    assert files_in(output).keys() == files_in(whole).keys()
    together, on_one = dump_of(read_files(output)), dump_of(read_files(whole))
    assert (together.files.run, together.files.ranks) == (on_one.files.run, on_one.files.ranks)
    assert report_on(dump_of(read_parts(parts))) == report_on(on_one)


def test_parts_that_are_read_as_one_have_their_arrays(parts):
    files = read_parts(parts)
    assert [arrays_of(files, rank)["stamped/param/big"].tolist() for rank in (0, 1)] == [[[42, 43], [44, 45]]] * 2
    assert {rank: files.folder(rank) for rank in (0, 1)} == {0: parts[1], 1: parts[0]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("node_0",), "1 of 2 ranks is missing: rank 1 is not in node_0"),
        (("node_0", "node_1", "again"), "rank 1 is in both node_1 and again"),
        (("node_0", "node_0"), "rank 0 is in node_0, which is given twice"),
        (("node_0", "other"), "node_0 and other are of two different runs: 0123456789abcdef and ba9876543210fedc"),
        (("node_0", "nameless"), "node_0 and nameless are of two different runs: 0123456789abcdef and no id"),
        (("nameless", "nameless"), "nameless and nameless do not say of which run they are"),
        (("node_0", "cut"), "cut/rank_00001.json is damaged"),
        (("node_0", "linked"), "linked/rank_00001.safetensors is a link"),
        (("node_0", "without"), "without is not a dump: it has no run.json"),
        (("node_0", "traced"), "traced/trace is a link"),
        (("node_0", "changed"), "node_0 and changed differ in intended of run.json"),
        (("node_0", "absent"), "absent does not exist"),
        (("node_0", "\x1b[31mred"), r"\u001b[31mred are of two different runs"),
    ],
)
def test_what_cannot_be_put_together_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, given, message):
    monkeypatch.chdir(tmp_path)
    part(Path("node_0"), 0)
    for name in ("node_1", "again", "cut", "linked", "without", "traced", "changed"):
        part(Path(name), 1)
    for name in ("other", "\x1b[31mred"):
        part(Path(name), 1, "ba9876543210fedc")
    part(Path("nameless"), 1, "")
    os.truncate("cut/rank_00001.json", 99)
    Path("without/run.json").unlink()
    spoil(Path("changed/run.json"), put({}, "intended"))
    for link, target in (("linked/rank_00001.safetensors", "rank_00001.safetensors"), ("traced/trace", "trace")):
        Path(link).rename(f"elsewhere-{Path(link).name}")
        Path(link).symlink_to(Path(f"elsewhere-{target}").absolute())
    before = sorted(os.listdir())
    assert main(["gather", *given, "-o", "all"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("shardviz: error: ")
    assert message in error
    assert hint.startswith("Hint: ")
    assert sorted(os.listdir()) == before


def test_an_output_that_exists_is_replaced_only_when_asked(parts, capsys):
    arguments = ["gather", *map(str, parts), "-o", str(parts[0].with_name("all"))]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "all exists" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert main([*arguments[:-1], str(parts[0].parent)]) == 2
    assert "is not a dump" in capsys.readouterr().err
    assert main([*arguments[:-1], str(parts[0]), "--force"]) == 2
    assert "is one of the parts" in capsys.readouterr().err
    shutil.rmtree(parts[0] / TRACE_FOLDER)
    assert main([*arguments, "--force"]) == 0


def test_check_takes_parts_and_names_the_ranks_of_a_missing_one(parts, capsys):
    codes = [main(["check", *map(str, some), "--format", "json"]) for some in (parts, parts[:1])]
    whole, incomplete = map(json.loads, capsys.readouterr().out.replace("}\n{", "}\0{").split("\0"))
    assert codes == [1, 1]
    assert [one["ranks"] for one in incomplete["findings"] if one["kind"] == "incomplete"] == [[0]]
    assert not [one for one in whole["findings"] if one["kind"] == "incomplete"]
    assert main(["check", *map(str, parts * 2)]) == 2


def test_check_of_parts_notes_a_damaged_rank_and_reads_the_others(parts):
    os.truncate(parts[0] / "rank_00001.json", 99)
    files = read_parts(parts, strict=False)
    assert (sorted(files.ranks), sorted(files.damaged)) == ([0], [1])
    with pytest.raises(DumpError, match="damaged"):
        read_parts(parts)

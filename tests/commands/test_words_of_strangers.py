"""Whatever words stand in a dump, none of them reaches the terminal as an escape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shardviz.cli import main
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from tests.dump.samples import put, refusal, spoil, write_sample
from tests.dumps import make_dump

if TYPE_CHECKING:
    from pathlib import Path

BAD = "a\x1b[31m\x07\n"
WAYS = [
    ["check"],
    ["check", "--format", "github"],
    ["check", "--format", "junit"],
    ["check", "--format", "json"],
    ["show"],
    ["show", "*"],
    ["show", "--memory"],
    ["show", "--comms"],
    ["show", "--schedule"],
    ["show", "--format", "html"],
]


def strange_run(run: Any) -> None:
    run["command"], run["probe"] = [BAD], BAD
    run["intended"][BAD] = "[*]"
    run["sequence"] = {BAD: 0}
    run["stamps"].append({"name": BAD, "first": 100, "shape": [2]})


def strange_rank(rank: Any) -> None:
    rank["hostname"] = BAD
    rank["narrowed_to"] = [BAD]
    rank["tied"] = [[BAD, BAD + "b"]]
    rank["not_checked"] = rank["not_applied"] = [[BAD, BAD]]
    rank["gathered"] = [{"name": "embed", "collective": BAD, "error": BAD}, {"name": BAD, "collective": "x"}]
    rank["collectives"] = [{"op": BAD, "axes": ["tp"], "size": 2, "module": BAD}, {"op": "send", "axes": [], "size": 2}]
    rank["calls"] = [{"module": BAD, "op": BAD, "ranks": [0, 1]}, {"module": BAD, "op": "all_reduce", "ranks": [0]}]
    for body in rank["bodies"]:
        body["device"] = BAD
    rank["tensors"].append({"name": BAD, "body": len(rank["bodies"])})
    rank["tensors"].append({"name": BAD + "b", "body": len(rank["bodies"])})
    runs = [[100, 1, 1], [50, 0, 1]]
    wrong = {"role": "param", "phase": "stamped", "shape": [2], "local_shape": [2], "dtype": "float32", "runs": runs}
    rank["bodies"].append({**wrong, "device": BAD})


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    folder = write_sample(tmp_path / "s.shardviz")
    spoil(folder / "run.json", strange_run)
    for rank in range(2):
        spoil(folder / f"rank_0000{rank}.json", strange_rank)
    return folder


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_what_a_dump_says_is_shown_as_text(strange: Path, way: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    verb, *options = way
    assert main([verb, str(strange), *options]) in (0, 1)
    out, err = capsys.readouterr()
    assert out
    assert all(char.isprintable() or char == "\n" for char in out + err)


def test_so_is_what_changed_between_two(strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_dump(tmp_path / "o.shardviz", parse_mesh("tp=2"), {"embed": "[4/tp, 2]"})
    assert main(["diff", str(other), str(strange)]) == 1
    assert all(char.isprintable() or char == "\n" for char in "".join(capsys.readouterr()))


@pytest.mark.parametrize("field", ["torch", "shardviz"])
def test_a_version_is_a_line_of_text(tmp_path: Path, field: str) -> None:
    folder = write_sample(tmp_path / "s.shardviz")
    for bad in (BAD, "2.13\n", "2" * 101):
        spoil(folder / "run.json", put(bad, field))
        assert f"{field} is " in refusal(folder).message
    spoil(folder / "run.json", put("2.14.0a0+git1234 (é)", field))
    read_files(folder)


@pytest.mark.parametrize("bad", [BAD, "", "tp\n", "tp " * 2000])
def test_the_axes_of_a_collective_are_names(tmp_path: Path, bad: str) -> None:
    folder = write_sample(tmp_path / "s.shardviz")
    collective = {"op": "all_reduce", "axes": ["tp", bad], "size": 2}
    spoil(folder / "rank_00001.json", put([collective], "collectives"))
    message = refusal(folder).message
    assert "collectives[0]: axes name " in message
    assert message.isprintable()
    spoil(folder / "rank_00001.json", put(["tp", "a_2"], "collectives", 0, "axes"))
    assert main(["show", str(folder), "--comms"]) == 0

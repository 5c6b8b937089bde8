"""`shardviz schema`: what is written fits the schema that is published, and what does not is refused by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest

from shardviz.cli import main
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import PlanPart, PlanRecord, RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, MeshRecord, TensorRecord
from shardviz.dump.write import write_plan, write_run
from tests.dump.samples import write_sample

if TYPE_CHECKING:
    from pathlib import Path

MESH = MeshRecord(("dp",), (2,), (0, 1))
BODY = Body(role="param", moment="initial", shape=(4,), local_shape=(4,), dtype="float32")
RECORD = RankRecord(SCHEMA, 0, 2, "", (MESH,), bodies=(BODY,), tensors=(TensorRecord("w", 0),))


def schema_of(what: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the schema that the command prints."""
    assert main(["schema", what]) == 0
    return json.loads(capsys.readouterr().out)


def write_small_plan(folder: Path) -> Path:
    """Write a plan of one tensor on two ranks."""
    folder.mkdir()
    write_run(folder, RunRecord(SCHEMA, "0.1.0", "2.13.0", 2, mesh=MESH))
    write_plan(folder, PlanRecord(SCHEMA, (PlanPart(RECORD),)))
    return folder


def test_a_dump_fits_its_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_sample(tmp_path / "a.shardviz")
    for what, name in (("run", "run.json"), ("rank", "rank_00000.json"), ("rank", "rank_00001.json")):
        jsonschema.validate(json.loads((folder / name).read_bytes()), schema_of(what, capsys))


def test_a_plan_fits_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((write_small_plan(tmp_path / "p.shardviz") / "plan.json").read_bytes())
    jsonschema.validate(content, schema_of("plan", capsys))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "parts": []}, schema_of("plan", capsys))


def test_the_answer_of_a_check_fits_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_sample(tmp_path / "a.shardviz")
    (folder / "rank_00001.json").unlink()  # a finding
    assert main(["check", str(folder), "--format", "json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["findings"]
    jsonschema.validate(content, schema_of("check", capsys))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "findings": [{"kind": "odd"}]}, schema_of("check", capsys))


def test_the_answer_of_a_diff_fits_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_sample(tmp_path / "a.shardviz")
    (write_sample(tmp_path / "b.shardviz") / "rank_00001.json").unlink()
    assert main(["diff", str(folder), str(tmp_path / "b.shardviz"), "--format", "json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["gained"]
    assert content["gained"][0]["causes"][0].keys() == {"cause", "fix"}
    jsonschema.validate(content, schema_of("diff", capsys))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "changes": [{"tensor": "w"}]}, schema_of("diff", capsys))


def test_without_a_name_the_things_that_have_a_schema_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["run", "rank", "plan", "check", "diff"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at": {"tp": [0]}}, "at names axis tp, expected one of dp"),
        ({"at": {"dp": [2]}}, "positions are 0 to 1, each once"),
        ({"at": {"dp": [0]}}, "its parts stand for 1 ranks, 1 of them different, of 2"),
        ({"record": {**msgspec.to_builtins(RECORD), "num_ranks": 3}}, "parts[0]: num_ranks is 3, expected the 2"),
        ({"odd": 1}, "Object contains unknown field `odd`"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    change: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_small_plan(tmp_path / "p.shardviz")
    content = json.loads((folder / "plan.json").read_bytes())
    content["parts"][0] |= change
    (folder / "plan.json").write_text(json.dumps(content))
    assert main(["show", str(folder)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "plan.json is damaged" in error

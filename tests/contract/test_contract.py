"""The contract notices a changed verdict, and says which of its files is damaged."""

from __future__ import annotations

import json

import pytest

from tests.contract import __main__ as contract
from tests.contract import store
from tests.contract.judge import judge_cases
from tests.contract.store import DamagedError, Room
from tests.dumps import Made, make_dump


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record two cases, one right and one wrong, in a contract of their own."""
    from shardviz.layout.mesh import parse_mesh

    monkeypatch.setattr(store, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(store, "VERDICTS", tmp_path / "verdicts")
    mesh = parse_mesh("fsdp=2,tp=2")
    room = Room("dumps")
    for name, held in (("right", "[8/fsdp/tp, 4]"), ("wrong", "[8/tp/fsdp, 4]")):
        folder = make_dump(tmp_path / name, mesh, {"w": Made("[8/fsdp/tp, 4]", held)})
        room.add(name, ("check", "{0}"), (store.files_of(folder),))
    room.save()
    store.write_verdicts("dumps", judge_cases(room, list(room.cases.values()), processes=0))
    return tmp_path


def test_verdicts_have_kinds_and_places_and_no_sentence(recorded):
    verdicts = store.read_verdicts("dumps")
    assert verdicts["right"] == [{"exit": 0}]
    code, finding = verdicts["wrong"]
    assert code == {"exit": 1}
    assert finding["kind"] == "misordered"
    assert finding["tensor"] == "w"
    assert finding["ranks"] == [1, 2]
    assert finding["held"] == "[8/tp/fsdp, 4]"
    assert not {"summary", "cause", "fix"} & finding.keys()


def test_nothing_differs_from_what_was_just_written(recorded, capsys):
    assert contract.main(["compare", "--room", "dumps"]) == 0
    assert "2 cases" in capsys.readouterr().out


def test_a_changed_verdict_is_printed_before_and_after(recorded, capsys):
    verdicts = store.read_verdicts("dumps")
    verdicts["wrong"][1]["ranks"] = [0, 3]
    store.write_verdicts("dumps", verdicts)
    assert contract.main(["compare", "--room", "dumps"]) == 1
    out = capsys.readouterr().out
    assert "wrong\n" in out
    assert '- cause_id "another-order", claimed "[8/fsdp/tp, 4]"' in out
    assert "ranks [0, 3]" in out
    assert "ranks [1, 2]" in out


def test_a_case_that_came_or_went_is_a_difference(recorded, capsys):
    verdicts = store.read_verdicts("dumps")
    del verdicts["right"]
    store.write_verdicts("dumps", verdicts)
    assert contract.main(["compare", "--room", "dumps"]) == 1
    assert "right\n" in capsys.readouterr().out


@pytest.mark.parametrize("keep", [0, 100, -20])
def test_a_damaged_archive_is_named(recorded, capsys, keep):
    path = recorded / "recorded" / "dumps.tar.xz"
    path.write_bytes(path.read_bytes()[:keep])
    assert contract.main(["compare", "--room", "dumps"]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"right": [', "[]"])
def test_a_damaged_file_of_verdicts_is_named(recorded, capsys, text):
    path = recorded / "verdicts" / "dumps.json"
    path.write_text(text)
    assert contract.main(["compare", "--room", "dumps"]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_case_without_its_file_is_damage(recorded):
    room = store.load("dumps")
    room.blobs.popitem()
    room.save()
    with pytest.raises(DamagedError, match=r"dumps\.tar\.xz: 1 files"):
        store.load("dumps")


def test_files_and_verdicts_are_stable(recorded):
    before = [(recorded / "recorded" / "dumps.tar.xz").read_bytes(), (recorded / "verdicts" / "dumps.json").read_text()]
    room = store.load("dumps")
    room.save()
    store.write_verdicts("dumps", json.loads(before[1]))
    after = [(recorded / "recorded" / "dumps.tar.xz").read_bytes(), (recorded / "verdicts" / "dumps.json").read_text()]
    assert before == after

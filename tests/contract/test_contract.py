"""The contract notices a changed verdict, and says which of its files is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.contract import __main__ as contract
from tests.contract import besides_verdicts, mutants, places, recording, store, texts
from tests.contract.judge import judge_room, text_of
from tests.contract.store import DamagedError, Room
from tests.contract.varied import variant
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
    store.write_verdicts("dumps", judge_room(room, processes=0))
    return tmp_path


@pytest.mark.parametrize(("test", "is_proven"), [("test_contract.py::test_contract", False), (None, True)])
def test_a_cause_of_failed_assertions_is_unproven_once_its_test_is_gone(tmp_path, monkeypatch, test, is_proven):
    cause, kept = next(iter(contract.asserted().items()))
    monkeypatch.setattr(contract, "ASSERTED", tmp_path / "asserted.txt")
    contract.ASSERTED.write_text(f"{cause}: {kept if test is None else f'contract/{test}'}\n")
    assert (cause in contract.asserted()) is is_proven


def test_verdicts_have_kinds_and_places_and_no_sentence(recorded):
    verdicts = store.read_verdicts("dumps")
    assert verdicts["right"] == [{"exit": 0}]
    code, finding = verdicts["wrong"]
    assert code == {"exit": 1}
    assert finding["kind"] == "misordered"
    assert finding["tensor"] == "w"
    assert finding["ranks"] == [1, 2]
    assert finding["cause_id"] == "another-order"
    assert finding["held"] == "[8/tp/fsdp, 4]"
    assert not {"summary", "cause", "causes", "fix"} & finding.keys()


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


def test_a_text_that_is_printed_otherwise_is_a_difference(recorded, monkeypatch, capsys):
    monkeypatch.setattr(texts, "FOLDER", recorded)
    texts.write(recorded / "dumps.txt", {"right": "what was read"})
    assert contract.main(["compare", "--room", "dumps"]) == 1
    out = capsys.readouterr().out
    assert "-what was read\n" in out
    assert "+✓ all 1 tensors are in order" in out or "+  tensor" in out
    room = store.load("dumps")
    store.lay_out(room, recorded / "files")
    case = room.cases["right"]
    texts.write(
        recorded / "dumps.txt", {"right": text_of(case, store.place(case, recorded / "files", recorded / "own"))}
    )
    assert contract.main(["compare", "--room", "dumps"]) == 0


def test_a_place_that_is_called_held_and_is_not_is_a_difference(recorded, monkeypatch, capsys):
    assert contract.main(["compare", "--room", "dumps"]) == 0
    monkeypatch.setattr(places, "misplaced", lambda dump, tensor, name: ["is elsewhere"])
    assert contract.main(["compare", "--room", "dumps"]) == 1
    assert "right: stamped param w: is elsewhere" in capsys.readouterr().out


def test_survivors_are_mistakes_that_can_still_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(besides_verdicts, "SURVIVORS", tmp_path / "survivors.txt")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "rule.py").write_text("def f(axis):\n    return axis < 0.5\n")
    rows = ["what it is", "rule.py comparison turned: axis < 0.5 | a", "rule.py comparison turned: axis < 2 | a"]
    (tmp_path / "survivors.txt").write_text("\n".join(rows))
    assert [*besides_verdicts.gone()] == ["gone from survivors.txt: rule.py comparison turned: axis < 2"]


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


def test_what_is_compared_live_is_not_written_over(recorded, monkeypatch, capsys):
    def record(room, into):
        folder = Path(into)
        changed = store.read_verdicts(room)
        changed["wrong"][1]["ranks"] = [0, 3]
        store.load(room).save(folder)
        store.write_verdicts(room, changed, folder)
        return 0

    before = (recorded / "verdicts" / "dumps.json").read_text()
    monkeypatch.setattr(contract, "_record", record)
    assert contract.main(["compare", "--live", "--room", "dumps"]) == 1
    assert "ranks [0, 3]" in capsys.readouterr().out
    assert (recorded / "verdicts" / "dumps.json").read_text() == before


@pytest.mark.parametrize("option", [{"collectonly": True}, {"keyword": "tied"}])
def test_a_part_of_its_tests_replaces_no_room(option):
    config = SimpleNamespace(getoption=({"--contract": "dumps", "collectonly": False, "keyword": ""} | option).get)
    with pytest.raises(pytest.UsageError, match="replaces a whole room"):
        recording.pytest_configure(config)


def test_a_variant_is_the_same_every_time_and_differs_from_its_case(recorded):
    room = store.load("dumps")
    case = room.cases["right"]
    made = [variant(case, room.blobs, f"1.{number}") for number in range(40)]
    assert made == [variant(case, room.blobs, f"1.{number}") for number in range(40)]
    files = [{name: room.blobs[digest] for name, digest in case.inputs[0].items()}]
    done = [found for found in made if found is not None]
    assert len(done) > 10
    assert sum(inputs != [files[0]] for _, inputs in done) > len(done) // 2  # some words are changed into themselves


def test_mutants_make_one_mistake_each(tmp_path, monkeypatch):
    rows = "SMALL = 2.0**-7", "def f(axis, dim):", " if axis < 0.5:", "  return g(axis, dim)", " return max(axis, dim)"
    text = "\n".join(rows)
    (tmp_path / "rule.py").write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    made = {(one.line, one.source) for one in mutants.mutants_of("rule.py", {1, 2, 3, 4, 5})}
    assert made == {
        (1, text.replace("2.0**-7", "(2.0**-7) * 100")),
        (3, text.replace("axis < 0.5", "(axis >= 0.5)")),
        (3, text.replace("axis < 0.5", "False")),
        (3, text.replace("0.5", "(0.5) * 100")),
        (4, text.replace("g(axis, dim)", "g(dim, axis)")),
    }

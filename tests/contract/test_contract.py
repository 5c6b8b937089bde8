"""The contract notices a changed verdict, and says which of its files is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.contract import __main__ as contract
from tests.contract import mutants, recording, store, vary
from tests.contract.judge import judge_room
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


@pytest.mark.parametrize("room", [vary.VARIED, vary.HUNTED])
def test_the_room_of_variants_is_made_again_as_it_is_recorded(room):
    if not vary.rooms:
        vary.load_rooms()
    recorded = store.load(room)
    files = {
        (case.command, tuple(tuple(sorted(one.items())) for one in case.inputs)) for case in recorded.cases.values()
    }
    for name, case_name, seed in [*vary.listed(room)][::40]:
        case = vary.rooms[name].cases[case_name]
        made = variant(case, vary.rooms[name].blobs, seed)
        assert made is not None
        blobs = [tuple(sorted((path, recorded.blob(content)) for path, content in one.items())) for one in made[1]]
        assert (case.command, tuple(blobs)) in files


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


def test_survivors_are_mistakes_that_can_still_be_made():
    rows = [line.split(" | ")[0] for line in (store.HERE / "survivors.txt").read_text().splitlines() if " | " in line]
    made = dict[str, set[str]]()
    for file, _, what in (row.partition(" ") for row in rows):
        if file not in made:
            lines = set(range(len((mutants.ROOT / file).read_text().splitlines()) + 1))
            made[file] = {one.what for one in mutants.mutants_of(file, lines)}
        assert what in made[file], f"gone from survivors.txt: {file} {what}"
    assert made

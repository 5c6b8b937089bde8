"""A report and its findings as objects: clean or not, in words, and with the arrays that were compared."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shardviz
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.machine import report_json
from shardviz.relate.relations import Located, Pending
from tests.check.records import add_values
from tests.check.steps import WANTED, Step
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from pathlib import Path

MESH = parse_mesh("fsdp=2,tp=2")
SWAPPED = Made("[8/fsdp/tp, 3]", "[8/tp/fsdp, 3]")


def test_a_report_is_clean_if_something_was_checked_and_nothing_is_wrong(tmp_path: Path) -> None:
    right = shardviz.load(make_dump(tmp_path / "right.shardviz", MESH, {"w": "[8/tp/fsdp, 3]"})).check()
    assert (right.clean, right.findings) == (True, ())
    empty = shardviz.load(make_dump(tmp_path / "empty.shardviz", MESH, {})).check()
    assert (empty.clean, empty.why_not) == (False, "nothing was checked: the dump has no tensors")
    for report in (right, empty):
        with pytest.raises(TypeError, match=r"if report\.clean"):
            bool(report)


def test_a_finding_says_what_the_command_says(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"a.w": SWAPPED, "b.w": SWAPPED})
    report = shardviz.load(folder).check()
    assert not report.clean
    (finding,) = report.findings
    judged = shardviz.check_dump(folder)
    assert json.loads(json.dumps(report.to_json())) == json.loads(report_json(judged))
    told = finding.to_json()
    shown = {
        name: getattr(finding, name) for name in ("kind", "severity", "cause_id", "tensor", "cause", "fix", "held")
    }
    assert shown == {name: told[name] for name in shown}
    assert (finding.what, finding.ranks, finding.tensors) == (told["summary"], (1, 2), ("a.w", "b.w"))
    assert [single.tensor for single in finding.each] == ["a.w", "b.w"]
    assert [found.tensor for found in shardviz.load(folder)["b.w"].findings] == ["b.w"]


def test_misplaced_ids_are_a_pair_and_the_held_layout_its_relation(tmp_path: Path) -> None:
    run = shardviz.load(make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED}))
    (finding,) = run.check().findings
    assert finding.pair is not None
    assert finding.pair.ranks == (0, 1, 2, 3)
    assert finding.pair.expected[1].tolist() == [[7, 8, 9], [10, 11, 12]]
    assert finding.pair.actual[1].tolist() == [[13, 14, 15], [16, 17, 18]]
    assert finding.relation is not None
    (link,) = finding.relation.chain or ()
    assert isinstance(link, Located)
    assert repr(link) == "Located([8/tp/fsdp, 3])"


def test_of_many_layers_each_has_a_pair(tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.w": SWAPPED for layer in range(3)}
    (finding,) = shardviz.load(make_dump(tmp_path / "d.shardviz", MESH, tensors)).check().findings
    pairs = [single.pair for single in finding.each]
    assert [pair.actual[1][0, 0] for pair in pairs if pair is not None] == [13, 13, 13]


def test_a_gradient_that_is_not_reduced_has_its_parts_and_the_reduction(tmp_path: Path) -> None:
    shares = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    Step(tmp_path).add("w", "grad", {rank: share * WANTED for rank, share in shares.items()}).dump()
    (finding,) = shardviz.load(tmp_path / "step").check().findings
    assert finding.kind == "unreduced-gradient"
    assert finding.pair is not None
    assert np.allclose(sum(finding.pair.actual.values()), finding.pair.expected[0])
    assert finding.relation is not None
    assert finding.relation.chain == (Pending("dp"), Pending("tp"))


def test_a_result_that_is_a_factor_off_has_it_as_its_relation(tmp_path: Path) -> None:
    Step(tmp_path).add("output", "output", dict.fromkeys(range(4), 2 * WANTED)).dump()
    (finding,) = shardviz.load(tmp_path / "step").check().findings
    assert finding.pair is not None
    assert np.array_equal(finding.pair.actual[3], 2 * finding.pair.expected[3])
    assert finding.relation is not None
    assert [repr(link) for link in finding.relation.chain or ()][-1] == "Scaled(factor=2.0)"


def test_copies_that_differ_are_held_against_what_most_have(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"w": "[4]"})
    values = {rank: np.arange(4.0) + (rank == 2) for rank in MESH.ranks}
    add_values(folder, "w", "[4]", values)
    finding = next(one for one in shardviz.load(folder).check().findings if one.kind == "unreplicated")
    assert finding.pair is not None
    assert finding.pair.expected[2].tolist() == [0, 1, 2, 3]
    assert finding.pair.actual[2].tolist() == [1, 2, 3, 4]
    assert finding.relation is None
    with pytest.raises(ValueError, match="read-only"):
        finding.pair.actual[2][0] = 0


def test_findings_are_compared_without_their_pairs(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED})
    (finding,) = shardviz.check_dump(folder).findings
    assert finding.pairs
    assert finding == replace(finding, pairs=())
    assert hash(finding) == hash(replace(finding, pairs=()))


def test_what_is_not_about_numbers_has_no_pair(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED})
    (folder / "rank_00001.json").unlink()
    incomplete = next(one for one in shardviz.load(folder).check().findings if one.kind == "incomplete")
    assert (incomplete.pair, incomplete.relation, incomplete.tensor) == (None, None, "")


def test_a_line_for_a_prompt_and_a_list(tmp_path: Path) -> None:
    run = shardviz.load(make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED, "b": "[8/tp]"}))
    assert repr(run) == "<Run d.shardviz: 2 tensors on 4 ranks, mesh (fsdp=2, tp=2)>"
    assert repr(run["w"]) == "<Tensor w: float32[8/fsdp/tp, 3] on mesh (fsdp=2, tp=2)>"
    assert repr(run.check()) == "<Report of d.shardviz: 1 finding (misordered)>"
    assert repr(run.check().findings[0]).startswith("<Finding misordered w ranks 1-2: 2 of 4 ranks do not hold")
    assert repr(run.check().findings[0].pair) == "<Pair of expected and actual arrays on ranks 0-3>"
    assert repr(run.tensors) == "<2 tensors: w, b>"

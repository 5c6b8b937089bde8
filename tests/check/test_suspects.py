"""A wrong step that no rule explains names the weights that nobody could check, or that are missing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardviz.check.order.case import LaidOut
from shardviz.check.order.rules.without_ids import with_suspects
from shardviz.check.report import NotChecked
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.explain.finding import Finding
from tests.check.checking import check_made
from tests.check.records import add_values, change_rank, read_rank
from tests.dumps import Made
from tests.findings import finding_of

if TYPE_CHECKING:
    from pathlib import Path

OUTPUT = finding_of("wrong-value", "error", "output", (0,), "off", cause="It is wrong", fix="look at up", generic=True)


def laid_out(tmp_path: Path, number: int) -> LaidOut:
    """Make a buffer that both ranks computed again (-1), or that the last one has as zeros (0)."""
    folder = tmp_path / "made.shardviz"
    ranks = (0, 1) if number else (1,)
    check_made(tmp_path, "dp=2", {"freq": Made(None, ids=dict.fromkeys(ranks, np.full((4,), number)), shape=(4,))})
    for rank in range(2):
        bodies = tuple(
            msgspec.structs.replace(body, role="buffer" if number else "param")
            for body in read_rank(folder, rank).bodies
        )
        change_rank(folder, rank, bodies=bodies)
    if number:
        add_values(folder, "freq", None, {0: np.arange(4.0), 1: np.arange(4.0)}, role="buffer")
    return LaidOut(dump_of(read_files(folder)))


def blamed(tmp_path: Path, number: int, finding: Finding = OUTPUT) -> Finding:
    (found,) = with_suspects([finding], laid_out(tmp_path, number), [])
    assert isinstance(found, Finding)
    return found


def test_a_buffer_computed_again_is_what_to_look_at_first(tmp_path: Path) -> None:
    found = blamed(tmp_path, -1)
    assert "freq is computed again on every rank" in found.cause
    assert found.fix.startswith("compare first freq's numbers")
    assert found.fix.endswith("look at up")


def test_a_weight_of_zeros_on_some_ranks_is_what_to_look_at_first(tmp_path: Path) -> None:
    assert "freq is zero on some ranks only" in blamed(tmp_path, 0).cause


def test_what_a_rule_explains_is_left_as_it_is(tmp_path: Path) -> None:
    explained = replace(OUTPUT, generic=False)
    assert blamed(tmp_path, -1, explained) == explained


def test_the_step_of_a_model_that_lacks_a_weight_shows_nothing(tmp_path: Path) -> None:
    absent = finding_of("incomplete", "warning", "layers.4", (), "no rank has it")
    (result,) = with_suspects([OUTPUT], laid_out(tmp_path, -1), [absent])
    assert isinstance(result, NotChecked)
    assert "without layers.4" in result.why


def test_a_weight_that_one_rank_lacks_is_no_reason_for_a_wrong_step(tmp_path: Path) -> None:
    absent = finding_of("incomplete", "warning", "layers.4", (1,), "no shard of it")
    (result,) = with_suspects([replace(OUTPUT, generic=False)], laid_out(tmp_path, -1), [absent])
    assert isinstance(result, Finding)

"""The step: what is listed, who takes part, before and after, the pipeline's schedule."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.tui.app import ShardvizApp
from shardviz.tui.model.step import moments, step_of
from tests.lanes import nightly
from tests.tui.driving import rest, walk, walk_on

if TYPE_CHECKING:
    from pathlib import Path


def test_identical_layers_are_one_line_in_the_order_in_which_they_began(stepped: Path) -> None:
    step = step_of(dump_of(read_files(stepped)))
    found = [(one.record.op, str(one.modules), one.count, one.bytes, one.received) for one in step.collectives]
    assert found == [
        ("all_gather", "layers.[0-3]", 4, 9984, 4992),
        ("all_reduce", "layers.[0-3].down", 12, 23040, 23040),
        ("reduce_scatter", "[red]x[/]", 1, 10**7, 5 * 10**6),
        ("all_to_all", "swap", 1, 16, 12),
    ]


def test_an_axis_that_nothing_ran_along_receives_nothing(stepped: Path) -> None:
    step = step_of(dump_of(read_files(stepped)))
    assert dict(step.received) == {("hsdp",): 0, ("fsdp",): 5004992, ("tp",): 23040, ("fsdp", "tp"): 12}


def test_before_and_after_are_kept_by_group(stepped: Path) -> None:
    dump = dump_of(read_files(stepped))
    found = moments(dump, step_of(dump).collectives[-1])
    assert [rank for rank, _, _ in found] == list(range(8))
    assert found[1] == (1, (10, 11, 12, 13), (1, 11, 21, 31))
    assert moments(dump, step_of(dump).collectives[0]) == []


def test_collectives_along_one_axis_and_those_of_most_bytes_first_are_a_key_away(stepped: Path) -> None:
    walks = walk_on(stepped, {"fsdp": ("5", "a"), "tp": "a", "both": "a", "all": "a", "sorted": "o"})
    assert "Collectives along fsdp ─" in walks["fsdp"].text
    assert "all_reduce" not in walks["fsdp"].text
    assert "layers.[0-3].down" in walks["tp"].text
    assert "Collectives along fsdp, tp" in walks["both"].text
    assert "Collectives of the step" in walks["all"].text
    shown = walks["sorted"].text
    assert shown.index("reduce_scatter") < shown.index("all_reduce") < shown.index("all_gather")
    assert "most bytes received first" in shown


def test_the_ranks_that_take_part_are_lit_and_walked_through(stepped: Path) -> None:
    shown = walk(stepped, "5", "end", "tab", "down", "down", "down", "down", look=lambda app: app.selection.rank)
    assert shown.result == 4
    assert "8 ranks, groups of 4 along fsdp, tp: 4-7" in shown.text
    assert re.search(r"rank 5 +50 51 52 53  →  41 51 61 71", shown.text)


def test_a_pass_says_what_it_is_and_when(pipelined: Path) -> None:
    walks = walk_on(pipelined, {"first": ("5", "tab"), "last": ("end",), "next": ("down",)})
    assert "rank 0  stage 0, micro-batch 0 forward, from 0 to 1" in walks["first"].text
    assert "rank 0  stage 0, micro-batch 3 backward, from 19 to 21" in walks["last"].text
    assert "rank 1  stage 1, micro-batch 3 backward, from 17 to 19" in walks["next"].text
    assert "idle 42.9%, by the formula 42.9%" in walks["first"].text


@nightly
def test_help_and_the_palette_know_the_step(stepped: Path) -> None:
    walks = walk_on(stepped, {"help": ("5", "f1"), "palette": ("escape", "ctrl+p", "type next axis")})
    assert "The collectives of one training step" in walks["help"].text
    assert "Show only collectives along the next mesh axis" in walks["palette"].text


def test_the_mouse_chooses_a_collective_a_pass_and_a_view(pipelined: Path, stepped: Path) -> None:
    async def run(files: Path, target: str, offset: tuple[int, int]) -> str:
        app = ShardvizApp(files)
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            await pilot.click("#tabs", offset=(42, 0))
            await rest(pilot)
            await pilot.click(target, offset=offset)
            await rest(pilot)
            return " ".join(str(app.query_one(card).render()) for card in ("#comm-card", "#pass"))

    assert "each rank gets its part of the sum over all" in asyncio.run(run(stepped, "#collectives", (5, 2)))
    assert "rank 2  stage 2, micro-batch 1 forward" in asyncio.run(run(pipelined, "#schedule", (7 + 3 * 3, 2)))


@nightly
def test_each_axis_has_a_bar_of_what_is_received_along_it(stepped: Path) -> None:
    text = walk(stepped, "5", size=(120, 40)).text
    bars = {name: re.search(rf"[:·] {name} (?:(█*)▏? )?([\d.]+ [KMi]*B)", text) for name in ("hsdp", "fsdp", "tp")}
    assert {name: found and (found[2], bool(found[1])) for name, found in bars.items()} == {
        "hsdp": ("0 B", False),
        "fsdp": ("4.77 MiB", True),
        "tp": ("22.5 KiB", False),
    }


@nightly
def test_the_letters_of_a_schedule_are_explained_on_the_screen(pipelined: Path) -> None:
    assert "a0 forward of micro-batch 0" in walk(pipelined, "5", size=(80, 24)).text

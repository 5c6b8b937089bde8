"""The step by module: the first wrong one is open from the start, calls open and close, collectives are a key away."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.tensors import Body, TensorRecord
from shardviz.dump.records.trace import PointRecord
from shardviz.tui.app import ShardvizApp
from shardviz.tui.model.document import Document
from tests.lanes import nightly
from tests.tui.conftest import MESH, kept
from tests.tui.driving import press, rest, settle, walk, walk_on
from tests.tui.steps import add_to_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.records.files import RankRecord

ENDED = ("layers.0.up", "layers.0", "layers.1.up", "layers.1", "")


def followed(rank: RankRecord, wrong: str) -> RankRecord:
    """Give a rank a step that goes wrong in a module and after it, and whose output is off."""
    odd = ENDED[ENDED.index(wrong) :] if wrong else ()
    trace = tuple(PointRecord(name, "output", at, "odd" if name in odd else "right") for at, name in enumerate(ENDED))
    bodies = [Body("output", "step", (2,), (2,), "float64", values=[1.0, 2.0 + bool(wrong)])]
    if rank.rank == 0:
        bodies.append(Body("output", "reference", (2,), (2,), "float64", values=[1.0, 2.0]))
    tensors = [TensorRecord("output", len(rank.bodies) + at) for at in range(len(bodies))]
    return structs.replace(rank, trace=trace, bodies=(*rank.bodies, *bodies), tensors=(*rank.tensors, *tensors))


def test_a_wrong_step_opens_by_module_on_the_first_wrong_one(folder: Path) -> None:
    wrong = kept(folder, "wrong-step.shardviz", MESH, {"up.weight": "[24/tp/fsdp, 12]"})
    add_to_ranks(wrong, lambda rank: followed(rank, "layers.1.up"))
    walks = walk_on(wrong, {"opened": "5", "closed": ("up", "enter"), "other": ("home", "down", "enter")})
    assert "layers.1.up    first wrong module" in walks["opened"].text
    assert "╭─ layers.1.up ─" in walks["opened"].text
    assert "layers.0.up" not in walks["opened"].text
    assert "first wrong module" not in walks["closed"].text
    assert "layers.0.up" in walks["other"].text


def test_a_right_step_opens_on_its_collectives_and_shows_its_modules_when_asked(folder: Path) -> None:
    right = kept(folder, "right-step.shardviz", MESH, {"up.weight": "[24/tp/fsdp, 12]"})
    add_to_ranks(right, lambda rank: followed(rank, ""))
    walks = walk_on(right, {"opened": "5", "modules": "m", "back": "m"})
    assert "of modules, as they ran" not in walks["opened"].text
    assert "5 calls of modules, as they ran" in walks["modules"].text
    assert "of modules, as they ran" not in walks["back"].text


def test_no_module_is_judged_before_all_ranks_are_read(folder: Path) -> None:
    wrong = kept(folder, "unread-step.shardviz", MESH, {"up.weight": "[24/tp/fsdp, 12]"})
    add_to_ranks(wrong, lambda rank: followed(rank, "layers.1.up"))
    files = read_files(wrong)
    first = Document(wrong, dump_of(replace(files, ranks={0: files.ranks[0]})), is_partial=True)

    async def run() -> str:
        app = ShardvizApp(wrong)
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            app.document = first
            await press(pilot, "5", "m")
            return await settle(pilot)

    text = asyncio.run(run())
    assert "… reading" in text
    assert "layers.1.up" not in text


@nightly
def test_without_a_trace_there_is_no_such_key(stepped: Path) -> None:
    assert "m Modules" not in walk(stepped, "5").text

"""The viewer of a checkpoint: which file has the element under the cursor, what is wrong, names that are not markup."""

from __future__ import annotations

import asyncio
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.open import open_checkpoint
from shardviz.checkpoint.records import ByteRange, Checkpoint, Chunk, StoredTensor
from shardviz.errors import ShardvizError
from shardviz.tui import viewer
from shardviz.tui.app import CheckpointApp
from shardviz.tui.export import screen_text
from shardviz.tui.model.selection import Selection, of_entry
from shardviz.tui.model.stored import StoredDocument
from tests.lanes import nightly
from tests.picture.test_html import HOSTILE
from tests.picture.test_stored import GRID, ROWS, made
from tests.tui.driving import Shown, assert_golden, press, rest, settle, settled, text_of, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.picture.test_stored import Parts


def walk_on(
    checkpoint: Checkpoint, walks: Mapping[str, Sequence[str]], size: tuple[int, int] = (120, 40)
) -> dict[str, Shown]:
    """Open a checkpoint, make several walks, and return what is shown at the end of each."""

    async def run() -> dict[str, Shown]:
        app, shown = CheckpointApp(checkpoint), {}
        async with app.run_test(size=size) as pilot:
            await rest(pilot)
            for name, keys in walks.items():
                await press(pilot, *keys)
                screen = await settled(pilot)
                shown[name] = Shown(text_of(screen), screen, "", app.return_code, app.focused)
        return shown

    return asyncio.run(run())


def walk(checkpoint: Checkpoint, *keys: str, size: tuple[int, int] = (120, 40)) -> Shown:
    """Open a checkpoint, press keys, and return what is shown then."""
    return walk_on(checkpoint, {"": keys}, size)[""]


def several(folder: Path, tensors: dict[str, tuple[tuple[int, ...], Parts]]) -> Checkpoint:
    found: dict[str, Any] = {}
    for name, (shape, parts) in tensors.items():
        found |= made(folder, shape, parts, name).tensors
    return Checkpoint(folder / "step-1000", "DCP", found)


def whole(folder: Path) -> Checkpoint:
    checkpoint = several(
        folder,
        {
            "layers.0.wq.weight": ((8, 8), ROWS),
            "layers.0.wo.weight": ((8, 8), GRID),
            "layers.1.wq.weight": ((8, 8), ROWS[:2]),
            "norm.weight": ((8,), [((0,), (8,), "a-2")]),
        },
    )
    (folder / "step-1000").mkdir(exist_ok=True)
    for name in checkpoint.file_sizes:
        (folder / "step-1000" / name).write_bytes(bytes(1024 * (1 + len(name))))
    tensors = {
        name: StoredTensor(name, one.shape, one.dtype, one.chunks, checkpoint.path)
        for name, one in checkpoint.tensors.items()
    }
    return Checkpoint(checkpoint.path, "DCP", tensors)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_a_checkpoint_opens_on_its_first_finding(tmp_path: Path, size: tuple[int, int]) -> None:
    assert_golden(walk(whole(tmp_path), size=size), f"checkpoint_{size[0]}x{size[1]}")


def test_the_line_below_the_map_names_file_and_bytes_or_that_no_file_has_it(tmp_path: Path) -> None:
    walks = {
        "held": ("slash", "type 0.wq", "enter", "enter", "end"),
        "lost": ("escape", "escape", "n", "enter", "end"),
    }
    shown = walk_on(whole(tmp_path), walks)
    assert re.search(r"\[7, 7\]  file 0 a-2 .*\n.*bytes 128 to 160: part", shown["held"].text)
    assert "part [6:8, 0:8]" in shown["held"].text
    assert "[7, 7]  in no file" in shown["lost"].text
    assert "1 finding" in shown["lost"].text
    assert "missing" in shown["lost"].text


def test_other_dims_are_drawn_and_keys_quit(tmp_path: Path) -> None:
    experts = made(tmp_path, (4, 6, 8), [((at, 0, 0), (1, 6, 8), f"r{at}") for at in range(4)])
    shown = walk_on(experts, {"opened": (), "turned": "xxx", "end": ("enter", "end"), "left": "q"})
    assert shown["turned"].text == shown["opened"].text
    assert "file 3 r3" in shown["end"].text
    assert shown["left"].exited == 0


def test_search_and_wrong_only_list_what_was_asked_for(tmp_path: Path) -> None:
    found = ("slash", "type layers.1", "enter")
    shown = walk_on(whole(tmp_path), {"found": found, "all": ("escape",), "wrong": "f", "again": ("escape",)})
    for name in ("found", "wrong"):
        assert "Tensors: 1 of 4" in shown[name].text
        assert "layers.1.wq.weight  float32[8, 8]" in shown[name].text
    for name in ("all", "again"):
        assert " of 4" not in shown[name].text.splitlines()[1]


def test_a_tensor_and_an_element_are_gone_to_and_shown_while_typed(tmp_path: Path) -> None:
    walks = {
        "typed": ("g", "type norm[3]"),
        "gone": ("escape", "g", "type layers.1.wq.weight[6, 2]", "enter"),
        "rank": ("g", "type rank 3"),
    }
    shown = walk_on(whole(tmp_path), walks)
    assert "norm.weight  float32[8]" in shown["typed"].text
    assert re.search(r"\[3\]  file 0 a-2 .*\n.*bytes 0 to 32: part", shown["typed"].text)
    assert "[6, 2]  in no file" in shown["gone"].text
    assert "layers.1.wq.weight  float32[8, 8]" in shown["gone"].text
    assert "a checkpoint has no ranks" in shown["rank"].text


def test_help_names_are_copied_and_pictures_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = whole(tmp_path)
    monkeypatch.chdir(tmp_path)
    walks = walk_on(checkpoint, {"help": ("f1",), "saved": ("escape", "slash", "type 0.wq", "enter", *"sS")}, (120, 60))
    assert "Every tensor of the model under its module" in walks["help"].text
    assert "Find tensors by name" in walks["help"].text
    assert walks["saved"].exited is None
    assert "layers.0.wq.weight" in (tmp_path / "layers.0.wq.weight-1.svg").read_text()
    assert (tmp_path / "shardviz-1.svg").read_text().startswith("<svg")


def test_a_link_opens_on_a_tensor_and_one_to_nothing_says_what_there_is(tmp_path: Path) -> None:
    checkpoint = whole(tmp_path)
    assert StoredDocument(checkpoint).find("norm") == "norm.weight"
    with pytest.raises(ShardvizError, match=r"has no tensor nrom\.weight") as raised:
        StoredDocument(checkpoint).find("nrom.weight")
    assert raised.value.hint == "did you mean norm.weight?"


def test_a_file_that_changes_is_read_again_and_one_that_is_damaged_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "LOOK_AGAIN", 0.02)
    path = tmp_path / "model.safetensors"

    def write(**tensors: list[float]) -> None:
        save_file({name: np.array(values, np.float32) for name, values in tensors.items()}, path)

    async def run() -> list[str]:
        seen = []
        write(first=[1.0, 2.0], second=[3.0])
        app = CheckpointApp(open_checkpoint(path))
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            await pilot.press("down")
            for change, wanted in (
                (lambda: write(second=[1.0], third=[4.0]), "changed.*third"),
                (lambda: path.write_bytes(b"x" * 20), f"no findings · {re.escape(str(path)[:40])}"),
            ):
                change()
                await until(pilot, lambda wanted=wanted: re.search(wanted, screen_text(app), re.DOTALL))
                seen.append(await settle(pilot))
        return seen

    changed, damaged = asyncio.run(run())
    assert "first" not in changed
    assert re.search(r"changed \d\d:\d\d", changed)
    assert "second  float32[1]" in changed
    assert re.search(r"^ model\.safetensors  ✓ no findings · /", damaged)
    assert "third" in damaged


@nightly
def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    chunk = Chunk((0, 0), (4, 4), ByteRange("f\x1b[31m[bold]", 0, 64))
    names = [HOSTILE, "[red]up[/red].[bold", "\x1b[2J\nup", "a" * 5000, "", ".", "…\u202e"]
    tensors = {name: StoredTensor(name, (4, 4), "f\x1b[1m", (chunk,), tmp_path) for name in names}
    walks = {f"{at}": ("down",) if at else ("home",) for at in range(2 * len(names))}
    titles = set()
    for shown in walk_on(Checkpoint(tmp_path, "DCP", tensors), walks).values():
        titles.add(shown.text.splitlines()[1])
        assert "\x1b" not in shown.text
        assert "[bold]" in shown.text
        assert all(len(line) <= 120 for line in shown.text.splitlines())
    assert len(titles) == len(names)


@nightly
def test_shapes_beyond_belief_are_shown(tmp_path: Path) -> None:
    shapes = ((1 << 50, 1 << 50), (0, 4), (), (1,) * 12, (1 << 53,))
    tensors = {
        f"w{at}": StoredTensor(
            f"w{at}", shape, "float32", (Chunk((0,) * len(shape), shape, ByteRange("f", 0, 64)),), tmp_path
        )
        for at, shape in enumerate(shapes)
    }
    walks = {name: (*("home", *["down"] * at), "enter", "end", "x", "escape") for at, name in enumerate(tensors)}
    for name, shown in walk_on(Checkpoint(tmp_path, "DCP", tensors), walks).items():
        assert shown.exited is None
        assert f"─ {name}  float32[" in shown.text
        assert "missing" in shown.text


def test_a_tensor_opens_on_the_dims_that_files_split(tmp_path: Path) -> None:
    def plane(shape: tuple[int, ...], *parts: int) -> tuple[int, int] | None:
        sizes = tuple(size // count for size, count in zip(shape, parts, strict=True))
        starts = product(*(range(0, size * count, size or 1) for size, count in zip(sizes, parts, strict=True)))
        chunks = tuple(Chunk(start, sizes, ByteRange(f"f{at}", 0, 1)) for at, start in enumerate(starts))
        document = StoredDocument(
            Checkpoint(tmp_path, "DCP", {"w": StoredTensor("w", shape, "float32", chunks, tmp_path)})
        )
        found = of_entry(document, Selection(), 0).plane
        return (found.rows, found.cols) if found else None

    assert plane((4, 6), 1, 1) == (0, 1)
    assert plane((4,), 2) == (1, 0), "a line runs downwards"
    assert plane(()) == (1, 0)
    assert plane((4, 6, 8), 2, 1, 1) == (0, 2)
    assert plane((4, 6, 8), 2, 2, 1) == (0, 1)
    assert plane((2, 4, 6, 8), 1, 2, 1, 2) == (1, 3)
    assert plane((0, 4), 1, 1) is None

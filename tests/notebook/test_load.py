"""`shardviz.load`: tensors by name, what ranks hold of them, and the whole that their shards make."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shardviz
from shardviz.dump.write import rank_file
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.relate.values import part_of
from tests.check.records import add_values
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.notebook.dumps import DumpRun

MESH = parse_mesh("fsdp=2,tp=2")
SWAPPED = Made("[8/fsdp/tp, 3]", "[8/tp/fsdp, 3]")
WHOLE = np.arange(24, dtype=np.float32).reshape(8, 3) / np.float32(7)


def shards(text: str, whole: NDArray[Any]) -> Mapping[int, NDArray[Any]]:
    """Cut a tensor as a layout says."""
    layout = parse(text).layout(MESH)
    return {rank: part_of(whole.reshape(layout.index_shape), region) for rank, region in layout.regions()}


def made(
    path: Path, tensor: Made | str, held: str, whole: NDArray[Any] = WHOLE, values: Mapping[int, Any] | None = None
) -> DumpRun:
    """Write a dump with one stamped tensor `layers.0.w` and its values, and load it."""
    folder = make_dump(path / "made.shardviz", MESH, {"layers.0.w": tensor})
    claimed = tensor.claimed if isinstance(tensor, Made) else tensor
    add_values(folder, "layers.0.w", claimed, values or shards(held, whole))
    return shardviz.load(folder)


def test_a_tensor_has_what_it_claims_and_what_it_holds(tmp_path: Path) -> None:
    run = made(tmp_path, SWAPPED, "[8/tp/fsdp, 3]")
    w = run["layers.0.w"]
    assert (w.layout, w.held_layout) == ("[8/fsdp/tp, 3]", "[8/tp/fsdp, 3]")
    assert [str(region) for region in w.held.values()] == ["[0:2, 0:3]", "[4:6, 0:3]", "[2:4, 0:3]", "[6:8, 0:3]"]
    assert (w.shape, w.dtype, w.role, w.mesh, run.num_ranks) == ((8, 3), "float32", "param", MESH, 4)
    assert repr(w.placements) == "(Shard(0), Shard(0))"
    assert w.claimed == parse("[8/fsdp/tp, 3]").layout(MESH)
    assert w.ids[1].tolist() == [[13, 14, 15], [16, 17, 18]]
    assert repr(w.held) == "{0: [0:2, 0:3], 1: [4:6, 0:3], 2: [2:4, 0:3], 3: [6:8, 0:3]}"


def test_the_whole_is_put_together_by_what_ranks_hold_and_on_request_by_what_they_claim(tmp_path: Path) -> None:
    w = made(tmp_path, SWAPPED, "[8/tp/fsdp, 3]")["layers.0.w"]
    assert np.array_equal(w.full(), WHOLE)
    assert np.array_equal(w.full(by="claimed"), WHOLE[[0, 1, 4, 5, 2, 3, 6, 7]])
    with pytest.raises(DumpError, match="by='torch'"):
        w.full(by="torch")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[12/tp/fsdp, 5]", (12, 5)),
        ("[7/fsdp/tp, 3]", (7, 3)),
        ("[24/3/tp, 2]", (24, 2)),
        ("[3/fsdp, 5/tp]", (3, 5)),
        ("[2/fsdp/tp]", (2,)),
        ("[4, 4]", (4, 4)),
        ("[flat(5, 3)/fsdp]", (5, 3)),
    ],
)
def test_shards_of_every_layout_give_the_tensor_back(tmp_path: Path, text: str, shape: tuple[int, ...]) -> None:
    whole = np.random.default_rng(0).standard_normal(shape, np.float32)
    w = made(tmp_path, text, text, whole)["layers.0.w"]
    assert np.array_equal(w.full(), whole)
    assert w.full().shape == w.shape == shape
    assert np.array_equal(w.full(by="claimed"), w.full())


def test_elements_that_lie_scattered_are_put_back_one_by_one(tmp_path: Path) -> None:
    rows = np.arange(1, 25).reshape(8, 3)
    order = {rank: rows[rank::4] for rank in MESH.ranks}
    values = {rank: WHOLE[rank::4] for rank in MESH.ranks}
    w = made(tmp_path, Made("[8/fsdp/tp, 3]", ids=order), "", values=values)["layers.0.w"]
    assert np.array_equal(w.full(), WHOLE)
    assert not np.array_equal(w.full(by="claimed"), w.full())


def test_a_pending_sum_is_taken(tmp_path: Path) -> None:
    run = made(tmp_path, "[8, 3]", "[8, 3]")
    add_values(run.path, "logits", "[8, 3] +tp", dict.fromkeys(MESH.ranks, WHOLE / 2), role="param")
    assert np.allclose(shardviz.load(run.path)["logits"].full(), WHOLE)


def test_shards_are_read_when_they_are_asked_for_and_cannot_be_written_to(tmp_path: Path) -> None:
    run = made(tmp_path, SWAPPED, "[8/tp/fsdp, 3]")
    part = run["layers.0.w"].shards[1]
    assert np.array_equal(part, WHOLE[4:6].astype(np.float32))
    with pytest.raises(ValueError, match="read-only"):
        part[0, 0] = 0
    with pytest.raises(KeyError):
        run["layers.0.w"].shards[4]
    assert run.findings == run.check().findings
    assert {"diff", "load", "show"} <= {*dir(shardviz)}
    assert "TYPE_CHECKING" not in dir(shardviz)


def test_without_a_rank_the_error_counts_what_is_missing_and_names_the_rank(tmp_path: Path) -> None:
    run = made(tmp_path, SWAPPED, "[8/tp/fsdp, 3]")
    (run.path / rank_file(2)).unlink()
    w = shardviz.load(run.path)["layers.0.w"]
    with pytest.raises(DumpError) as raised:
        w.full()
    assert raised.value.message == (
        "layers.0.w: 6 of 24 elements, the first at [2, 0], are on no rank that was read: rank 2 left no file that can "
        "be read"
    )
    assert sorted(w.shards) == [0, 1, 3]


def test_copies_that_contradict_each_other_are_named_and_not_averaged(tmp_path: Path) -> None:
    values = {rank: WHOLE.copy() for rank in MESH.ranks}
    values[3][5, 1] += 1
    with pytest.raises(
        DumpError, match=r"ranks 0 and 3 hold different values of 1 element, the first at \[5, 1\]: 2\."
    ):
        made(tmp_path, "[8, 3]", "", values=values)["layers.0.w"].full()


def test_copies_with_nan_in_the_same_place_agree(tmp_path: Path) -> None:
    whole = WHOLE.copy()
    whole[1, 1] = np.nan
    full = made(tmp_path, "[8, 3]", "[8, 3]", whole)["layers.0.w"].full()
    assert np.array_equal(full, whole, equal_nan=True)


def test_shards_that_are_hashed_only_are_not_kept(tmp_path: Path) -> None:
    add_values(make_dump(tmp_path, MESH, {}), "w", "[8/tp, 3]", {0: np.ones((4, 3), "f4")}, written=False)
    shards = shardviz.load(tmp_path)["w"].shards
    assert repr(shards) == "{0: float32[4, 3] not kept}"
    with pytest.raises(DumpError, match="only a hash of rank 0's values"):
        _ = shards[0]


def test_ids_without_values_are_said_to_be_so(tmp_path: Path) -> None:
    run = shardviz.load(make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED}))
    with pytest.raises(DumpError) as raised:
        run["w"].full()
    assert raised.value.message == "w: the dump has the ids of rank 0, but no values"
    assert raised.value.hint == "`.ids` has them"


def test_the_end_of_a_name_will_do_and_a_misspelt_one_gives_a_hint(tmp_path: Path) -> None:
    tensors = {"layers.0.up": SWAPPED, "layers.1.up": SWAPPED, "head": SWAPPED}
    run = shardviz.load(make_dump(tmp_path / "d.shardviz", MESH, tensors))
    assert run["0.up"].name == "layers.0.up"
    assert ("0.up" in run, "layers.0.up" in run.tensors) == (False, True)
    with pytest.raises(KeyError) as raised:
        run["haed"]
    assert isinstance(raised.value, ShardvizError)
    assert str(raised.value) == "the dump has no tensor 'haed'\nHint: did you mean head?"
    with pytest.raises(KeyError, match=r"2 tensors end in 'up': layers\.\[0-1\]\.up"):
        run.tensors["up"]
    assert run.tensors.get("nothing of it") is None


def test_a_gradient_is_compared_with_that_of_the_unsharded_model(tmp_path: Path) -> None:
    run = made(tmp_path, SWAPPED, "[8/tp/fsdp, 3]")
    assert run["layers.0.w"].grad is None
    assert run["layers.0.w"].reference is None


def test_what_is_not_there_or_damaged_raises_what_the_commands_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardviz.cli import main

    broken = make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED})
    (broken / "run.json").write_text("{", encoding="utf-8")
    for path in (tmp_path / "nothing", broken, tmp_path):
        main(["check", str(path)])
        printed = capsys.readouterr().err
        with pytest.raises(DumpError) as raised:
            shardviz.load(path)
        assert raised.value.message in printed
        assert raised.value.hint in printed


def test_a_damaged_rank_gives_a_warning_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED})
    (folder / rank_file(1)).write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"rank_00001\.json is damaged") as seen:
        run = shardviz.load(folder)
    assert seen[0].filename == __file__
    assert list(run.damaged) == [1]
    assert sorted(run["w"].held) == [0, 2, 3]


CODE = """
import sys, shardviz
assert "numpy" not in sys.modules
run = shardviz.load(sys.argv[1])
run["w"].held, run.check().findings[0].pair.actual[1], repr(run), run._repr_html_()
assert not {"torch", "IPython", "textual"} & {*sys.modules}
"""


def test_load_needs_neither_torch_nor_ipython(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED})
    subprocess.run([sys.executable, "-c", CODE, folder], check=True, timeout=240)


def test_an_error_has_no_frames_of_the_reader(tmp_path: Path) -> None:
    run = shardviz.load(make_dump(tmp_path / "d.shardviz", MESH, {"w": SWAPPED}))
    for fails in (lambda: shardviz.load(tmp_path / "nothing"), lambda: run["nothing"], lambda: run["w"].full()):
        with pytest.raises(ShardvizError) as raised:
            fails()
        frames = {str(entry.path) for entry in raised.traceback} - {__file__}
        assert all(frame.endswith("runs.py") for frame in frames)

"""`explain`, `mesh` and `probes`: what they print, however large. The golden files are reviewed as diffs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.cli import main
from shardviz.commands.mesh import _first_groups
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.text import bytes_text
from tests.lanes import at_night
from tests.picture.golden import check_golden

if TYPE_CHECKING:
    from pathlib import Path

GOLDEN = {
    "explain_fsdp_over_tp": ["explain", "[12/tp/fsdp, 12]", "--mesh", "fsdp=2,tp=4"],
    "explain_partial": ["explain", "bfloat16[12/fsdp, 8] +tp", "--mesh", "fsdp=2,tp=4"],
    "explain_unspeakable": ["explain", "[(12/3/tp)/fsdp]", "--mesh", "fsdp=2,tp=2"],
    "explain_all": ["explain", "[40/fsdp]", "--mesh", "fsdp=40", "--all"],
    "mesh_two_axes": ["mesh", "2,4", "--axes", "fsdp,tp"],
    "mesh_one_axis": ["mesh", "dp=3"],
    "mesh_three_axes": ["mesh", "pp=2,fsdp=2,tp=3"],
    "mesh_large": ["mesh", "pp=16,fsdp=32,tp=32"],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_printed(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(GOLDEN[name]) == 0
    text = capsys.readouterr().out
    check_golden(name, text)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "spelled",
    [
        "(Replicate(), Shard(0))",
        "[Replicate(), Shard(dim=0)]",
        "(R, S(0))",
        "Replicate(), Shard(0)",
    ],
)
def test_torchs_spelling_is_read_as_any_version_prints_it(spelled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", spelled, "--shape", "12,8", "--mesh", "fsdp=2,tp=4"]) == 0
    in_torch = capsys.readouterr().out
    assert main(["explain", "[12/tp, 8]", "--mesh", "fsdp=2,tp=4"]) == 0
    assert in_torch == capsys.readouterr().out


@pytest.mark.parametrize(
    ("spelled", "written"),
    [
        ("(_StridedShard(dim=0, split_factor=4), Shard(dim=0))", "[12/tp/fsdp, 8]"),
        ("(_S(0, 4), S(0))", "[12/tp/fsdp, 8]"),
        ("(Partial(sum), Partial('max'))", "[12, 8] +fsdp +tp:max"),
        ("(P(avg), R)", "[12, 8] +fsdp:avg"),
    ],
)
def test_strided_shards_and_sums_are_read_too(spelled: str, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", spelled, "--shape", "12,8", "--mesh", "fsdp=2,tp=4"]) == 0
    assert capsys.readouterr().out.startswith(f"float32{written}  on mesh")


@pytest.mark.parametrize("shape", ["12,8", "12x8", "12 8", "(12, 8)", "torch.Size([12, 8])"])
def test_a_shape_is_read_however_it_is_written(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "(Shard(-1))", "--shape", shape, "--mesh", "tp=4"]) == 0
    assert capsys.readouterr().out.startswith("float32[12, 8/tp]  on mesh (tp=4)\n")


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("[flat(10, 10)/shard]", "HYBRID_SHARD over replicate, shard"),
        ("[flat(10, 10)/replicate/shard]", "FULL_SHARD over replicate, shard"),
        ("[flat(10, 10)]", "NO_SHARD over replicate, shard"),
    ],
)
def test_a_flat_layout_is_told_as_fsdp1s_strategy(
    layout: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", layout, "--mesh", "replicate=2,shard=4"]) == 0
    assert f"in torch   FSDP1's {strategy}: a stretch of a FlatParameter" in capsys.readouterr().out


@pytest.mark.parametrize("spelled", ["(Shard(0), Replica())", "(Shard(x), R)", "(Partial('no'), R)", "(R, R"])
def test_placements_that_are_none_are_refused(spelled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", spelled, "--shape", "12,8", "--mesh", "fsdp=2,tp=4"]) == 2
    assert " is not a placement\nHint: Replicate(), Shard(0)," in capsys.readouterr().err


def test_a_layout_that_torch_says_otherwise_gets_that_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "[(12/2/tp)/fsdp]", "--mesh", "fsdp=2,tp=2"]) == 0
    assert "in torch   (Shard(0), Shard(0))\n" in capsys.readouterr().out


def test_a_shape_fills_in_the_sizes_that_a_pattern_leaves_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "[*/tp, *]", "--shape", "12,8", "--mesh", "tp=4"]) == 0
    assert capsys.readouterr().out.startswith("float32[12/tp, 8]  on mesh (tp=4)\n")


def test_a_layout_is_written_as_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "qkv.svg"
    assert main(["explain", "[24/3/tp, 8]", "--mesh", "tp=2", "-o", str(drawn)]) == 0
    assert "float32[24/3/tp, 8]" in drawn.read_text(encoding="utf-8")
    said = f"wrote {drawn}, {bytes_text(drawn.stat().st_size)}; open it in a browser\n"
    assert capsys.readouterr() == ("", said)


def test_a_picture_of_pixels_is_refused_rather_than_text_written_under_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "qkv.png"
    assert main(["explain", "[24/3/tp, 8]", "--mesh", "tp=2", "-o", str(drawn)]) == 2
    vectors = drawn.with_suffix(".svg")
    how = f"Hint: write it with -o {vectors}, then convert it: rsvg-convert {vectors} -o {drawn}, or open it"
    assert f"{drawn}: pictures are written as SVG, not as PNG\n{how}" in capsys.readouterr().err
    assert not drawn.exists()
    source = tmp_path / "mine.py"
    source.write_text("a user's own")
    assert main(["explain", "[24/3/tp, 8]", "--mesh", "tp=2", "-o", str(source)]) == 2
    assert "mine.py exists, and shardviz writes no .py files" in capsys.readouterr().err
    assert source.read_text() == "a user's own"


def test_the_way_between_two_layouts_is_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "way.svg"
    assert main(["explain", "[12/tp]", "[12]", "--mesh", "tp=2", "-o", str(drawn)]) == 2
    assert "an SVG shows one layout" in capsys.readouterr().err
    assert not drawn.exists()


def test_recipes_have_a_line_each_with_axes_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probes"]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert "fsdp, tp" in rows["tp_fsdp"]
    assert "FSDP2 over tensor parallel" in rows["tp_fsdp"]
    assert "pytorch#129229" in rows["bugs/left_to_right_2d"]
    assert not any("__init__" in name for name in rows)


@pytest.mark.parametrize("text", ["a=1", "a=2,b=3", "a=3,b=1,c=4", "a=2,b=2,c=2,d=3"])
def test_the_first_groups_are_those_that_come_first_of_all(text: str) -> None:
    mesh = parse_mesh(text)
    turned = Mesh(mesh.axes, mesh.shape, tuple(reversed(mesh.ranks)))
    for one in (mesh, turned):
        for axis in one.axes:
            for most in (1, 5, 100):
                assert _first_groups(one, axis, most) == one.groups(axis)[:most]


@pytest.mark.parametrize("axes", [14, *at_night([20])])
def test_of_very_many_groups_the_first_are_printed(axes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", ",".join(f"a{axis}=2" for axis in range(axes))]) == 0
    out = capsys.readouterr().out
    assert out.count(f"{1 << (axes - 1):,} groups along a") == axes
    assert out.count(f"{(1 << (axes - 1)) - 16:,} more: --all prints them") == axes

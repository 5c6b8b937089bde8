"""A tensor as SVG. The golden files are pictures: look at them in a browser, light and dark, before they change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.picture.model.palette import RANK_COLORS, ink_on
from shardviz.picture.model.subject import of_layout, of_tensor
from shardviz.picture.svg.page import svg
from tests.dumps import Made, make_dump
from tests.lanes import at_night, recorded
from tests.picture.contrast import contrast
from tests.picture.golden import check_golden
from tests.picture.test_pages import HEALTHY, MISORDERED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ALL = {**HEALTHY, **MISORDERED}
SVG = "{http://www.w3.org/2000/svg}"
GOLDEN = ("misordered_uneven", "misordered_line", "other_dim", "even", "flat", "three_dims", "partial", "empty")


def drawn(tmp_path: Path, mesh: str, tensor: Made | str, name: str = "layers.0.weight") -> str:
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {name: tensor})))
    return svg(of_tensor(dump, dump.tensors[0], name))


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def tooltips(folder: Path) -> list[str]:
    dump = dump_of(read_files(folder))
    picture = svg(of_tensor(dump, dump.tensors[0], dump.tensors[0].name))
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}title")]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_a_picture_are_stable(name: str, tmp_path: Path) -> None:
    check_golden(name, drawn(tmp_path, *ALL[name]), "svg")


def test_a_tooltip_tells_a_missing_file_from_a_part_in_another_place(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=2,tp=2"), {"w": Made("[8/fsdp, 4]", "[8/tp, 4]")})
    (folder / "rank_00000.json").unlink()
    assert "[0:4, 0:4]: ranks 0,2 (not as claimed)" in tooltips(folder)
    healthy = make_dump(tmp_path / "h.shardviz", parse_mesh("fsdp=2,tp=2"), {"w": "[8/fsdp, 4]"})
    (healthy / "rank_00001.json").unlink()
    assert {"[0:4, 0:4]: ranks 0-1 (✗ 1)", "[4:8, 0:4]: ranks 2-3"} <= set(tooltips(healthy))


BY_DAY = [name for name in [*ALL][::4] if "1024" not in name]


@pytest.mark.parametrize("name", [*BY_DAY, *at_night([name for name in ALL if name not in BY_DAY], recorded)])
def test_every_layout_is_well_formed_and_stands_alone_and_every_box_lies_in_the_picture(
    name: str, tmp_path: Path
) -> None:
    picture = drawn(tmp_path, *ALL[name])
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert {node.tag.removeprefix(SVG) for node in root.iter()} <= {
        *("svg", "title", "desc", "style", "defs", "pattern", "path", "rect", "g", "text")
    }
    assert re.findall(r"url\((.*?)\)", picture) == ["#sv-differs"]
    assert picture.count("http") == 1, "only the namespace is an address, and nobody fetches that"
    assert len(picture) < 80_000
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    boxes = list(root.iter(f"{SVG}rect"))
    assert boxes
    for rect in boxes:
        assert 0 < int(rect.attrib["width"]) <= width
        assert 0 < int(rect.attrib["height"]) <= height


def test_what_differs_is_reported_by_a_glyph_and_not_by_color_alone(tmp_path: Path) -> None:
    picture = drawn(tmp_path, *MISORDERED["misordered_rows"])
    assert {f"✗ {rank}" for rank in (1, 2, 3, 4, 5, 6)} <= set(texts(picture))
    assert not {"✗ 0", "✗ 7"} & set(texts(picture))
    assert picture.count('class="sv-hatch"') == 12, "six in the map, six in the mesh"


def test_bands_run_from_where_parts_are_claimed_to_where_they_are_held(tmp_path: Path) -> None:
    picture = drawn(tmp_path, *MISORDERED["misordered_rows"])
    assert len(re.findall(r'class="sv-band sv-f\d+"', picture)) == 6
    assert len(re.findall(r'class="sv-band sv-f\d+ sv-still"', picture)) == 2
    assert 'class="sv-band' not in drawn(tmp_path / "healthy", *HEALTHY["strided"])


def test_a_reader_without_eyes_is_reported_the_same(tmp_path: Path) -> None:
    root = ElementTree.fromstring(drawn(tmp_path, *MISORDERED["misordered_uneven"]))
    about = root.findtext(f"{SVG}desc") or ""
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == f"layers.0.weight: {about}"
    assert "7 of 8 ranks do not hold what they claim" in about
    told = [node.findtext(f"{SVG}title") for node in root.iter(f"{SVG}g")]
    assert "[2:3, 0:12]: rank 4 (not as claimed)" in told


HOSTILE = "</style><script>alert(1)</script>&<!--\"'\x00\x1b]]>\u202e"


def test_a_hostile_name_is_only_text(tmp_path: Path) -> None:
    root = ElementTree.fromstring(drawn(tmp_path, "tp=2", "[4/tp]", HOSTILE))
    assert root.find(f".//{SVG}script") is None
    assert (root.findtext(f"{SVG}title") or "").startswith("</style><script>alert(1)</script>&<!--")
    assert "\\u0000\\u001b]]>\\u202e" in (root.findtext(f"{SVG}title") or "")


def test_a_long_name_goes_on_below_and_a_picture_stays_as_wide_as_a_page(tmp_path: Path) -> None:
    long = "transformer_block_with_a_long_name." * 8 + "weight"
    axes = "data_parallel_replicate=2,fully_sharded_data_parallel=2,tensor_parallel=2"
    picture = drawn(tmp_path, axes, "[12/tensor_parallel/fully_sharded_data_parallel, 12]", long)
    assert int(ElementTree.fromstring(picture).attrib["width"]) < 960
    assert "".join(texts(picture)[:4]).startswith(long)
    endless = drawn(tmp_path, "tp=2", "[4/tp]", "x" * 100_000)
    assert int(ElementTree.fromstring(endless).attrib["height"]) < 600
    assert [set(text) for text in texts(endless)[:4]] == [{"x"}, {"x"}, {"x"}, {"…"}]


def test_a_rank_without_a_file_is_not_said_to_hold_what_it_claims(tmp_path: Path) -> None:
    files = make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=4"), {"w": "[9/fsdp, 4]"})
    (files / "rank_00001.json").unlink()
    dump = dump_of(read_files(files))
    picture = svg(of_tensor(dump, dump.tensors[0], "w"))
    assert "? as claimed, but rank 1 left no file that can be read" in texts(picture)
    assert "do not hold what they claim" not in picture


def test_a_layout_alone_is_named_by_its_notation() -> None:
    picture = svg(of_layout(parse("[12/tp/fsdp, 12]").layout(parse_mesh("fsdp=2,tp=4"))))
    assert ElementTree.fromstring(picture).findtext(f"{SVG}title") == "float32[12/tp/fsdp, 12]"


def themes(picture: str) -> Iterable[dict[str, str]]:
    """Yield the colors of light and of dark, as the rules that have them come."""
    named = {"ink": "text", "paper": ".sv-paper", "soft": ".sv-soft", "bad": ".sv-bad", "good": ".sv-good"}
    found = {name: re.findall(rf"\.sv {re.escape(rule)}[^{{]*\{{fill:(#\w+)", picture) for name, rule in named.items()}
    for colors in zip(*found.values(), strict=True):
        yield dict(zip(found, colors, strict=True))


def test_text_can_be_read_in_light_in_dark_and_on_every_rank(tmp_path: Path) -> None:
    found = list(themes(drawn(tmp_path, *HEALTHY["even"])))
    assert len(found) == 2
    for theme in found:
        assert min(contrast(theme[name], theme["paper"]) for name in ("ink", "soft", "bad", "good")) >= 4.5
    assert min(contrast(color, ink_on(color)) for color in RANK_COLORS) >= 4.5


def test_colors_need_no_browser(tmp_path: Path) -> None:
    assert "var(" not in drawn(tmp_path, *HEALTHY["even"])


def test_show_writes_the_picture_that_the_files_ending_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh, made = MISORDERED["misordered_uneven"]
    files = make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {"layers.0.weight": made})
    assert main(["show", str(files), "layers.0.weight", "-o", str(tmp_path / "w.svg")]) == 0
    assert capsys.readouterr().out == ""
    check_golden("misordered_checked", (tmp_path / "w.svg").read_text(encoding="utf-8"), "svg")
    assert main(["show", str(files), "--format", "svg"]) == 0
    check_golden("misordered_checked", capsys.readouterr().out, "svg")
    assert main(["show", str(files), "layers.0.weight", "-o", str(tmp_path / "w.pdf")]) == 2
    assert not (tmp_path / "w.pdf").exists()


def bands_of(picture: str) -> tuple[int, int]:
    """Return how many bands go elsewhere and how many stay."""
    return len(re.findall(r'sv-band sv-f\d+"', picture)), picture.count(' sv-still"')


def test_each_piece_of_a_part_that_was_cut_up_has_its_band(tmp_path: Path) -> None:
    fused = drawn(tmp_path / "a", "tp=4", Made("[96/tp, 4]", "[96/3/tp, 4]"))
    assert bands_of(fused) == (10, 2), "three pieces for each of four ranks; the first and the last stay"
    uneven = drawn(tmp_path / "b", "tp=4", Made("[90/tp, 4]", "[90/3/tp, 4]"))
    assert sum(bands_of(uneven)) >= 12


def test_bands_are_left_out_where_they_could_not_be_followed(tmp_path: Path) -> None:
    assert bands_of(drawn(tmp_path / "a", "tp=64", Made("[512/tp, 4]", "[512/8/tp, 4]"))) == (0, 0)
    assert bands_of(drawn(tmp_path / "b", *MISORDERED["other_dim"])) == (0, 0)


def test_1024_parts_are_drawn_as_8_blocks_of_which_one_is_opened(tmp_path: Path) -> None:
    picture = drawn(tmp_path, "fsdp=128,tp=8", "[128256/tp/fsdp, 8192]")
    assert [f"tp={at} ▸ fsdp 0…127" in texts(picture) for at in range(8)] == [False, *[True] * 7]
    assert {"0", "8", "16", "1016"} <= set(texts(picture)), "the parts of the first one"
    boxes = [node for node in ElementTree.fromstring(picture).iter(f"{SVG}g") if node.find(f"{SVG}rect") is not None]
    fill = {node.findtext(f"{SVG}text"): node.find(f"{SVG}rect").attrib["class"] for node in boxes}  # type: ignore[union-attr]
    assert len({fill[f"tp={at} ▸ fsdp 0…127"] for at in range(1, 8)}) == 7

"""Colors of ranks: which can be distinguished, also by color-blind eyes and by terminals of few colors."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color, ColorSystem
from rich.segment import Segment
from textual.color import Color as Behind

from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.picture.model.palette import (
    GREEN,
    HUES,
    INK_ON_16,
    ORANGE,
    RANK_COLORS,
    RANK_COLORS_16,
    RANK_COLORS_256,
    SHADES,
    VERMILLION,
    Coloring,
    ink_on,
    rank_color,
    style_of,
)
from shardviz.picture.text.terminal import Terminal, line
from shardviz.tui.colors import ANSI, ON_DARK_16, ON_LIGHT, RED_16, THEMES, Inks, ink, rank_style
from tests.lanes import cases
from tests.picture.contrast import contrast

MESHES = [
    *(parse_mesh(text) for text in ("1", "5", "2,4", "8,8", "2,7", "7,7", "3,14,2", "15,15", "4,28", "2,1,3,7,2")),
    Mesh(("pp",), (2,), (1, 0)),
    Mesh(("dp", "tp"), (2, 7), tuple(reversed(range(10, 24)))),
    Mesh(("dp", "tp"), (3, 3), (4, 8, 1, 0, 7, 2, 6, 3, 5)),
]

EYES = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""What eyes make of linear red, green and blue: Machado, Oliveira and Fernandes, 2009, at full severity."""

TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
"""Oklab (Ottosson, 2020), in which distances are about as people see them; 0.02 is one that is just noticed."""

PALETTES = {"true color": (RANK_COLORS, 0.075), "256 colors": (RANK_COLORS_256, 0.06)}


def seen(colors: tuple[str, ...], eyes: str) -> np.ndarray:
    """Return colors as Oklab, as some eyes see them."""
    values = np.array([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in colors])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return np.cbrt(np.clip(linear @ EYES[eyes].T, 0, 1) @ TO_CONES.T) @ TO_OKLAB.T


def nearest(colors: tuple[str, ...], eyes: str) -> float:
    """Return the distance between the two hues that are most alike, in any of their shades."""
    found = seen(colors, eyes)
    pairs = combinations(range(len(colors)), 2)
    return min(float(np.linalg.norm(found[a] - found[b])) for a, b in pairs if a // SHADES != b // SHADES)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("palette", PALETTES)
def test_eight_hues_are_told_apart_in_any_shade_also_by_color_blind_eyes(palette: str, eyes: str) -> None:
    colors, least = PALETTES[palette]
    assert len(colors) == HUES * SHADES
    assert nearest(colors, eyes) >= least


@pytest.mark.parametrize("palette", PALETTES)
def test_shades_of_a_hue_are_told_apart_and_none_is_grey_or_the_color_of_what_is_wrong(palette: str) -> None:
    colors = PALETTES[palette][0]
    found = seen(colors, "normal")
    for dark, light in zip(found[::SHADES], found[1::SHADES], strict=True):
        assert np.linalg.norm(dark - light) >= 0.06
    assert np.hypot(found[:, 1], found[:, 2]).min() >= 0.05, "a chroma of 0 is gray"
    assert np.linalg.norm(found - seen((VERMILLION,), "normal"), axis=1).min() >= 0.1


def test_the_distance_sees_what_color_blind_eyes_do_not() -> None:
    okabe_and_ito = ("#009e73", "#009e73", "#cc79a7", "#cc79a7", "#999999", "#999999")
    assert nearest(okabe_and_ito, "normal") > 0.06 > nearest(okabe_and_ito, "deuteranopia")


@pytest.mark.parametrize("palette", PALETTES)
def test_text_can_be_read_on_every_color(palette: str) -> None:
    assert min(contrast(color, ink_on(color)) for color in PALETTES[palette][0]) >= 4.5


XTERM = (
    *("#000000", "#cd0000", "#00cd00", "#cdcd00", "#0000ee", "#cd00cd", "#00cdcd", "#e5e5e5"),
    *("#7f7f7f", "#ff0000", "#00ff00", "#ffff00", "#5c5cff", "#ff00ff", "#00ffff", "#ffffff"),
)
WINDOWS = (
    *("#0c0c0c", "#c50f1f", "#13a10e", "#c19c00", "#0037da", "#881798", "#3a96dd", "#cccccc"),
    *("#767676", "#e74856", "#16c60c", "#f9f1a5", "#3b78ff", "#b4009e", "#61d6d6", "#f2f2f2"),
)


@pytest.mark.parametrize("theme", [XTERM, WINDOWS], ids=["xterm", "Windows"])
def test_text_can_be_read_on_each_of_16_colors(theme: tuple[str, ...]) -> None:
    for fill, own in zip(RANK_COLORS_16, INK_ON_16, strict=True):
        assert contrast(theme[fill], theme[own]) >= 4.5, (fill, own)


def test_16_colors_have_eight_hues_without_grey_and_without_red() -> None:
    assert len(set(RANK_COLORS_16)) == HUES
    assert not {0, 7, 8, 15, 1, 9} & set(RANK_COLORS_16)


@pytest.mark.parametrize("system", [ColorSystem.EIGHT_BIT, ColorSystem.STANDARD])
def test_no_color_is_rounded_to_another_on_its_way_to_the_terminal(system: ColorSystem) -> None:
    name = {ColorSystem.EIGHT_BIT: "256", ColorSystem.STANDARD: "standard"}[system]
    fills = [rank_style(color, name).bgcolor for color in range(len(RANK_COLORS))]
    rounded = [fill.downgrade(system) for fill in fills if fill is not None]
    if system is ColorSystem.STANDARD:
        assert [color.number for color in rounded] == [number for number in RANK_COLORS_16 for _ in range(SHADES)]
    else:
        assert [color.get_truecolor().hex for color in rounded] == list(RANK_COLORS_256)


def test_the_viewer_names_16_colors_as_rich_rounds_them() -> None:
    assert all(Color.parse(color).downgrade(ColorSystem.STANDARD).number == at for at, color in ANSI.items())


def test_the_viewer_has_the_same_palette() -> None:
    fills = [rank_style(color).bgcolor for color in range(len(RANK_COLORS))]
    assert [fill.name.lower() for fill in fills if fill is not None] == list(RANK_COLORS)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_neighbors_along_an_axis_differ_on_every_mesh(mesh: Mesh) -> None:
    for axis in mesh.axes:
        for group in mesh.groups(axis):
            for one, other in pairwise(group):
                assert rank_color(one, mesh) != rank_color(other, mesh), (axis, one, other)


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh.size <= HUES], ids=str)
def test_up_to_eight_ranks_have_hues_of_their_own(mesh: Mesh) -> None:
    assert len({rank_color(rank, mesh) // SHADES for rank in mesh.ranks}) == mesh.size


def hues(mesh: Mesh, *axes: str) -> dict[int, int]:
    return {rank: rank_color(rank, mesh, axes) // SHADES for rank in mesh.ranks}


def test_the_hue_is_that_of_the_outermost_split_and_the_shade_of_the_next() -> None:
    mesh = parse_mesh("fsdp=128,tp=8")
    by_tp = hues(mesh, "tp", "fsdp")
    assert all(hue == mesh.coord_of(rank)[1] for rank, hue in by_tp.items()), "8 bands of 128"
    shades = [rank_color(rank, mesh, ("tp", "fsdp")) % SHADES for rank in mesh.group_of(0, "fsdp")]
    assert shades == [0, 1] * 64
    by_fsdp = hues(mesh, "fsdp", "tp")
    assert all(hue == mesh.coord_of(rank)[0] // 16 for rank, hue in by_fsdp.items()), "128 in 8 stretches of 16"


def test_copies_have_one_color() -> None:
    mesh = parse_mesh("replicate=4,shard=4")
    for group in mesh.groups("replicate"):
        assert len({rank_color(rank, mesh, ("shard",)) for rank in group}) == 1
    assert len({rank_color(rank, mesh, ("shard",)) for rank in mesh.group_of(0, "shard")}) == 4


def test_a_block_of_many_ranks_has_the_hue_that_they_share() -> None:
    mesh = parse_mesh("fsdp=128,tp=8")
    coloring = Coloring(mesh, ("tp", "fsdp"))
    assert coloring.color_of(mesh.group_of(3, "fsdp")) == 3 * SHADES
    assert coloring.color_of([3 + 8]) == 3 * SHADES + 1
    assert coloring.color_of(mesh.group_of(3, "tp")) == -1


@cases(200)
@given(st.sampled_from([None, *MESHES]), st.sets(st.integers(0, 300), min_size=1), st.booleans())
def test_a_block_has_the_color_that_its_ranks_have_when_counted_one_by_one(
    mesh: Mesh | None, ranks: set[int], is_split: bool
) -> None:
    coloring = Coloring(mesh, mesh.axes if mesh is not None and is_split else ())
    colors = [coloring.color(rank) for rank in sorted(ranks)]
    hues = Counter(sorted(color // SHADES for color in colors))
    most, count = hues.most_common(1)[0]
    expected = colors[0] if len(set(colors)) == 1 else most * SHADES if 3 * count >= len(ranks) else -1
    is_everywhere = mesh is not None and not is_split and len(ranks) == mesh.size
    assert coloring.color_of(sorted(ranks)) == (0 if is_everywhere else expected)


def test_without_a_mesh_neighboring_numbers_differ() -> None:
    found = [Coloring().color(number) for number in range(16)]
    assert len(set(found)) == 16
    assert Coloring().color(16) == found[0]


def test_of_16_colors_the_second_shade_is_the_first_underlined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM", raising=False)
    first, second = (
        Terminal(color=True).render([line(("x", style_of("rank", color)))]).partition("x")[0] for color in (0, 1)
    )
    assert second != first
    assert sorted(set(codes_of(second)) - set(codes_of(first))) == ["4"]
    assert rank_style(1, "standard").underline
    assert not rank_style(0, "standard").underline


def codes_of(escape: str) -> list[str]:
    """Return the numbers of an escape sequence of styles."""
    return escape.removeprefix("\x1b[").removesuffix("m").split(";")


def test_verdicts_can_be_read_on_the_light_theme() -> None:
    (theme,) = (theme for theme in THEMES if not theme.dark)
    filtered = Inks(ON_LIGHT).apply([Segment("x", ink(color)) for color in ON_LIGHT], Behind.parse("#ffffff"))
    for segment in filtered:
        assert segment.style is not None
        assert segment.style.color is not None
        written = segment.style.color.get_truecolor().hex
        assert all(contrast(written, str(behind)) >= 4.5 for behind in (theme.background, theme.surface, theme.panel))


def test_inks_of_light_themes_keep_their_hues_in_16_colors() -> None:
    found = {name: Color.parse(color).downgrade(ColorSystem.STANDARD).number for name, color in ON_LIGHT.items()}
    assert found == {GREEN: 2, VERMILLION: 1, ORANGE: 3}


def test_an_error_is_red_in_16_colors_on_dark_themes_and_not_the_yellow_of_warnings() -> None:
    found = {name: Color.parse(color).downgrade(ColorSystem.STANDARD).number for name, color in ON_DARK_16.items()}
    assert found == {GREEN: 10, VERMILLION: 9, ORANGE: 11}
    (written,) = Inks(ON_DARK_16).apply([Segment("x", ink(VERMILLION))], Behind.parse("#000000"))
    assert written.style is not None
    assert written.style.color == Color.parse(ON_DARK_16[VERMILLION])
    assert Color.parse(RED_16).downgrade(ColorSystem.STANDARD).number == 1


def test_what_all_ranks_hold_and_nothing_splits_has_a_color() -> None:
    mesh = parse_mesh("fsdp=4,tp=4")
    assert Coloring(mesh).color_of(mesh.ranks) == 0
    assert Coloring(mesh, ("fsdp", "tp")).color_of(mesh.ranks) == -1, "they hold different parts"
    assert Coloring(mesh).color_of(mesh.ranks[:15]) == -1

"""A run as one HTML page: what stands in it, what it lets nobody do, and what a real browser makes of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.cli import main
from shardviz.mesh import parse_mesh
from tests.dumps import Made, make_dump
from tests.picture.browser import asked, dom, picture, run

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

MESH = "fsdp=2,tp=4"
TENSORS: Mapping[str, Made | str] = {
    "layers.0.wq": Made("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]"),
    "layers.1.wq": Made("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]"),
    "layers.0.wo": "[12/fsdp, 12/tp]",
    "layers.1.wo": "[12/fsdp, 12/tp]",
    "norm": "[12]",
    "conv": "[8/fsdp, 3, 4/tp, 5]",
}
HOSTILE = '"><img src=x onerror=alert(1)></title></style><script>alert(2)</script>\x1b[31m\u202e'


def page(tmp_path: Path, tensors: Mapping[str, Made | str], mesh: str = MESH) -> Path:
    dump = make_dump(tmp_path / "run.shardviz", parse_mesh(mesh), tensors)
    assert main(["show", str(dump), "-o", str(tmp_path / "run.html")]) == 0
    return tmp_path / "run.html"


class Outline(HTMLParser):
    """The tags of a page, with those that are open at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]


def outline(file: Path) -> Outline:
    found = Outline()
    found.feed(file.read_text(encoding="utf-8"))
    assert found.open == []
    return found


def test_findings_come_first_with_their_picture_and_are_told_once_for_all_layers(tmp_path: Path) -> None:
    text = page(tmp_path, TENSORS).read_text(encoding="utf-8")
    assert re.findall("<h2[^>]*>(.*?)</h2>", text) == ["Findings", "Mesh", "Tensors", "Maps"]
    assert text.count("<article") == 1
    article = text[text.index("<article") : text.index("</article>")]
    assert "layers.[0-1].wq (2 tensors)" in article
    assert "≠ 4</text>" in article
    assert "≠ 4</text>" not in text[text.index("</article>") :]


def test_every_tensor_has_a_line_that_leads_to_its_map(tmp_path: Path) -> None:
    found = outline(page(tmp_path, TENSORS))
    anchors = [one["id"] for one in found.all("details")]
    links = [str(one["href"]) for one in found.all("a")]
    assert anchors == [f"tensor-{at}" for at in range(4)]
    assert {f"#{anchor}" for anchor in anchors} <= set(links)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_only_what_is_wrong_is_open(tmp_path: Path) -> None:
    found = outline(page(tmp_path, TENSORS))
    assert ["open" in one for one in found.all("details")] == [True, False, False, False]


def test_the_page_fetches_and_runs_nothing(tmp_path: Path) -> None:
    file = page(tmp_path, TENSORS)
    found = outline(file)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"} in (
        found.all("meta")
    )
    assert set(re.findall(r"\w+://[^\"' ]+", file.read_text(encoding="utf-8"))) == {"http://www.w3.org/2000/svg"}


def test_a_hostile_name_is_only_text_wherever_it_stands(tmp_path: Path) -> None:
    wrong = Made("[12/fsdp/tp]", "[12/tp/fsdp]")
    file = page(tmp_path, {HOSTILE: wrong, "b" + HOSTILE: "[4/tp]"})
    outline(file)
    text = file.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("\\u001b[31m\\u202e") > 4
    assert "\x1b" not in text


def test_landmarks_headings_and_names_are_there_for_a_screen_reader(tmp_path: Path) -> None:
    found = outline(page(tmp_path, TENSORS))
    assert [len(found.all(tag)) for tag in ("header", "nav", "main", "h1")] == [1, 1, 1, 1]
    assert found.all("html") == [{"lang": "en"}]
    pictures = [one for one in found.all("svg") if one.get("aria-hidden") != "true"]
    assert pictures
    assert all(one["role"] == "img" and one["aria-label"] for one in pictures)
    assert all(one["tabindex"] == "0" for one in found.all("figure")), "what scrolls is reached by keyboard"
    assert all(one["scope"] in ("col", "row") for one in found.all("th"))


def test_a_clean_run_says_so(tmp_path: Path) -> None:
    text = page(tmp_path, {"w": "[16/tp/fsdp, 8]"}).read_text(encoding="utf-8")
    assert "✓ the tensor is in order on 8 ranks" in text
    assert "<p>None.</p>" in text


def test_723_tensors_on_1024_ranks_stay_under_5_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    from bench_check import make

    make(tmp_path / "llama.shardviz")
    assert main(["show", str(tmp_path / "llama.shardviz"), "-o", str(tmp_path / "llama.html")]) == 0
    text = (tmp_path / "llama.html").read_text(encoding="utf-8")
    assert "all 723 tensors are in order on 1,024 ranks" in text
    assert len(outline(tmp_path / "llama.html").all("details")) == 12, "one map for each folded tensor"
    assert len(text.encode()) < 1_000_000


def test_maps_beyond_the_pages_room_are_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardviz.picture.html.MOST_BYTES", 1)
    text = page(tmp_path, TENSORS).read_text(encoding="utf-8")
    assert text.count("Not drawn: the page has no more room; shardviz show draws it") == 3
    assert "≠ 4</text>" in text, "what is wrong is drawn first"


OUTSIDE = """JSON.stringify((() => {
  document.querySelectorAll("details").forEach(one => { one.open = true });
  const found = [];
  document.querySelectorAll("svg.sv").forEach(svg => {
    const frame = svg.getBoundingClientRect();
    svg.querySelectorAll("text").forEach(text => {
      const at = text.getBoundingClientRect();
      const box = text.parentNode.querySelector(":scope > rect.sv-b");
      const room = box ? box.getBoundingClientRect() : frame;
      if (at.left < room.left || at.right > room.right || at.top < frame.top || at.bottom > frame.bottom)
        found.push(text.textContent);
    });
  });
  return [document.querySelectorAll("svg.sv text").length, found];
})())"""


def test_in_a_browser_every_word_lies_within_its_box_and_its_picture(tmp_path: Path) -> None:
    large = {"w": Made("[128256/fsdp/tp, 8192]", "[128256/tp/fsdp, 8192]"), "x": "[128256/fsdp, 8192/tp]"}
    for tensors, mesh in ((TENSORS, MESH), (large, "fsdp=128,tp=8")):
        answer = asked(tmp_path, page(tmp_path, tensors, mesh), OUTSIDE)
        count, _, outside = answer.strip("[]").partition(",")
        assert int(count) > 50
        assert outside.strip("[]") == ""


def test_in_a_browser_a_hostile_name_makes_no_element(tmp_path: Path) -> None:
    seen = dom(tmp_path, page(tmp_path, {HOSTILE: "[4/tp]"}))
    assert "<script" not in seen
    assert "<img" not in seen
    assert "alert(2)" in seen


def test_in_a_browser_nothing_is_fetched_and_the_page_fits_its_window(tmp_path: Path) -> None:
    loaded = "performance.getEntriesByType('resource').length"
    question = f"[document.documentElement.scrollWidth <= innerWidth, document.images.length, {loaded}].join()"
    assert asked(tmp_path, page(tmp_path, TENSORS), question) == "true,0,0"


def test_in_a_browser_dark_and_light_look_different(tmp_path: Path) -> None:
    file = page(tmp_path, TENSORS)
    light, dark = (picture(tmp_path, file, f"--blink-settings=preferredColorScheme={n}") for n in (1, 0))
    assert min(len(light), len(dark)) > 20_000
    assert light != dark


def test_in_a_browser_maps_that_are_closed_are_printed(tmp_path: Path) -> None:
    file = page(tmp_path, {f"w{at}{'x' * at}": f"[{8 * (at + 1)}/fsdp, 16/tp]" for at in range(4)})
    sheet = tmp_path / "run.pdf"
    run(tmp_path, file, f"--print-to-pdf={sheet}")
    assert len(re.findall(rb"/Type\s*/Page\b", sheet.read_bytes())) >= 3

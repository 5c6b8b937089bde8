"""A run as one HTML page: what stands in it, what it lets nobody do, and what a real browser makes of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from shardviz.cli import main
from shardviz.dump.read import read_files
from shardviz.dump.records.step import CollectiveRecord, StageRecord
from shardviz.dump.records.tensors import Body, TensorRecord
from shardviz.dump.write import write_rank
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.html.parts import script_text
from tests.dumps import Made, make_dump
from tests.lanes import at_night, nightly
from tests.picture.browser import asked, dom, picture, run

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    files = make_dump(tmp_path / "run.shardviz", parse_mesh(mesh), tensors)
    assert main(["show", str(files), "-o", str(tmp_path / "run.html")]) == 0
    return tmp_path / "run.html"


class Outline(HTMLParser):
    """The tags of a page, with those that are open at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
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


def test_findings_come_first_with_their_picture_and_are_reported_once_for_all_layers(tmp_path: Path) -> None:
    text = page(tmp_path, TENSORS).read_text(encoding="utf-8")
    titles = ["Findings", "Tensors", "Mesh", "Memory", "Communication"]
    assert re.findall("<h2[^>]*>(.*?)</h2>", text) == titles
    assert text.count("<article") == 1
    article = text[text.index("<article") : text.index("</article>")]
    assert "<code>layers.[0-1].wq</code><a" in article
    assert "</h3><p>2 tensors alike: " in article
    assert "✗ 4</text>" in article
    tensors, mesh = text.index('id="tensors"'), text.index('id="mesh"')
    assert "✗ 4</text>" not in text[tensors:mesh]
    assert "✗ 4</text>" in text[mesh:], "the ranks that a finding names are marked"
    assert "findings: ▁ 0 on rank" in text[mesh:], "and how many name each"


def test_every_tensor_has_a_line_that_opens_on_its_map(tmp_path: Path) -> None:
    found = outline(page(tmp_path, TENSORS))
    anchors = [one["id"] for one in found.all("details") if "id" in one]
    links = [str(one["href"]) for one in found.all("a")]
    assert anchors == ["tensor-layers.0.wq", "tensor-layers.0.wo", "tensor-norm", "tensor-conv"]
    both = {"#tensor-layers.0.wq", "#finding-misordered-layers.0.wq"}
    assert both <= set(links), "a finding and its line lead to each other"
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links if not link.startswith("https://github.com/")} <= set(ids)


def test_of_the_maps_only_those_that_are_wrong_are_open(tmp_path: Path) -> None:
    found = outline(page(tmp_path, TENSORS))
    assert ["open" in one for one in found.all("details") if "id" in one] == [True, False, False, False]


def tree(text: str) -> list[tuple[int, str]]:
    """Each line of the module tree, with the number of modules that it stands in."""
    inner = text[text.index('<ul class="tree">') : text.index('<section id="mesh"')]
    lines, depth = [], -1
    for tag, name in re.findall(r'(<ul|</ul)|<span class="name">([^<]*)', inner):
        depth += {"<ul": 1, "</ul": -1, "": 0}[tag]
        if not tag:
            lines.append((depth, name))
    return lines


def test_tensors_stand_in_the_tree_of_their_modules(tmp_path: Path) -> None:
    text = page(tmp_path, TENSORS).read_text(encoding="utf-8")
    assert tree(text) == [(0, "layers.[0-1]"), (1, "wq"), (1, "wo"), (0, "norm"), (0, "conv")]
    assert (
        '<span aria-hidden="true">✗</span><span class="unseen">finding</span></span><span class="name">layers' in text
    )


def test_a_module_in_a_large_tree_is_open_only_where_something_is_wrong(tmp_path: Path) -> None:
    wrong = Made("[12/fsdp/tp]", "[12/tp/fsdp]")
    names = {f"{letter}{letter}.x{at}.{part}": "[4/tp]" for letter in "ab" for at in range(12) for part in ("v", "w")}
    found = outline(page(tmp_path, {**names, "bb.x3.w": wrong}))
    modules = [one for one in found.all("details") if "class" not in one]
    assert [at for at, one in enumerate(modules) if "open" in one] == [13, 17], "b, and x3 in it"


def test_names_that_no_model_has_make_a_tree_all_the_same(tmp_path: Path) -> None:
    names = [".".join("a" * 3000), ".".join("a" * 2999), "..", "", ".", "a", "a.", "a.b", "b" * 5000]
    names += [".".join(f"m{at}" for at in range(depth)) for depth in range(2, 60)]
    found = tree(page(tmp_path, dict.fromkeys(names, "[4/tp]")).read_text(encoding="utf-8"))
    assert max(depth for depth, _ in found) <= 12
    assert len(found) >= len(names)


def test_the_page_fetches_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    file = page(tmp_path, TENSORS)
    found = outline(file)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in found.tags}
    assert found.all("script") == [{}], "one, from within the page"
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    (policy,) = [one["content"] for one in found.all("meta") if "http-equiv" in one]
    assert policy is not None
    kinds = dict(kind.split(" ", 1) for kind in policy.split("; "))
    assert kinds.pop("script-src").startswith("'sha256-")
    assert kinds.pop("style-src") == "'unsafe-inline'"
    assert kinds == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    addresses = set(re.findall(r"\w+://[^\"' ]+", file.read_text(encoding="utf-8")))
    issues = {f"https://github.com/pytorch/pytorch/issues/{number}" for number in (129229, 129206, 130760)}
    assert addresses == {"http://www.w3.org/2000/svg", *issues}


def test_a_hostile_name_is_only_text_wherever_it_stands(tmp_path: Path) -> None:
    wrong = Made("[12/fsdp/tp]", "[12/tp/fsdp]")
    file = page(tmp_path, {HOSTILE: wrong, "b" + HOSTILE: "[4/tp]"})
    outline(file)
    text = file.read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script") == 1
    assert text.partition("<script>")[2].startswith(script_text())
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


def test_what_else_would_explain_a_finding_stands_below_it_not_in_its_sentence(tmp_path: Path) -> None:
    text = page(tmp_path, {"w": Made("[8/fsdp/tp]", "[8/tp/fsdp]")}, "fsdp=2,tp=2").read_text(encoding="utf-8")
    assert "<dt>or</dt><dd>rank i holds the shard of rank" in text
    assert "this fits as well" not in text[: text.index("<dl>")]


def test_a_clean_run_says_so(tmp_path: Path) -> None:
    text = page(tmp_path, {"w": "[16/tp/fsdp, 8]"}).read_text(encoding="utf-8")
    assert "✓ the tensor is in order on 8 ranks" in text
    assert "<p>None.</p>" in text


@nightly
def test_723_tensors_on_1024_ranks_stay_under_5_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    from bench_check import make

    make(tmp_path / "llama.shardviz")
    assert main(["show", str(tmp_path / "llama.shardviz"), "-o", str(tmp_path / "llama.html")]) == 0
    text = (tmp_path / "llama.html").read_text(encoding="utf-8")
    assert "all 723 tensors are in order on 1,024 ranks" in text
    maps = [one for one in outline(tmp_path / "llama.html").all("details") if "id" in one]
    assert len(maps) == 12, "one map for each folded tensor"
    assert "263 GiB" in text
    assert len(text.encode()) < 1_000_000


def test_maps_beyond_the_pages_room_are_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardviz.picture.html.page.MOST_BYTES", 1)
    text = page(tmp_path, TENSORS).read_text(encoding="utf-8")
    assert text.count("Not drawn: the page is full; shardviz show draws it") == 3
    assert "✗ 4</text>" in text, "what is wrong is drawn first"


@pytest.fixture
def stepped(tmp_path: Path) -> Path:
    """The page of two stages of a pipeline that ran two micro-batches, with gradients and Adam."""
    files = make_dump(
        tmp_path / "run.shardviz", parse_mesh("pp=2"), {"layers.0.w": "[4/pp, 6]", "layers.1.w": "[4/pp, 6]"}
    )
    for number, rank in read_files(files).ranks.items():
        passes = tuple(StageRecord(number, at, backward) for backward in (False, True) for at in (0, 1))
        sent = tuple(CollectiveRecord("all_reduce", ("pp",), 2, f"layers.{at}", count=3, bytes=20_000) for at in (0, 1))
        whole = [Body(role, "step", (4, 6), (2, 6), "float64") for role in ("grad", "optim")]
        named = [TensorRecord("layers.", 1, ((0, 2),), ".w"), TensorRecord("layers.", 2, ((0, 2),), ".w.exp_avg")]
        more = {"bodies": (*rank.bodies, *whole), "tensors": (*rank.tensors, *named)}
        write_rank(files, replace(rank, schedule=passes, collectives=sent, **more))
    assert main(["show", str(files), "-o", str(tmp_path / "run.html")]) == 0
    return tmp_path / "run.html"


def rows(text: str, anchor: str) -> list[str]:
    """The rows of a section's tables, as words."""
    part = text[text.index(f'<section id="{anchor}"') :].partition("</section>")[0]
    found = re.findall("<tr[^>]*>(.*?)</tr>", part)
    return [" | ".join(filter(None, re.split(r"(?:<[^>]*>)+", row))) for row in found]


def test_memory_is_reported_by_rank_by_role_by_scheme_and_by_tensor(stepped: Path) -> None:
    text = stepped.read_text(encoding="utf-8")
    assert rows(text, "memory") == [
        "On | param | grad | optim | together",
        "ranks 0-1 | 96 B | 96 B | 96 B | 288 B",
        "unsharded | 192 B | 192 B | 192 B | 576 B",
        "Scheme | Formula | Per rank",
        "DDP | P + P + 2P | 768 B",
        "ZeRO 1 | P + P + 2P/N | 576 B",
        "ZeRO 2 | P + P/N + 2P/N | 480 B",
        "ZeRO 3, FSDP | P/N + P/N + 2P/N | 384 B",
        "this run | the fullest rank | 288 B",
        "Tensor | Role | Per rank | Unsharded",
        "layers.[0-1].w (each of 2 tensors) | param | 48 B | 96 B",
        "layers.[0-1].w (each of 2 tensors) | grad | 48 B | 96 B",
        "layers.[0-1].w.exp_avg (each of 2 tensors) | optim | 48 B | 96 B",
    ]
    assert 'title="grad: 96 bytes"' in text


def test_collectives_of_identical_layers_share_a_line(stepped: Path) -> None:
    assert rows(stepped.read_text(encoding="utf-8"), "comms")[1:] == [
        "along pp | 39.1 KiB",
        "Collective | Group | Module | Pass | Times | Bytes | Received | Group of | On ranks",
        "all_reduce | along pp | layers.[0-1] | forward | 3 | 19.5 KiB | 19.5 KiB | 2 | 2",
    ]


def test_a_schedule_is_drawn_with_its_bubble(stepped: Path) -> None:
    text = stepped.read_text(encoding="utf-8")
    part = text[text.index('<section id="schedule"') :]
    assert re.findall(">([aA][0-9])</text>", part) == ["a0", "a1", "A0", "A1"] * 2
    assert "rank 1, stage 1: backward of micro-batch 0, from 3" in part
    assert "bubble 33.3% of the time" in part


def test_a_run_without_a_step_says_why_there_is_no_traffic(tmp_path: Path) -> None:
    text = page(tmp_path, TENSORS).read_text(encoding="utf-8")
    assert "no step was captured: only a probe with a batch() runs a step" in text
    assert 'id="schedule"' not in text


def test_a_schedule_that_cannot_be_says_so_and_the_rest_stands(stepped: Path) -> None:
    files = stepped.with_name("run.shardviz")
    (files / "rank_00000.json").unlink()
    assert main(["show", str(files), "-o", str(stepped)]) == 0
    assert "rank 1 ran stage 1 on micro-batch 0 before its inputs" in stepped.read_text(encoding="utf-8")


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


LARGE = {"w": Made("[128256/fsdp/tp, 8192]", "[128256/tp/fsdp, 8192]"), "x": "[128256/fsdp, 8192/tp]"}


@pytest.mark.parametrize(("tensors", "mesh"), [(TENSORS, MESH), *at_night([(LARGE, "fsdp=128,tp=8")])])
def test_in_a_browser_every_word_lies_within_its_box_and_its_picture(tmp_path: Path, tensors: Any, mesh: str) -> None:
    answer = asked(tmp_path, page(tmp_path, tensors, mesh), OUTSIDE)
    count, _, outside = answer.strip("[]").partition(",")
    assert int(count) > 50
    assert outside.strip("[]") == ""


@nightly
def test_in_a_browser_every_word_of_a_schedule_lies_within_it(tmp_path: Path, stepped: Path) -> None:
    assert asked(tmp_path, stepped, OUTSIDE).endswith(",[]]")


def test_in_a_browser_a_pointer_lights_up_what_a_rank_has(tmp_path: Path) -> None:
    lit = "[...document.styleSheets[0].cssRules].filter(rule => /sv-r[0-9]+:hover/.test(rule.selectorText)).length"
    parts = "document.querySelectorAll('figure .sv g.sv-r3 > rect.sv-b').length"
    count, drawn = asked(tmp_path, page(tmp_path, TENSORS), f"[{lit}, {parts}].join()").split(",")
    assert int(count) == 8
    assert int(drawn) > 4


def test_in_a_browser_a_link_to_a_tensor_opens_the_modules_around_it(tmp_path: Path) -> None:
    names = {f"{letter}.x{at}.{part}": "[4/tp]" for letter in "ab" for at in range(12) for part in ("v", "w")}
    seen = "document.getElementById('tensor-b.x3.v').checkVisibility({contentVisibilityAuto: true})"
    question = f"'waiting'; const before = {seen}; location.hash = 'tensor-b.x3.v';"
    question += f"setTimeout(() => {{ document.title = [before, {seen}].join() }}, 100)"
    assert asked(tmp_path, page(tmp_path, names), question, "--virtual-time-budget=2000") == "false,true"


def test_in_a_browser_all_that_opens_or_scrolls_is_reached_by_keyboard(tmp_path: Path, stepped: Path) -> None:
    reached = """JSON.stringify((() => {
      document.querySelectorAll("details").forEach(one => { one.open = true });
      const missed = [];
      document.querySelectorAll("summary, figure, .wide, nav a, .skip").forEach(one => {
        one.focus();
        if (document.activeElement !== one) missed.push(one.outerHTML);
      });
      return [document.querySelectorAll("summary").length, missed];
    })())"""
    assert asked(tmp_path, stepped, reached) == "[3,[]]"


def test_in_a_browser_a_hostile_name_makes_no_element(tmp_path: Path) -> None:
    seen = dom(page(tmp_path, {HOSTILE: "[4/tp]"}))
    assert re.findall("<script>.{10}", seen, re.DOTALL) == ["<script>// Search,"]
    assert "<img" not in seen
    assert "alert(2)" in seen


def test_in_a_browser_nothing_is_fetched_and_the_page_fits_its_window(tmp_path: Path) -> None:
    loaded = "performance.getEntriesByType('resource').length"
    question = f"[document.documentElement.scrollWidth <= innerWidth, document.images.length, {loaded}].join()"
    assert asked(tmp_path, page(tmp_path, TENSORS), question) == "true,0,0"


@nightly
def test_in_a_browser_dark_and_light_look_different(tmp_path: Path) -> None:
    file = page(tmp_path, TENSORS)
    light, dark = (picture(tmp_path, file, f"--blink-settings=preferredColorScheme={n}") for n in (1, 0))
    assert min(len(light), len(dark)) > 20_000
    assert light != dark


@nightly
def test_in_a_browser_maps_that_are_closed_are_printed(tmp_path: Path) -> None:
    file = page(tmp_path, {f"w{at}{'x' * at}": f"[{8 * (at + 1)}/fsdp, 16/tp]" for at in range(4)})
    sheet = tmp_path / "run.pdf"
    run(file, f"--print-to-pdf={sheet}")
    assert len(re.findall(rb"/Type\s*/Page\b", sheet.read_bytes())) >= 3

"""The script of a page in a real browser: it searches, filters, sorts and copies, and is all that runs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.picture.html.parts import Anchors, address, in_natural_order, names_of, ranks_cell, with_code
from shardviz.text import Fold, fold
from tests.dumps import Made
from tests.lanes import nightly
from tests.picture.browser import asked, dom
from tests.picture.test_html import HOSTILE, page

if TYPE_CHECKING:
    from pathlib import Path

WRONG = Made("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")
TENSORS: dict[str, Made | str] = {
    "embed": "[64/tp, 12]",
    **{f"layers.{at}.wq": "[12/tp/fsdp, 12]" if at != 3 else WRONG for at in range(12)},
    **{f"layers.{at}.wo": "[12/fsdp, 12/tp]" for at in range(12)},
    "head": "[12]",
}

ASK = """(() => {
  const seen = () => [...document.querySelectorAll("details.leaf")].filter(one => one.checkVisibility())
    .map(one => one.dataset.names);
  const set = (id, value, event) => {
    const field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event(event));
  };
  const search = text => { set("search", text, "input"); return seen(); };
  const order = text => { set("order", text, "change"); return seen(); };
  const show = text => { set("verdict", text, "change"); return seen(); };
  const articles = () => [...document.querySelectorAll("article")].filter(one => !one.hidden).length;
  return JSON.stringify(%s);
})()"""


def answer(tmp_path: Path, question: str, tensors: dict[str, Made | str] | None = None) -> Any:
    return json.loads(asked(tmp_path, page(tmp_path, tensors or TENSORS), ASK % question))


MODEL = ["embed", "layers.[0-2,4-11].wq", "layers.3.wq", "layers.[0-11].wo", "head"]


def test_in_a_browser_a_search_finds_one_layer_of_many_and_all_comes_back(tmp_path: Path) -> None:
    found = answer(
        tmp_path,
        """({
          layer: search("layers.7"), one: search("ers.3.wq"), more: search("WO 12/TP"), none: search("layers.12"),
          verdict: search("misordered"), articles: articles(), count: document.getElementById("count").textContent,
          back: search(""), empty: document.getElementById("count").textContent,
        })""",
    )
    assert found["layer"] == ["layers.[0-2,4-11].wq", "layers.[0-11].wo"]
    assert found["one"] == ["layers.3.wq"]
    assert found["more"] == ["layers.[0-11].wo"]
    assert found["none"] == found["verdict"] == []
    assert (found["articles"], found["count"]) == (1, "0 of 26 tensors, 1 of 1 findings")
    assert (found["back"], found["empty"]) == (MODEL, "")


def test_in_a_browser_lines_are_filtered_by_verdict_and_sorted_every_way(tmp_path: Path) -> None:
    found = answer(
        tmp_path,
        """({
          wrong: show("error"), right: show("good"), articles: articles(), all: show(""), largest: order("largest"),
          worst: order("worst"), name: order("name"), model: order("model"),
        })""",
    )
    assert found["wrong"] == ["layers.3.wq"]
    assert found["right"] == [name for name in MODEL if name != "layers.3.wq"]
    assert found["articles"] == 0
    assert found["largest"] == [*(MODEL[at] for at in (3, 1, 2)), "embed", "head"]
    assert found["worst"][0] == "layers.3.wq"
    assert found["name"] == ["embed", "head", *sorted(found["name"][2:], key=found["name"].index)]
    assert found["all"] == found["model"] == MODEL


@nightly
def test_in_a_browser_a_link_to_any_layer_opens_its_line_whatever_was_searched(tmp_path: Path) -> None:
    question = """'waiting';
      document.getElementById("search").value = "embed";
      document.getElementById("search").dispatchEvent(new Event("input"));
      location.hash = "tensor-layers.7.wo";
      setTimeout(() => {
        const one = document.querySelector("[data-names='layers.[0-11].wo']");
        document.title = [one.open, one.checkVisibility()].join();
      }, 100)"""
    assert asked(tmp_path, page(tmp_path, TENSORS), question, "--virtual-time-budget=2000") == "true,true"


def test_in_a_browser_a_fix_is_copied_as_it_is_and_tables_are_sorted(tmp_path: Path) -> None:
    question = """'waiting'; (async () => {
      let copied = "";
      navigator.clipboard.writeText = async text => { copied = text; };
      document.querySelector(".copy").click();
      const found = document.querySelector("#memory details table");
      const rows = () => [...found.tBodies[0].rows].map(row => row.cells[0].textContent);
      const head = [...document.querySelectorAll("#memory details th button")][3];
      const before = rows();
      head.click();
      const falling = rows();
      head.click();
      await new Promise(done => setTimeout(done, 50));
      document.title = JSON.stringify([copied, document.querySelector(".copy").textContent, before, falling, rows()]);
    })()"""
    found = asked(tmp_path, page(tmp_path, TENSORS), question, "--virtual-time-budget=1000")
    copied, button, before, falling, rising = json.loads(found)
    assert copied == (
        "upgrade torch to 2.5 or newer, or label the local tensors by (_StridedShard(0, split_factor=4), Shard(0))"
    )
    assert button == "Copied"
    assert (falling[0], falling[-1]) == ("embed", "head")
    assert (rising[0], rising[-1]) == ("head", "embed")
    assert sorted(rising) == sorted(falling) == sorted(before)


def test_in_a_browser_the_script_runs_under_the_pages_policy_and_no_other_does(tmp_path: Path) -> None:
    file = page(tmp_path, {**TENSORS, HOSTILE: WRONG})
    smuggled = "<img src=x onerror=\"document.title='smuggled'\"><script>document.title = 'smuggled'</script>"
    file.write_text(file.read_text(encoding="utf-8").replace("</main>", f"{smuggled}</main>"), encoding="utf-8")
    seen = dom(file)
    (tools,) = re.findall('<div id="tools"[^>]*>', seen)
    assert "hidden" not in tools
    assert "<title>shardviz: run.shardviz</title>" in seen


@nightly
def test_in_a_browser_without_scripts_all_is_there_and_no_tool_that_does_nothing(tmp_path: Path) -> None:
    file = page(tmp_path, TENSORS)
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub("<script>.*</script>", "", text, flags=re.DOTALL), encoding="utf-8")
    seen = """JSON.stringify([
      document.getElementById('tools').checkVisibility(), document.querySelectorAll('button').length,
      [...document.querySelectorAll('details.leaf')].every(one => one.checkVisibility())])"""
    assert json.loads(asked(tmp_path, file, seen)) == [False, 0, True]


@nightly
def test_in_a_browser_the_page_fits_a_phone(tmp_path: Path) -> None:
    names = {f"model.{'very_' * 12}long.layers.{at}.name": "[12/tp/fsdp, 12]" for at in range(3)}
    file = page(tmp_path, {**TENSORS, **names, "x": Made("[64/fsdp/tp, 64]", "[64/tp/fsdp, 64]")})
    inner = tmp_path / "inner.html"
    told = """<script>document.querySelectorAll("details").forEach(one => { one.open = true });
      parent.postMessage([innerWidth, document.documentElement.scrollWidth].join(), "*")</script></body>"""
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text(encoding="utf-8"))
    inner.write_text(text.replace("</body>", told), encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<title>waiting</title><script>onmessage = event => { document.title = event.data }</script>"
        f'<iframe src="{inner.as_uri()}" style="width:400px;border:0"></iframe>',
        encoding="utf-8",
    )
    seen = dom(outer, "--virtual-time-budget=2000")
    assert "<title>400,400</title>" in seen


def test_in_a_browser_what_is_wider_than_the_window_says_that_it_scrolls_until_its_end(tmp_path: Path) -> None:
    seen = """(() => {
      const boxes = [...document.querySelectorAll("article figure, section > .wide, section > figure")];
      const look = at => boxes.map(one => {
        one.scrollLeft = at;
        one.dispatchEvent(new Event("scroll"));
        return [one.scrollWidth > one.clientWidth + 1, getComputedStyle(one, "::before").content.includes("scroll"),
          getComputedStyle(one).maskImage !== "none"];
      });
      return JSON.stringify([look(0), look(1e6)]);
    })()"""
    first, last = json.loads(asked(tmp_path, page(tmp_path, TENSORS), seen, "--window-size=500,900"))
    assert {is_wide for is_wide, *_ in first} == {True, False}, "some fit and some do not"
    assert all(is_wide == has_hint == fades for is_wide, has_hint, fades in first)
    assert all(is_wide == has_hint and not fades for is_wide, has_hint, fades in last)


@nightly
def test_in_a_browser_a_hint_is_there_before_anyone_scrolls(tmp_path: Path) -> None:
    file = page(tmp_path, TENSORS)
    assert 'data-more=""' in dom(file, "--window-size=500,900")
    assert 'data-more=""' not in dom(file, "--window-size=2000,900")


def test_names_are_searched_as_ranges_whatever_the_page_shows() -> None:
    (folded, _), *_ = fold((f"layers.{at}.w", 0) for at in (0, 1, 2, 5))
    assert names_of(folded) == "layers.[0-2,5-5].w"
    assert names_of(Fold("head")) == "head"
    assert names_of(fold([("a.3.w", 0)])[0][0]) == "a.3.w"


def test_folds_rise_and_the_layers_of_a_weight_are_together() -> None:
    alphabetical = [f"h.{at}.{part}" for at in (0, 1, 10, 11, 2, 3) for part in ("wq", "wo")]
    folded = in_natural_order(fold((name, name == "h.2.wq") for name in alphabetical))
    assert [str(names) for names, _ in folded] == ["h.[0-1,3,10-11].wq", "h.2.wq", "h.[0-3,10-11].wo"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "label the tensors by (_StridedShard(0, split_factor=4), Shard(0)) (or upgrade)",
            ["(_StridedShard(0, split_factor=4), Shard(0))"],
        ),
        (
            "call dist.all_reduce(grad, group=mesh['tp'].get_group()) first",
            ["dist.all_reduce(grad, group=mesh['tp'].get_group())"],
        ),
        ("split layers.[0-3].up.weight by [*/tp, 4], e.g. later", ["layers.[0-3].up.weight", "[*/tp, 4]"]),
        ("set sync_module_states=True", ["sync_module_states=True"]),
        ("load the checkpoint again.", []),
        ("f" + "(a" * 600, []),
    ],
)
def test_the_code_in_a_fix_is_set_as_code(text: str, wanted: list[str]) -> None:
    from html import unescape

    written = with_code(text)
    assert [unescape(one) for one in re.findall("<code>(.*?)</code>", written)] == wanted
    assert unescape(re.sub("</?code>", "", written)) == text


def test_code_of_strangers_is_text() -> None:
    assert "<img" not in with_code("call x(<img src=x onerror=alert(1)>) and <script>a_b</script>")


def test_an_anchor_is_a_name_that_stays_and_is_given_once() -> None:
    anchors = Anchors()
    assert anchors.of("tensor", "layers.0.wq") == "tensor-layers.0.wq"
    assert anchors.of("finding", "misordered", "layers.0.wq") == "finding-misordered-layers.0.wq"
    assert anchors.of("finding", "misordered", "layers.0.wq") == "finding-misordered-layers.0.wq-2"
    odd = [anchors.of("tensor", name) for name in ('a"b', "a<b", "a" * 500, "a" * 501, HOSTILE, "")]
    assert len(set(odd)) == len(odd)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", one) for one in odd)
    assert Anchors().of("tensor", 'a"b') == odd[0]


def test_a_long_list_of_ranks_is_cut_with_its_number() -> None:
    assert ranks_cell([0, 1, 2]) == "0-2"
    assert ranks_cell(range(0, 1024, 8)) == "0…1016 step 8"
    assert ranks_cell(rank * rank for rank in range(40)).endswith("… (40 in all)")


def test_every_reference_leads_somewhere(request: pytest.FixtureRequest) -> None:
    rooms = request.config.rootpath / "shardviz"
    sources = "".join(file.read_text(encoding="utf-8") for file in rooms.rglob("*.py") if "html" not in file.parts)
    known = set(re.findall(r'"([\w./-]+#[0-9]+)"', sources))
    assert len(known) > 20
    assert [one for one in sorted(known) if not address(one)] == []
    assert address("pytorch#129229") == "https://github.com/pytorch/pytorch/issues/129229"
    assert address("ROCm/Megatron-LM#63") == "https://github.com/ROCm/Megatron-LM/issues/63"
    assert address("javascript:alert(1)#1") == address("nobody#1") == ""

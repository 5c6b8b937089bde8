"""What a notebook shows of a loaded run: a real kernel's pictures, texts, completions and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.layout.mesh import parse_mesh
from tests.dumps import Made, make_dump
from tests.kernel import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

MESH = parse_mesh("fsdp=2,tp=2")
SWAPPED = Made("[8/fsdp/tp, 3]", "[8/tp/fsdp, 3]")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    make_dump(folder / "d.shardviz", MESH, {"layers.0.up": SWAPPED, "layers.0.down": "[8/tp]"})
    with Kernel(folder) as started:
        started.run('import shardviz\nrun = shardviz.load("d.shardviz")')
        yield started


def test_a_run_is_its_page_and_at_a_prompt_its_tensors(kernel: Kernel) -> None:
    (shown,) = kernel.run("run").shown
    assert shown["text/html"].startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert shown["text/plain"].splitlines() == [
        "Run d.shardviz: 2 tensors on 4 ranks, mesh (fsdp=2, tp=2)",
        "  tensor         layout                 per rank",
        "  layers.0.up    float32[8/fsdp/tp, 3]  [2, 3]",
        "  layers.0.down  float32[8/tp]          [4]",
    ]


def test_a_tensor_is_a_map_of_its_shards(kernel: Kernel) -> None:
    (shown,) = kernel.run('run["up"]').shown
    assert shown["text/html"].startswith("<svg")
    assert "layers.0.up  float32 8 × 3 on mesh (fsdp=2, tp=2)" in shown["text/plain"]


def test_a_report_and_a_finding_are_the_page_s_articles(kernel: Kernel) -> None:
    for code in ("run.check()", "run.check().findings[0]"):
        (shown,) = kernel.run(code).shown
        assert shown["text/html"].count("&lt;article") == 1
        assert "&lt;svg" in shown["text/html"]
        assert "rank by rank" not in shown["text/html"]  # a link to what only the whole page has
        assert "✗ misordered  layers.0.up  ranks 1-2" in shown["text/plain"]


def test_in_a_list_each_is_a_line(kernel: Kernel) -> None:
    (shown,) = kernel.run("run.check().findings, [run]").shown
    assert len(shown["text/plain"].splitlines()) == 2
    assert "[<Run d.shardviz: 2 tensors on 4 ranks, mesh (fsdp=2, tp=2)>]" in shown["text/plain"]


@pytest.mark.parametrize("what", ["run", 'run["up"]', "run.check()", "run.check().findings[0]"])
def test_show_displays_any_of_them(kernel: Kernel, what: str) -> None:
    (shown,) = kernel.run(f"shardviz.show({what})").shown
    assert {"text/html", "image/svg+xml"} & shown.keys()
    assert shown["text/plain"]


def test_show_draws_a_tensor_of_a_run_by_name(kernel: Kernel) -> None:
    (shown,) = kernel.run('shardviz.show(run, "up")').shown
    assert shown["image/svg+xml"] == kernel.run('run["up"]').shown[0]["text/html"]
    assert kernel.run('shardviz.show(run.check(), "up")').error[0] == "ShardvizError"


def test_tab_completes_names_between_the_brackets(kernel: Kernel) -> None:
    assert any("layers.0.up" in match for match in kernel.completed('run["layers.0.u'))
    assert any("layers.0.down" in match for match in kernel.completed('run.tensors["'))


def test_an_unknown_name_is_one_clear_error(kernel: Kernel) -> None:
    name, words = kernel.run('run["layers.0.upp"]').error
    assert name == "UnknownTensorError"
    assert words == "the dump has no tensor 'layers.0.upp'\nHint: did you mean layers.0.up?"

"""`shardviz explain KIND|CAUSE` prints a page of the catalogue, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from shardviz import probe_files
from shardviz.cli import main
from shardviz.explain.finding import Kind
from shardviz.explain.kinds import KINDS
from shardviz.explain.pages import CATALOGUE, is_name, page_of, table

REFERENCE = Path(__file__).parents[2] / "demos" / "reference" / "README.md"


def test_every_kind_has_a_line_and_probes_that_exist():
    assert set(KINDS) == set(get_args(Kind))
    for page in KINDS.values():
        for probe in page.probes:
            assert probe_files.find(f"bugs/{probe}").path.is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_a_kind_lists_its_causes(kind, capsys):
    assert main(["explain", kind]) == 0
    out = capsys.readouterr().out
    assert out.startswith(kind)
    causes = [name for name, cause in CATALOGUE.items() if kind in cause.kinds]
    assert all(f"{name}\n    {CATALOGUE[name].__doc__[:9]}" in out for name in causes)
    assert len(out.splitlines()) > 3


def test_the_table_of_the_reference_is_printed_from_the_kinds():
    text = "\n".join(table())
    if os.environ.get("SHARDVIZ_GOLDEN") == "write":
        page = REFERENCE.read_text()
        start, end = page.index("| kind |"), page.index("\n\n", page.index("| kind |"))
        REFERENCE.write_text(page[:start] + text + page[end:])
    assert text in REFERENCE.read_text()


def test_the_page_of_every_cause_has_its_kinds_and_no_field_left_open(capsys):
    for name in CATALOGUE:
        page = page_of(name)
        assert page.title
        assert not any("{" in text for title, text in page.rows if title == "cause")
    for name in [*CATALOGUE][::20]:
        assert main(["explain", name]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["float16"], ["causes with that word: ", "overflow-in-float16"]),
        (["misorderd"], ["'misorderd'", "did you mean misordered?"]),
        (["Wrong_valeu"], ["'wrong-valeu'", "did you mean wrong-value?"]),
        (["qqqq"], ["'qqqq'", "the kinds are misordered"]),
        (["misordered", "--mesh", "tp=2"], ["'misordered'", "mesh", "leave it out"]),
        (["[12/tp, 12]"], ["--mesh tp=2"]),
        (["[12/tp/dp, 12]", "--mesh", "2,4"], ["names axes, and --mesh 2,4 doesn't", "--mesh tp=2,dp=2"]),
        (["order 0: 1 1"], ["'1 1' does not name every block from 0 once", "order 0: 2 0 3 1"]),
        (["pytorch#1"], ["no cause refers to pytorch#1", "a kind of finding or a cause"]),
    ],
)
def test_what_cannot_be_explained_gets_one_line(args, words, capsys):
    assert main(["explain", *args]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(word in "\n".join(lines) for word in words)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("plain", "not a DTensor"),
        ("output", "training step"),
        ("not-checked", "neither right nor wrong"),
        ("not-compared", "activations only show where a wrong"),
        ("=tp", "equal copies"),
        ("+tp", "their sum"),
        ("+dp_2:avg", "their mean"),
        ("pytorch#129229", "cut-inner-first"),
        ("held", "by its id or its value"),
        ("order 1: view(3, 4, 2).transpose(0, 1)", "w.unflatten(1, (3, 4, 2)).transpose(1, 2).flatten(1, 3)"),
        ("order 0: 2 0 1", "cut into 3 equal blocks"),
        ("[*/tp] order 0: 1 0", "come in the order 1, 0"),
    ],
)
def test_what_stands_in_a_finding_can_be_explained(word, text, capsys):
    assert main(["explain", word]) == 0
    out = capsys.readouterr().out
    assert out.startswith(word)
    assert text in out


def test_a_layout_is_no_name():
    assert is_name("same-shard")
    assert not any(map(is_name, ("[12/tp, 12]", "(Shard(0))", "12", "", "Shard(0)")))


def test_a_page_is_printed_without_torch():
    code = (
        "import sys; from shardviz.cli import main; main(['explain', 'misordered']); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0

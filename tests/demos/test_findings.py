"""The reference has every kind of finding in a table, and each probe that it names gives the kind beside it."""

import re
from pathlib import Path
from typing import get_args

from shardviz.explain.finding import Kind
from shardviz.probe_files import shipped

REFERENCE = Path(__file__).parents[2] / "demos" / "reference"
PAGE = (REFERENCE / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?) \|.*\| (.*) \|$", PAGE.partition("## What it finds")[2].partition("\n## ")[0], re.M)


def test_every_kind_has_a_row_that_says_where_it_is_seen():
    kinds = [kind for head, _ in ROWS for kind in re.findall("`(.*?)`", head)]
    assert sorted(kinds) == sorted(get_args(Kind))
    assert all(seen for _, seen in ROWS)


def test_a_probe_gives_the_kinds_that_it_stands_beside():
    kinds_of = {recipe.name.rpartition("/")[2]: set(recipe.kinds) for recipe in shipped() if recipe.kinds}
    beside = {}
    for head, seen in ROWS:
        for name in re.findall(r"\[(\w+)\]\(../../probes/", seen):
            beside.setdefault(name, set()).update(re.findall("`(.*?)`", head))
    assert beside == kinds_of


def test_what_else_shows_a_kind_is_there():
    links = [link for _, seen in ROWS for link in re.findall(r"\]\((../../[^)]*)\)", seen)]
    assert len(links) > 20
    assert [link for link in links if not (REFERENCE / link).is_file()] == []

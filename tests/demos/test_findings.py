"""The reference has every kind of finding in a table, and each probe that it names gives the kind beside it."""

import re
from pathlib import Path
from typing import get_args

from shardviz.explain.finding import Kind
from shardviz.probe_files import shipped

PAGE = (Path(__file__).parents[2] / "demos" / "reference" / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?) \|.*\| (.*) \|$", PAGE.partition("## What it finds")[2].partition("\n## ")[0], re.M)


def test_every_kind_has_a_row_that_says_where_it_is_seen():
    kinds = [kind for head, _ in ROWS for kind in re.findall("`(.*?)`", head)]
    assert sorted(kinds) == sorted(get_args(Kind))
    assert all(seen for _, seen in ROWS)


def test_a_probe_gives_the_kind_that_it_stands_beside():
    kinds_of = {recipe.name.rpartition("/")[2]: recipe.kinds for recipe in shipped() if recipe.kinds}
    for head, seen in ROWS:
        for name in re.findall(r"\[(\w+)\]\(../../probes/", seen):
            assert set(kinds_of.pop(name)) <= set(re.findall("`(.*?)`", head)), name
    assert not kinds_of, "not in the table"

"""Every cause has a page and words that can be filled in, and findings are made in one place."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from shardviz.explain.finding import Kind
from shardviz.explain.pages import CATALOGUE
from shardviz.explain.templates import each_of, fields_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("shardviz", "tui") for path in (ROOT / room).rglob("*.py"))


def test_every_cause_has_a_page():
    for cause in CATALOGUE.values():
        first, *rest = (cause.__doc__ or "").strip().splitlines()
        assert first.endswith("."), first
        assert len(first) <= 90, first
        assert any(line.strip() for line in rest), f"{cause.name}: the page does not say why nothing raises"


def test_every_cause_has_kinds_and_words_with_its_own_fields():
    for name, cause in CATALOGUE.items():
        assert set(cause.kinds) <= set(get_args(Kind)), name
        assert cause.kinds, f"a finding needs a kind: {name}"
        known = {field.name for field in fields(cause)} | {key for key in dir(cause) if not key.startswith("_")}
        causes, fixes = each_of(cause.why), each_of(cause.how)
        assert len(fixes) <= len(causes) <= 3, f"a fix belongs to a cause, and nobody reads more than three: {name}"
        for text in (*causes, *fixes):
            used = set(fields_of(text))
            assert used <= known, f"{text!r} has fields that {name} has not"


def test_all_words_of_a_cause_are_in_its_templates():
    assert [name for name, cause in CATALOGUE.items() if {"cause", "fix"} & vars(cause).keys()] == []


def test_no_cause_has_the_name_of_a_kind():
    assert CATALOGUE.keys().isdisjoint(get_args(Kind))


def test_no_two_causes_give_the_same_advice():
    by_words = defaultdict(list)
    for name, cause in CATALOGUE.items():
        by_words[cause.why, cause.how].append(name)
    assert [names for names in by_words.values() if len(names) > 1] == []


def nodes(words: set[str]) -> Iterator[tuple[Path, ast.AST]]:
    """Yield every node of the sources that have one of some words, with its file."""
    for path in SOURCES:
        text = path.read_text()
        if not words.isdisjoint(re.findall(r"\w+", text)):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


def calls_of(name: str) -> list[str]:
    found = []
    for path, node in nodes({name}):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_findings_are_made_in_one_place():
    (place,) = calls_of("Finding")
    assert place.startswith("shardviz/explain/cause.py:")


def test_every_cause_is_found_by_some_rule():
    """By the words of the sources, of which an import alone is none that lint lets stand."""
    causes = {cause.__name__ for cause in CATALOGUE.values()}
    outside = (path for path in SOURCES if not path.is_relative_to(ROOT / "shardviz" / "explain"))
    used = {word for path in outside for word in re.findall(r"\w+", path.read_text())}
    assert sorted(causes - used) == []


def test_the_catalogue_knows_no_judge():
    allowed = tuple(f"shardviz.{room}" for room in ("explain", "layout", "relate", "text", "errors"))
    for path in (ROOT / "shardviz" / "explain").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in names if name.startswith("shardviz.")]
            assert all(name.startswith(allowed) for name in ours), f"{path.name} imports {ours}"

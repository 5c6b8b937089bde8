"""MkDocs' hooks: pages of the catalogue and of the Python API, and links from demos to files outside of them."""

from __future__ import annotations

import posixpath
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

import shardviz
from shardviz import testing
from shardviz.explain.kinds import KINDS
from shardviz.explain.pages import CATALOGUE, page_of
from shardviz.explain.pages import Page as Explained
from shardviz.picture.html.parts import reference_link
from tests.docs.examples import Example, examples

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
FENCE = re.compile(r"^(```\w+) .+$", re.MULTILINE)
"""A fence whose language is followed by words for the tests of pages: `console needs transformers`."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each kind and cause, its picture, and the page of the Python API."""
    shown = examples()
    pages = {"api.md": _api(), "causes/index.md": _index()}
    for kind in KINDS:
        pages[f"causes/{kind}.md"] = _of_kind(page_of(kind))
    for name in CATALOGUE:
        example = shown.get(name)
        pages[f"causes/{name}.md"] = _of_cause(page_of(name), example)
        if example is not None and example.picture:
            pages[f"causes/{name}.svg"] = example.picture
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Let links out of the demos lead to the repository."""
    here = posixpath.dirname(page.file.src_uri)

    def led(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("demos", here, found[2]))
        is_outside = not found[2].startswith(("http:", "https:")) and not path.startswith("demos/")
        if is_outside and not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {found[2]}, which does not exist")
        return f"{found[1]}{config.repo_url}/blob/main/{path}{found[3]}" if is_outside else found[0]

    return LINK.sub(led, FENCE.sub(r"\1", markdown))


def _index() -> str:
    rows = [f"| [`{kind}`]({kind}.md) | {of.rule} |" for kind, of in KINDS.items()]
    return "\n".join(
        [
            "# Every finding and its causes",
            "",
            f"shardviz names {len(KINDS)} kinds of findings and {len(CATALOGUE)} causes.",
            "`shardviz explain NAME` prints each of these pages.",
            "",
            "| kind | what is wrong |",
            "| --- | --- |",
            *rows,
        ]
    )


def _of_kind(explained: Explained) -> str:
    lines = [f"# {explained.name}", "", explained.title, "", "| cause | what happens |", "| --- | --- |"]
    lines += [f"| [{name}]({name}.md) | {text} |" for name, text in explained.rows if name in CATALOGUE]
    for title, text in explained.rows:
        if title not in CATALOGUE:
            names = [f"[{name}]({name}.md)" if name in CATALOGUE | KINDS else name for name in text.split(", ")]
            lines += ["", f"*{title}*: {', '.join(names)}"]
    return "\n".join(lines)


def _of_cause(explained: Explained, example: Example | None) -> str:
    lines = [f"# {explained.name}", "", explained.title]
    for paragraph in explained.paragraphs:
        lines += ["", paragraph]
    for title, text in explained.rows:
        lines += ["", f"**{title}** · {_linked(title, text)}"]
    if example is not None:
        lines += ["", "## As shardviz prints it", "", "```console", f"$ {example.command}", example.printed, "```"]
        lines += ["", f"![{explained.name}]({explained.name}.svg)"] if example.picture else []
    return "\n".join(lines)


def _linked(title: str, text: str) -> str:
    """Link kinds and references; other words are no markup: fields are `<axis>`, names have underscores."""
    if title == "kind":
        return ", ".join(f"[{kind}]({kind}.md)" for kind in text.split(", "))
    if title == "see":
        return ", ".join(map(reference_link, text.split(", ")))
    return re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", escape(text))


def _api() -> str:
    lines = ["# Python", ""]
    for module in (shardviz, testing):
        lines += [f"## {module.__name__}", ""]
        for name in module.__all__:
            options = f"      heading: {module.__name__}.{name}\n      heading_level: 3"
            lines += [f"::: {module._HOMES[name]}.{name}", "    options:", options, ""]
    return "\n".join(lines)

"""A page's script and style sheet: `page.js`, allowed by its hash alone, and `page.css`.

Nothing of a dump is ever put into a script. Without scripts the page still shows everything.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from shardviz.picture.markup import element, words
from shardviz.picture.model.palette import BLUE, GREEN, ORANGE, PURPLE, SKY
from shardviz.picture.svg.tile import FONT, PATTERN, STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_LIT = 64
"""Ranks below this light up with all that they hold; each costs a rule."""


@cache
def script_text() -> str:
    """Return the script."""
    return files(__package__).joinpath("page.js").read_text(encoding="utf-8").strip()


def policy() -> str:
    """Return the page's content security policy: own styles, this script, nothing else."""
    digest = b64encode(sha256(script_text().encode()).digest()).decode()
    ours = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"


def page_of(title: str, style: str, *body: str) -> str:
    """Write a whole page."""
    head = element(
        "head",
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">',
        element("title", words(f"shardviz: {title}")),
        f"<style>{style}</style>",
    )
    whole = element("body", *body, f"<script>{script_text()}</script>")
    return f'<!doctype html>\n<html lang="en">{head}{whole}</html>\n'


def full_page(title: str, style: str, first: str, header: str, top: str, *parts: str) -> str:
    """Write the page of a run or a checkpoint.

    Args:
        title: As in `page_of`.
        style: As in `page_of`.
        first: The part that the keyboard can skip to.
        header: What it begins with.
        top: What stays at the top of the window.
        parts: Its parts.
    """
    skip = element("a", f"Skip to the {first}", href=f"#{first}", class_="skip")
    patterns = f'<svg width="0" height="0" aria-hidden="true" class="defs">{PATTERN}</svg>'
    return page_of(title, style, skip, patterns, header, top, element("main", *parts))


def header_of(title: str, verdict: str, text: str, *known: str) -> str:
    """Write the page's header: title, verdict (`good`, `bad` or `unsure`) and known facts."""
    said = element("p", words(text), class_=f"verdict {verdict}")
    return element("header", element("p", "shardviz", class_="soft"), element("h1", words(title)), said, *known)


def style_sheet(ranks: Iterable[int]) -> str:
    """Return the style of a page and of the pictures in it.

    Args:
        ranks: The ranks of the mesh: a pointer over a part of a map lights up everything that its ranks hold.
    """
    colors = {"blue": BLUE, "green": GREEN, "orange": ORANGE, "purple": PURPLE, "sky": SKY, "mono": FONT}
    variables = "".join(f"--{name}:{value};" for name, value in colors.items())
    page = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    lit = (rank for rank in ranks if rank < MOST_LIT)
    lights = "".join(f"figure .sv:has(.sv-r{rank}:hover) g.sv-r{rank}{{opacity:1}}" for rank in lit)
    return f":root{{{variables}}}\n{page}{STYLE}{lights}"

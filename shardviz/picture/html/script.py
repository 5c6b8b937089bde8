"""The script of a page: `page.js`, the only one that its policy lets run, by its hash.

Nothing of a dump is ever put into a script. Without scripts the page shows all that it has.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from shardviz.picture.markup import element, words


@cache
def script_text() -> str:
    """Return the script."""
    return files(__package__).joinpath("page.js").read_text(encoding="utf-8").strip()


def policy() -> str:
    """Return what the page lets a browser do: use its own styles and run this script; fetch, send and embed nothing."""
    digest = b64encode(sha256(script_text().encode()).digest()).decode()
    ours = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"


def page_of(title: str, style: str, *body: str) -> str:
    """Write a whole page.

    Args:
        title: The name of what it shows.
        style: Its style sheet.
        body: The markup of its body.
    """
    head = element(
        "head",
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">',
        element("title", words(f"shardviz: {title}")),
        f"<style>{style}</style>",
    )
    whole = element("body", *body, f"<script>{script_text()}</script>")
    return f'<!doctype html>\n<html lang="en">{head}{whole}</html>\n'

"""SVG and HTML elements as text; every name is escaped here and never read as markup."""

from __future__ import annotations

from html import escape

from shardviz.text import printable

EMPTY = ("rect", "path")
"""Empty elements of SVG; all others are closed by a tag, as HTML requires."""


def words(value: object) -> str:
    """Escape text for use between tags and in attributes; control characters are spelled out."""
    return escape(printable(str(value)))


def element(tag: str, *children: str, **attributes: object) -> str:
    """Write an element.

    Args:
        children: Its content: other elements, or text that `words` made safe.
        attributes: Their values; `class_` is class, `aria_label` is aria-label; None leaves one out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{words(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    inner = "".join(children)
    return f"<{tag}{written}/>" if tag in EMPTY else f"<{tag}{written}>{inner}</{tag}>"

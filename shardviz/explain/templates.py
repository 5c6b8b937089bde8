"""Sentence templates with fields, filled in for a finding or shown on a page.

| in a template | in a finding |
| --- | --- |
| `{axes}` | the field; several texts are joined by `and` |
| `{axis!r}` | as Python writes it |
| `{norm:.5g}` | as Python's format does, or by a name of `FORMATS`: `{ranks:ranks}` |
| `{names:3}` | the first three of several, between commas |
| `{axes:? over {axes}}` | words that are there only if the field is not empty |
| `{trip:sync?send it|save it}` | words that depend on the field: `sync`, or anything else |
| `{ranks:1?reads|read}` | words for a single one, or for several |
| `{axes:each and|sum over {each}}` | words for each of several |
"""

from __future__ import annotations

import re
import string
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardviz.text import as_clause, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    _Taken = Mapping[tuple[str, str], bool]


OF_ANOTHER_CAUSE = re.compile(r"\.(cause|fix|likeliest\[\d\])[:}]")
"""Words that another cause adds: they stand on its own page."""

SHORT = 20
"""Words that depend on a field and are so short make no second row of a page."""


def number(value: float) -> str:
    """Return a number in at most five digits that matter."""
    return f"{value:.5g}"


def times_text(factor: Fraction | float) -> str:
    """Return a factor as a sentence has it: `2 times`, `1/2 of`, `0.98765 times`."""
    if not isinstance(factor, Fraction):
        return f"{number(factor)} times"
    return f"{factor.numerator} times" if factor.denominator == 1 else f"{factor} of"


def module_name(module: str) -> str:
    """Return what sentences call a module: a bare number is no name that can be read."""
    return f"module {module}" if module.isdecimal() else module


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "ranks": named_ranks,
    "list": lambda sizes: str(list(sizes)),
    "sum": lambda sizes: " + ".join(map(str, sizes)),
    "times": times_text,
    "upper": str.upper,
    "continued": as_clause,
    "called": module_name,
}
"""What a field is printed by if its format names it."""


class _Parser(string.Formatter):
    """Python's own, with an object's attributes for fields."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(kwargs["source"], str(key))


PARSER = _Parser()


class _Piece(NamedTuple):
    """Words of a template and the field after them.

    Attributes:
        name: The field's name; empty at the end.
        form: Its format; empty if words depend on it or are there for each of it.
        conversion: `r` for how Python writes it.
        each: What joins the words for each item, and these words.
        condition: What it is compared with, the words if it is equal, and the words if not.
    """

    literal: str
    name: str
    form: str
    conversion: str
    each: tuple[str, str] | None
    condition: tuple[str, str, str] | None


@cache
def _pieces(template: str) -> tuple[_Piece, ...]:
    return tuple(
        _Piece(literal, name or "", form or "", conversion or "", _for_each(form or ""), _condition(form or ""))
        for literal, name, form, conversion in PARSER.parse(template)
    )


def each_of(texts: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the templates of a cause, of which there may be one or several."""
    return (texts,) if isinstance(texts, str) else texts


def pair_templates(why: str | tuple[str, ...], how: str | tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the templates of each cause and its fix; an empty fix is that of the next."""
    causes, fixes = each_of(why), each_of(how)
    return list(zip(causes, [""] * (len(causes) - len(fixes)) + [*fixes], strict=True))


def fill(template: str, source: object) -> str:
    """Return a template with the attributes of an object in the place of its fields.

    Example:
        >>> class SameFile:
        ...     ranks = (0, 1)
        >>> fill("look at what {ranks:ranks} {ranks:1?reads|read}", SameFile())
        'look at what ranks 0-1 read'
    """
    return "".join(_filled(template, source))


def _filled(template: str, source: object) -> Iterator[str]:
    for piece in _pieces(template):
        yield piece.literal
        if not piece.name:
            continue
        is_plain = piece.name.isidentifier()
        value = getattr(source, piece.name) if is_plain else PARSER.get_field(piece.name, (), {"source": source})[0]
        if piece.each:
            yield piece.each[0].join(fill(piece.each[1], _Each(source, item)) for item in value)
        elif piece.condition:
            test, yes, no = piece.condition
            yield fill(yes if _is_true(value, test) else no, source)
        else:
            yield repr(value) if piece.conversion else _print(value, piece.form)


class _Each:
    """An object with one more field, an item of another."""

    def __init__(self, source: object, item: object) -> None:
        self.source = source
        self.each = item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def _for_each(form: str) -> tuple[str, str] | None:
    """Return what joins the words for each item, and these words; None for any other format."""
    joiner, _, words = form.removeprefix("each ").partition("|")
    return (f" {joiner} ", words) if form.startswith("each ") else None


def _print(value: Any, form: str) -> str:
    if form in FORMATS:
        return FORMATS[form](value)
    if form.isdecimal():
        return listed(value, int(form))
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return " and ".join(value)
    return format(value, form) if form else str(value)


def _is_true(value: Any, test: str) -> bool:
    if not test:
        return bool(value)
    return str(len(value) if isinstance(value, tuple) else value) == test


def _condition(form: str) -> tuple[str, str, str] | None:
    """Return (value, words if equal, words if not) of a condition; None for a plain format."""
    test, mark, texts = form.partition("?")
    if not mark:
        return None
    depth = 0
    for at, char in enumerate(texts):
        depth += (char == "{") - (char == "}")
        if char == "|" and not depth:
            return test, texts[:at], texts[at + 1 :]
    return test, texts, ""


def page_texts(template: str) -> list[str]:
    """Return a template as its page prints it, once for each wording, with fields as `<axis>`.

    Example:
        >>> page_texts("{trip:sync?send it on {axis}|save it}")
        ['send it on <axis>', 'save it']
    """
    return list(dict.fromkeys(text for text, _ in _wordings(template, {})))


def _wordings(template: str, taken: _Taken) -> list[tuple[str, _Taken]]:
    """Return what a template may say, each with what that takes of its fields."""
    wordings = [("", taken)]
    for piece in _pieces(template):
        wordings = [
            (text + piece.literal + words, now) for text, before in wordings for words, now in _on_page(piece, before)
        ]
    return wordings


def _on_page(piece: _Piece, taken: _Taken) -> list[tuple[str, _Taken]]:
    """Return what a field may say on a page, with the choices made so far."""
    name = piece.name
    if piece.each:
        return [(text.replace("<each>", f"<{name}>"), now) for text, now in _wordings(piece.each[1], taken)]
    if piece.condition is None:
        owner, _, field = name.rpartition(".")
        words = f"<the {owner}'s {field}>" if OF_ANOTHER_CAUSE.search(f".{field}}}") else f"<{field.replace('_', ' ')}>"
        return [(words if name else "", taken)]
    test, yes, no = piece.condition
    if test == "1":
        return _wordings(no, taken)
    if not yes or not no:
        return _wordings("" if OF_ANOTHER_CAUSE.search(yes or no) else yes or no, taken)
    choices: tuple[bool, ...] = (True,) if len(yes + no) <= SHORT else (True, False)
    choices = tuple(one for one in choices if not OF_ANOTHER_CAUSE.search(yes if one else no)) or choices
    choices = (taken[name, test],) if (name, test) in taken else choices
    return [
        wording for choice in choices for wording in _wordings(yes if choice else no, {**taken, (name, test): choice})
    ]


def fields_of(template: str) -> Iterator[str]:
    """Yield the names of a template's fields, including those inside conditional words."""
    for piece in _pieces(template):
        if piece.name and piece.name != "each":
            yield re.split(r"[.[]", piece.name)[0]
        for words in (piece.each or piece.condition or ("", ""))[1:]:
            yield from fields_of(words)

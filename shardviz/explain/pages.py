"""The catalogue as pages: a kind with its causes, a cause with its words, and their table."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from shardviz import explain
from shardviz.errors import ShardvizError
from shardviz.explain.cause import BY_NAME, Cause
from shardviz.explain.kinds import KINDS
from shardviz.explain.templates import page_texts, pair_templates
from shardviz.layout.notation import ORDER, DimOrder, split_order
from shardviz.text import did_you_mean, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Kind


for family in iter_modules(explain.__path__, f"{explain.__name__}."):
    for module in iter_modules(import_module(family.name).__path__, f"{family.name}.") if family.ispkg else ():
        import_module(module.name)

CATALOGUE: Mapping[str, type[Cause]] = BY_NAME
"""Every cause by its name."""


MOST_WITH_WORD = 12
"""So many causes are listed that have a word in their names."""

WORDS = {
    "claimed": "where the placements say that each element is, in the notation",
    "held": "where each element really is, by its id or its value",
    "intended": "where the author wants each element: a probe's `expect`, or `intended=` of shardviz.capture",
    "plain": "the tensor is not a DTensor: nothing says which part of the whole a rank holds",
    "output": "a result of the training step, in float64: what the model returns, compared with the unsharded model's",
    "not-checked": "shardviz couldn't look at this, so it is neither right nor wrong; the line says why",
    "not-compared": "shardviz had nothing to compare this with, or no need to: activations only show where a wrong "
    "output begins; the optimizer's state is compared if the probe has optimizer(); a job's step is compared with a "
    "second job's by `shardviz run --trace` and `shardviz diff`",
    "=axis": "the ranks along the axis hold equal copies; this holds for every axis that isn't named",
    "+axis": "each rank along the axis holds one term, and the tensor is their sum (`Partial()`)",
    "+axis:avg": "each rank along the axis holds one term, and the tensor is their mean; `:max` and others likewise",
}
"""What stands in findings and tables besides kinds, causes and layouts."""

_NAME = re.compile(r"[^\W\d]\w*(-[^\W\d]\w*)*|[=+]\w+(:\w+)?|[\w.-]+#\d+")


@dataclass(frozen=True, slots=True)
class Page:
    """What `shardviz explain` prints of a kind or a cause.

    Attributes:
        title: What happens, in a sentence.
        paragraphs: How one gets there, and why nothing raises.
        rows: Titled lines: the kinds or the causes, the words of a finding, the fix, references.
    """

    name: str
    title: str
    paragraphs: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]


def is_name(text: str) -> bool:
    """Whether a text can be the name of a page or an issue, even misspelled, or an order; a layout has brackets."""
    return _NAME.fullmatch(text) is not None or ORDER.fullmatch(f" {text}") is not None


def page_of(name: str) -> Page:
    """Return the page of a kind, a cause, an issue, a word of the tables or the order of a dim.

    Raises:
        ShardvizError: Nothing has that name, or the order cannot be read.

    Example:
        >>> page_of("misordered").title
        'each element is held once, but not where the placements claim'
    """
    layout, order = split_order(f" {name}")
    if order is not None:
        return _of_order(name, layout.strip(), order)
    if "#" in name:
        return _of_issue(name)
    word = re.sub(r"(?<=:)\w+", "avg", re.sub(r"(?<=[=+])\w+", "axis", name))
    if word in WORDS:
        return Page(name, WORDS[word], (), ())
    name = name.lower().replace("_", "-")
    if name in KINDS:
        return _of_kind(name)  # type: ignore[arg-type]  # a key of KINDS is a kind
    if name in CATALOGUE:
        return _of_cause(CATALOGUE[name])
    with_word = [
        other for other, cause in CATALOGUE.items() if name in re.split(r"\W+", f"{other} {_title(cause).lower()}")
    ]
    hint = f"causes with that word: {listed(with_word, MOST_WITH_WORD)}" if with_word else ""
    hint = hint or did_you_mean(name, [*KINDS, *CATALOGUE])
    kinds = f"the kinds are {', '.join(KINDS)}; a kind's page lists its causes"
    raise ShardvizError(f"{name!r} is neither a kind of finding nor a cause", hint or kinds)


def _of_order(name: str, layout: str, order: DimOrder) -> Page:
    dim, sizes = order.dim, ", ".join(map(str, order.shape))
    if order.swapped is not None:
        first, second = order.swapped
        how = f"dim {dim} is viewed as {sizes}, and dims {first} and {second} of that view are exchanged"
        last = dim + len(order.shape) - 1
        in_torch = f"w.unflatten({dim}, ({sizes})).transpose({dim + first}, {dim + second}).flatten({dim}, {last})"
    else:
        blocks = listed(order.blocks, MOST_WITH_WORD)
        how = f"dim {dim} is cut into {len(order.blocks)} equal blocks, which come in the order {blocks}"
        in_torch = f"torch.cat([w.chunk({len(order.blocks)}, {dim})[block] for block in ({blocks})], {dim})"
    intended = f"{layout or '[*/tp, *]'} order {name.rpartition('order ')[2]}"
    rows = (
        ("torch", in_torch),
        ("meant", f"if the model has this order on purpose, give it to the probe: expect = {{'w': '{intended}'}}"),
    )
    return Page(name, f"{how}; the unsharded model has the dim in its plain order", (), rows)


def _of_issue(issue: str) -> Page:
    causes = [(name, _title(cause)) for name, cause in CATALOGUE.items() if issue in cause.references]
    if not causes:
        raise ShardvizError(f"no cause refers to {issue}", "give a kind of finding or a cause")
    return Page(issue, "a public issue with this cause", (), tuple(causes))


def _of_kind(kind: Kind) -> Page:
    possible = (cause for cause in CATALOGUE.values() if kind in cause.kinds)
    causes = [(cause.name, _title(cause)) for cause in sorted(possible, key=lambda cause: cause.kinds[0] != kind)]
    probes = [("try", f"shardviz probe bugs/{probe}") for probe in KINDS[kind].probes[:1]]
    from_others = [("left out next to", ", ".join(other for other in KINDS if other in KINDS[kind].follows_from))]
    return Page(kind, KINDS[kind].rule, (), (*causes, *(row for row in from_others if row[1]), *probes))


def _of_cause(cause: type[Cause]) -> Page:
    paragraphs = inspect.cleandoc(cause.__doc__ or "").split("\n\n")[1:]
    rows = (
        ("kind", ", ".join(cause.kinds)),
        *_advice(cause),
        ("see", ", ".join(cause.references)),
    )
    texts = tuple(" ".join(text.split()) for text in paragraphs if not text.startswith("Attributes:"))
    return Page(cause.name, _title(cause), texts, tuple(row for row in rows if row[1]))


def _title(cause: type[Cause]) -> str:
    return (cause.__doc__ or "").strip().partition("\n")[0]


def _advice(cause: type[Cause]) -> list[tuple[str, str]]:
    """Return each cause that fits and its fix, in every wording that a field selects."""
    rows: list[tuple[str, str]] = []
    for why, how in pair_templates(cause.why, cause.how):
        rows += [("or" if rows or at else "cause", text) for at, text in enumerate(_wordings(why))]
        rows += [("or" if at else "fix", text) for at, text in enumerate(_wordings(how))]
    return rows


def _wordings(template: str) -> list[str]:
    """Return the wordings of a template, but none that is only another cause's words."""
    return [text for text in page_texts(template) if text and not re.fullmatch("<[^>]*>", text)]


def table() -> Iterator[str]:
    """Yield the rows of the reference's table of findings, in Markdown."""
    yield "| kind | what is wrong | seen in |"
    yield "| --- | --- | --- |"
    for kind, page in KINDS.items():
        seen = ", ".join(f"[{probe}](../../probes/bugs/{probe}.py)" for probe in page.probes)
        seen = seen or f"[{_seen_as(page.page)}](../../{page.page})"
        yield f"| `{kind}` | {page.rule} | {seen} |"


def _seen_as(page: str) -> str:
    """Return what a page is that shows a kind: what is printed of recorded cases, tests or a demo."""
    folders = {"tests/contract/": "recorded", "tests/": "its tests"}
    return next((name for folder, name in folders.items() if page.startswith(folder)), "a demo")

"""Building blocks of pages: their frame, sections, tables that scroll, bars, byte counts, findings.

The script `page.js` is allowed by its hash alone. Nothing of a dump is ever put into it. Without scripts the page still
shows everything.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import blake2b, sha256
from importlib.resources import files
from typing import TYPE_CHECKING, TypeVar

from shardviz.layout.region import merge_ranges
from shardviz.picture.exhibits.exhibit import columns_of
from shardviz.picture.markup import element, words
from shardviz.picture.model.holders import mask_of, ranks_text
from shardviz.picture.model.palette import BLUE, GREEN, ORANGE, PURPLE, SKY
from shardviz.picture.svg.map import FONT, PATTERN, STYLE
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import Fold, bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardviz.check.report import Report
    from shardviz.explain.finding import Finding
    from shardviz.picture.exhibits.exhibit import Cell, Exhibit

MOST_CHARACTERS = 80
_OTHERS = re.compile(r"[^A-Za-z0-9_.-]+")

Item = TypeVar("Item")


def section(anchor: str, title: str, *parts: str) -> str:
    """Write a part of the page with its heading."""
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *parts, id=anchor, aria_labeledby=f"{anchor}-title"
    )


def self_link(anchor: str) -> str:
    """Write a link to where it stands, to be copied."""
    return element("a", "#", href=f"#{anchor}", class_="here", aria_label="Link to this")


def top_bar(anchors: Mapping[str, str], tools: str) -> str:
    """Write the bar at the top of the window: links to the page's parts, and the search."""
    links = (element("a", title, href=f"#{anchor}") for anchor, title in anchors.items())
    return element("div", element("nav", *links, aria_label="Parts of this page"), tools, class_="top")


def search_tools(orders: Mapping[str, str], verdicts: Mapping[str, str] | None = None) -> str:
    """Write the search, filter and order of a page's tree, which its script shows and serves.

    Args:
        orders: The orders by the script's names for them, in words; the first is that of the page.
        verdicts: The verdicts that can be asked for, in words.
    """
    fields = [
        element(
            "label",
            element("span", "Search"),
            '<input id="search" type="search" placeholder="name, kind, layout  (/)">',
        )
    ]
    if verdicts:
        fields.append(_choice("verdict", "Show", {"": "everything", **verdicts}))
    fields.append(_choice("order", "Order", orders))
    count = element("output", id="count", aria_live="polite", class_="soft")
    return element("div", *fields, count, id="tools", class_="tools", role="search", hidden="hidden")


def _choice(anchor: str, title: str, options: Mapping[str, str]) -> str:
    written = (element("option", words(text), value=value) for value, text in options.items())
    return element("label", element("span", title), element("select", *written, id=anchor))


def names_of(folded: Fold) -> str:
    """Write a fold's names in the form that the script searches: `layers.[0-1,3].wq`."""
    if len(folded) == 1:
        return folded.names()[0]
    ranges = ",".join(f"{start}-{stop - 1}" for start, stop in folded.numbers)
    return f"{folded.prefix}[{ranges}]{folded.suffix}"


_CODE = re.compile(
    r"`[^`]+`"  # a line of the user's own
    r"|(?:[A-Za-z_][\w.]*)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # a call, or a tuple
    r"|(?:\b(?:\d+\.)+[A-Za-z_]\w*|[A-Za-z_]\w+(?=\.[\w\[]))(?:\.(?:[A-Za-z_]\w*|\d+|\[[\d,-]+\]))*(?:(?<=\.py):\d+)?"
    # a dotted name, of a tensor or a file too
    r"|[A-Za-z_]\w*=[\w.-]+|\w*[a-z0-9]_\w+"  # a setting, a name with an underscore
    r"|(?:\b[a-z]+[0-9]+)?\[[^\[\]]*\]"  # a layout
)

_IS_CODE = re.compile(r"[A-Za-z_][\w.]*\(|\(\s*_?[A-Z]\w*\(|[^(]")

MOST_CODED = 1000
"""A sentence of more characters has a stranger's name in it, and is left as it is: matching takes long."""


def with_code(text: str) -> str:
    """Write a sentence with its calls, names and layouts set as code."""
    if len(text) > MOST_CODED:
        return words(text)
    written, at = [], 0
    for match in _CODE.finditer(text):
        if _IS_CODE.match(match[0]):
            written += [words(text[at : match.start()]), element("code", words(match[0].strip("`")))]
            at = match.end()
    return "".join([*written, words(text[at:])])


def ranks_cell(ranks: Iterable[int]) -> str:
    """Write ranks, briefly however many they are."""
    return words(ranks_text(mask_of(ranks)))


def scrolled(table: str, label: str) -> str:
    """Let a wide table scroll by itself, by keyboard too."""
    return element("div", table, class_="wide", tabindex=0, role="region", aria_label=label)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], label: str, left: int = 1, total: Sequence[str] = ()
) -> str:
    """Write a table.

    Args:
        label: What the table is, for a screen reader.
        left: How many of the first columns are set flush left; the others are flush right.
        total: A last row, which stays there when the others are sorted.
    """

    def aligned(column: int) -> str | None:
        return "number" if column >= left else None

    def row(cells: Sequence[str]) -> str:
        first, *others = cells
        rest = (element("td", cell, class_=aligned(at)) for at, cell in enumerate(others, 1))
        return element("tr", element("th", first, scope="row"), *rest)

    titles = (element("th", text, scope="col", class_=aligned(at)) for at, text in enumerate(heads))
    head, body = element("thead", element("tr", *titles)), element("tbody", *map(row, rows))
    foot = element("tfoot", row(total)) if total else ""
    return scrolled(element("table", head, body, foot, class_="sortable"), label)


def exhibit_table(exhibit: Exhibit) -> str:
    """Write a finding's exhibit as a table; wrong cells are marked by color and by glyph."""
    columns = columns_of(exhibit)
    heads = (element("th", words(text), scope="col") for text in (exhibit.heads[0], *(column[0] for column in columns)))
    body = []
    for at, row in enumerate(exhibit.rows, 1):
        texts = (words(column[at]) for column in columns)
        cells = (element("td", text, class_=_mark(cell)) for text, cell in zip(texts, row.cells, strict=False))
        apart = "apart" if row.is_apart and at > 1 else None
        body.append(element("tr", element("th", words(row.title), scope="row"), *cells, class_=apart))
    if exhibit.left_out:
        more = element("th", words(f"{UNICODE.more} {exhibit.more}"), scope="row", class_="soft")
        body.insert(exhibit.shown, element("tr", more))
    caption = element("caption", words(exhibit.caption))
    head = element("thead", element("tr", *heads))
    return scrolled(element("table", caption, head, element("tbody", *body), class_="exhibit"), exhibit.caption)


def _mark(cell: Cell) -> str | None:
    return "wrong" if cell.is_wrong else "right" if cell.is_right else None


def bar(parts: Iterable[tuple[str, int, str]], most: int) -> str:
    """Draw stretches next to each other, each to scale; the numbers are beside it in words.

    Args:
        parts: The class that colors each, its size, and its tooltip.
        most: The size that takes the whole width.
    """
    drawn = (
        element("span", class_=color, style=f"width:{100 * size / max(most, 1):.2f}%", title=tooltip)
        for color, size, tooltip in parts
        if size
    )
    return element("div", *drawn, class_="bar", aria_hidden="true")


def bytes_cell(count: int) -> str:
    """Write a number of bytes, with the exact number as tooltip."""
    return element("span", words(bytes_text(count)), title=f"{count:,} bytes", data_value=count)


class Anchors:
    """The anchors of one page, which never repeat."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def of(self, kind: str, *names: str) -> str:
        """Return an anchor; a hash tells names apart that it does not spell as they are.

        Args:
            kind: What it leads to: `tensor`, `finding`.
            names: What it is called.
        """
        name = "-".join(filter(None, names))
        spelled = _OTHERS.sub("-", name).strip("-")[:MOST_CHARACTERS]
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
        plain = f"{kind}-{spelled}" if spelled == name else f"{kind}-{spelled}-{digest}"
        anchor, count = plain, 1
        while anchor in self._given:
            count += 1
            anchor = f"{plain}-{count}"
        self._given.add(anchor)
        return anchor


def in_natural_order(folded: Sequence[tuple[Fold, Item]]) -> list[tuple[Fold, Item]]:
    """Sort folds by number: a checkpoint lists layer 10 before layer 2."""
    first: dict[tuple[str, str], int] = {}
    for at, (names, _) in enumerate(folded):
        first.setdefault((names.prefix, names.suffix), at)
    rising = [(Fold(names.prefix, merge_ranges(sorted(names.numbers)), names.suffix), item) for names, item in folded]
    return sorted(rising, key=lambda entry: (first[entry[0].prefix, entry[0].suffix], entry[0].numbers))


def leaf(
    anchor: str, names: Fold, summary: str, *inner: str, size: int, is_open: bool, verdict: str | None = None
) -> str:
    """Write a line of a page's tree that opens on what is known of a tensor.

    Args:
        size: The bytes of all its tensors.
        is_open: Whether it is open at first.
        verdict: What its tensors can be asked for by.
    """
    return element(
        "details",
        summary,
        self_link(anchor),
        *inner,
        id=anchor,
        class_="leaf",
        open="open" if is_open else None,
        data_names=names_of(names),
        data_verdict=verdict,
        data_many=len(names),
        data_bytes=size,
    )


def name_cell(text: str, names: Fold) -> str:
    """Write the name in a line, with how many tensors share it."""
    count = element("span", f" {len(names):,} tensors", class_="soft") if len(names) > 1 else ""
    return element("span", words(text), count, class_="name")


MOST_FINDINGS = 200
OWNERS = {
    "Automodel": "NVIDIA-NeMo",
    "composer": "mosaicml",
    "DeepSpeed": "deepspeedai",
    "foundation-model-stack": "foundation-model-stack",
    "gpt-neox": "EleutherAI",
    "KempnerForge": "KempnerInstitute",
    "LlamaFactory": "hiyouga",
    "Megatron-LM": "NVIDIA",
    "OLMo-core": "allenai",
    "pytorch": "pytorch",
    "RLinf": "RLinf",
    "torchtitan": "pytorch",
    "torchtune": "meta-pytorch",
    "transformers": "huggingface",
    "vllm-gguf-plugin": "vllm-project",
}
"""The owner of each repository that references name without one."""

SHORT = {"TGI": "huggingface/text-generation-inference"}
"""Repositories that references name by initials."""

_REFERENCE = re.compile(r"(?P<repository>[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)?)#(?P<number>[0-9]+)")


def findings_section(articles: Sequence[str], report: Report) -> str:
    """Write the first findings, how many more there are, and what was not checked."""
    parts = list(articles)
    if len(report.findings) > MOST_FINDINGS:
        parts.append(element("p", f"{len(report.findings) - MOST_FINDINGS:,} more: shardviz check prints them"))
    if report.not_checked:
        items = (element("li", words(text)) for text in report.reasons)
        parts.append(element("h3", "Not checked") + element("ul", *items))
    return section("findings", "Findings", *(parts or [element("p", "None.")]))


def article(anchor: str, finding: Finding, facts: Iterable[tuple[str, str]], table: str = "", picture: str = "") -> str:
    """Write one finding: its summary, what it is seen by, what is known of it, and its picture."""
    kind = element("span", f"{UNICODE.of(finding.severity)} ", words(finding.kind), class_="kind")
    return element(
        "article",
        element("h3", kind, " ", element("code", words(finding.title)), self_link(anchor)),
        element("p", with_code(finding.summary)),
        table,
        element("dl", *(element("dt", title) + element("dd", text) for title, text in facts)),
        picture,
        id=anchor,
        class_="error" if finding.severity == "error" else "warning",
        data_names=" ".join(map(names_of, finding.folds)),
    )


def address(reference: str) -> str:
    """Return the address of an issue or a pull request; empty if its repository is not known."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        return ""
    name = match["repository"]
    full = name if "/" in name else SHORT.get(name) or (f"{OWNERS[name]}/{name}" if name in OWNERS else "")
    return f"https://github.com/{full}/issues/{match['number']}" if full else ""


def reference_link(reference: str) -> str:
    """Write a reference, as a link if it is known where it leads."""
    where = address(reference)
    return element("a", words(reference), href=where, rel="noreferrer") if where else words(reference)


def advice(finding: Finding) -> list[tuple[str, str]]:
    """Return a finding's cause, fix, alternatives and references as titled markup."""
    markup: dict[str, Callable[[str], str]] = {
        "fix": lambda text: element("span", with_code(text), class_="fix"),
        "see": lambda _: "; ".join(
            filter(None, (", ".join(map(reference_link, finding.refs)), element("code", words(finding.page_command))))
        ),
    }
    return [(title, markup.get(title, with_code)(text)) for title, text in finding.advice]


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

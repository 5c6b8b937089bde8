"""Findings on a page, an article each; what their advice names is linked: `pytorch#129229` is of github.com/pytorch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.picture.html.parts import coded, here, names_of, section
from shardviz.picture.markup import element, words
from shardviz.picture.text.terminal import UNICODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardviz.check.report import Report
    from shardviz.explain.finding import Finding

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
        element("h3", kind, " ", element("code", words(finding.title)), here(anchor)),
        element("p", words(finding.summary)),
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
    """Write a reference, as a link where it is known where it leads."""
    where = address(reference)
    return element("a", words(reference), href=where, rel="noreferrer") if where else words(reference)


def advice(finding: Finding) -> list[tuple[str, str]]:
    """Return the cause, the fix, what else fits and the references of a finding, as titled markup."""
    markup: dict[str, Callable[[str], str]] = {
        "fix": lambda text: element("span", coded(text), class_="fix"),
        "see": lambda _: ", ".join(map(reference_link, finding.refs)),
    }
    return [(title, markup.get(title, words)(text)) for title, text in finding.advice]

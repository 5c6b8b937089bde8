"""The advice of a finding; what it refers to is linked: `pytorch#129229` is of github.com/pytorch/pytorch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.picture.html.parts import coded
from shardviz.picture.markup import element, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.explain.finding import Finding

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


def address(reference: str) -> str:
    """Return the address of an issue or a pull request; empty where its repository is not known."""
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        return ""
    name = found["repository"]
    full = name if "/" in name else SHORT.get(name) or (f"{OWNERS[name]}/{name}" if name in OWNERS else "")
    return f"https://github.com/{full}/issues/{found['number']}" if full else ""


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

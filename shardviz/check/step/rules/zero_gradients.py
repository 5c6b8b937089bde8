"""Gradients that are zero in every element of the unsharded model's step: a reduction that is missing does not show.

So is the gradient of one LoRA matrix as long as the other is zero, and that of all behind a scale that starts at zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.text import folded_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding

MAX_LISTED = 4


def check_zero_gradients(dump: Dump, earlier: Sequence[Finding]) -> Iterator[NotChecked]:
    """Report once the parameters whose gradient shows nothing on several ranks, without those of earlier findings."""
    found = {finding.tensor for finding in earlier}
    gradients = [tensor for tensor in dump.at("reference") if tensor.role == "grad"]
    names = [
        name
        for tensor in gradients
        for name in tensor.names
        if name not in found and _on_several(dump, name) and not np.any(dump.values(tensor.first, name))
    ]
    if names:
        whose = folded_names(names, MAX_LISTED)
        text = "'s gradient: it is" if len(names) == 1 else f": their {len(names)} gradients are"
        why = f"{whose}{text} zero in every element, so a missing or repeated reduction would not show"
        yield NotChecked("", why, "step")


def _on_several(dump: Dump, name: str) -> bool:
    """Whether several ranks have a gradient of this name after the step."""
    gradient = dump.find("step", "grad", name)
    return gradient is not None and len(gradient.shards) > 1

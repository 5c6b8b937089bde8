"""A second set of weights in a folder: a file of all weights next to an index of several files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.checkpoint.comparing.equality import sample_of
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.formats.headers import read_safetensors
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.files import TwoSetsOfWeights
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from shardviz.checkpoint.records import Checkpoint, Tensor
    from shardviz.explain.finding import Finding


def check_second_set(checkpoint: Checkpoint) -> Finding | NotChecked | None:
    """Compare a sample of each tensor of a second set; None if there is none."""
    if not checkpoint.second_set:
        return None
    name = printable(checkpoint.second_set)
    before = f"{name} is next to the index, and transformers reads it before the index"
    try:
        tensors = read_safetensors(checkpoint.folder / checkpoint.second_set).tensors
    except DumpError as error:
        return TwoSetsOfWeights(name).finding("", (), f"{before}: {error.message}")
    names = sorted({*tensors, *checkpoint.tensors})
    odd = [one for one in names if not _are_alike(tensors.get(one), checkpoint.tensors.get(one))]
    if not odd:
        why = f"{name}, which transformers reads before the index: only a sample, which equals the index's files"
        return NotChecked("", why, "run")
    some = listed(map(printable, odd))
    differ = f"{counted(len(odd), 'tensor')} of {len(names):,} {'differs' if len(odd) == 1 else 'differ'} there: {some}"
    return TwoSetsOfWeights(name).finding("", (), f"{before}; {differ}")


def second_set_outcome(checkpoint: Checkpoint, side: str) -> Outcome | None:
    """Return a difference for a second set of other values in one side of a comparison."""
    finding = check_second_set(checkpoint)
    if finding is None or isinstance(finding, NotChecked):
        return None
    outcome = Outcome(printable(checkpoint.second_set), "", "other")
    return outcome.became("other", f"in the {side}, {finding.summary}", finding.explanation)


def _are_alike(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors have one dtype and shape, and equal values in a sample of them."""
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    sample, second_sample = sample_of(first), sample_of(second)
    return sample is None or second_sample is None or np.array_equal(sample, second_sample)

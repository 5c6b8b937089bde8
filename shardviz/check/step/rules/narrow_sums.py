"""Gradients whose terms were rounded before they were summed, where a policy of the model asks for a wider sum.

A sum in a narrow dtype has numbers of that dtype only, and so has its mean over a power of two of ranks. A weight whose
gradient one rank alone computes, as a row of an embedding, may have them in a wide sum, too, so that rows of zeros
leave a gradient out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.words import claimed_text
from shardviz.explain.sums import NarrowSum
from shardviz.layout.dtypes import itemsize
from shardviz.relate.casts import rounded
from shardviz.relate.tolerance import MANY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


def check_narrow_sums(evidence: Evidence) -> Iterator[Finding]:
    """Yield the gradients that have numbers of a dtype in which the step summed against a policy."""
    for dtype in sorted({dtype for record in evidence.dump.files.ranks.values() for dtype in record.narrow_sums}):
        dense = [one for one in evidence.gradients.values() if _is_dense(one.wanted) and not one.wrong]
        found = [
            one for one in dense if _is_wider(evidence, one, dtype) and _has_only(list(one.values.values()), dtype)
        ]
        cause = NarrowSum(dtype, of_all=len(found) == len(dense))
        sentence = f"every number of the gradient is a {dtype} number: its terms were summed in {dtype}"
        for one in found:
            ranks = tuple(sorted(one.values))
            yield cause.finding(one.name, ranks, sentence, severity="warning", claimed=claimed_text(one)).seen_in(one)


def _is_wider(evidence: Evidence, one: Compared, dtype: str) -> bool:
    tensor = evidence.dump.find("step", "grad", one.name)
    return tensor is not None and itemsize(tensor.dtype) > itemsize(dtype)


def _is_dense(whole: NDArray[np.float64]) -> bool:
    return bool(np.any(whole.reshape(len(whole), -1), axis=1).all()) if whole.ndim else False


def _has_only(held: list[NDArray[np.float64]], dtype: str) -> bool:
    numbers = np.concatenate([values.ravel() for values in held])
    return np.count_nonzero(numbers) >= MANY and np.array_equal(rounded(numbers, dtype), numbers)

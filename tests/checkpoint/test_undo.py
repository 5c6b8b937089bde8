"""The line of torch that undoes an order of a dim gives back the first tensor."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from tests.checkpoint.maps import permuted, weight


def of_parts(w, count, segments, dim):
    """Join parts whole, each of which has its share of every segment."""
    shares = [segment.chunk(count, dim) for segment in w.split(segments, dim)]
    return torch.cat([share[at] for at in range(count) for share in shares], dim)


ORDERS = {
    "flip": (lambda w: w.flip(0), "flip"),
    "flip of dim 1": (lambda w: w.flip(1), "flip"),
    "roll": (lambda w: w.roll(1, 0), "roll"),
    "roll back": (lambda w: w.roll(-3, 1), "roll"),
    "halves": (lambda w: torch.cat(w.chunk(2)[::-1]), "halves"),
    "halves of every 8": (lambda w: w.view(3, 2, 4, 32).flip(1).reshape(24, 32), "halves"),
    "rotary": (lambda w: permuted(w, 3), "rotary"),
    "rotary back": (lambda w: w.view(3, 2, 4, 32).transpose(1, 2).reshape(24, 32), "rotary"),
    "shards 0 2 1 3": (lambda w: torch.cat([w.chunk(4)[at] for at in (0, 2, 1, 3)]), "blocks"),
    "shards 1 2 0": (lambda w: torch.cat([w.chunk(4, 1)[at] for at in (1, 3, 0, 2)], 1), "blocks"),
    "in turns": (lambda w: torch.stack(w.chunk(2), 1).flatten(0, 1), "blocks"),
    "parts of two segments": (lambda w: of_parts(w, 3, [18, 6], 0), "segments"),
    "parts of three segments": (lambda w: of_parts(w, 2, [16, 12, 4], 1), "segments"),
    "both dims": (lambda w: w.flip(0).flip(1), ""),
    "at random": (lambda w: w[torch.randperm(24, generator=torch.Generator().manual_seed(0))], ""),
}


@pytest.mark.parametrize("case", ORDERS)
def test_an_order_is_undone_by_its_fix(tmp_path, case):
    change, kind = ORDERS[case]
    first = weight(24, 32)
    second = change(first).contiguous()
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, tensor in zip(paths, (first, second), strict=True):
        save_file({"w": tensor}, path)
    (outcome,) = compare_checkpoints(*map(open_checkpoint, paths)).outcomes
    assert outcome.verdict == "permuted"
    assert outcome.cause_id == ("reordered-in-conversion" if kind else "")
    if kind:
        assert outcome.explanation.kind == kind
        assert torch.equal(eval(outcome.explanation.undo, {"w": second, "torch": torch}), first)

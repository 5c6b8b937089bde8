"""Names that differ while the values are equal: in all tensors, or in some."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.comparing.renames import changed_words
from shardviz.checkpoint.open import open_checkpoint
from tests.checkpoint.maps import weight

LAYERS = {f"layers.{at}.{name}": (4, 4) for at in range(3) for name in "qk"}
WEIGHTS = {"embed.weight": (8, 4), "head.weight": (8, 4)} | LAYERS


def trained(before="model."):
    """Return weights and their moments, as a DCP folder has them; the weights behind some words."""
    tensors = {f"{before}{name}": weight(*shape, seed=at) for at, (name, shape) in enumerate(WEIGHTS.items())}
    for at, (name, shape) in enumerate(WEIGHTS.items()):
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"optim.state.{name}.{key}"] = weight(*shape, seed=100 * at + len(key)).square()
        tensors[f"optim.state.{name}.step"] = torch.tensor(3.0)
    return tensors


def compared(tmp_path, *sides):
    paths = [tmp_path / f"{at}.safetensors" for at in range(2)]
    for path, tensors in zip(paths, sides, strict=True):
        save_file(tensors, path)
    return compare_checkpoints(*map(open_checkpoint, paths))


@pytest.mark.parametrize("before", ["model.module.", "model._orig_mod.", "net.", "model.policy.actor."])
def test_a_part_of_the_names_that_differs_is_a_difference(tmp_path, before):
    found = compared(tmp_path, trained(), trained(before))
    renamed = [one for one in found.outcomes if one.verdict == "renamed"]
    assert {one.name for one in renamed} == {f"model.{name}" for name in WEIGHTS}
    assert {one.verdict for one in found.outcomes if one not in renamed} == {"equal"}
    assert {one.cause_id for one in renamed} == {"renamed-in-part"}
    wraps = before.count(".") > 1 and "policy" not in before
    assert all(("wrapper" in one.cause) is wraps for one in renamed)
    assert "24 other names are the same" in renamed[0].why


@pytest.mark.parametrize("turned", [False, True])
def test_words_before_most_names_are_only_said(tmp_path, turned):
    tensors = {name: weight(*shape, seed=at) for at, (name, shape) in enumerate(WEIGHTS.items())}
    behind = {name if "head" in name else f"model.{name}": one for name, one in tensors.items()}
    found = compared(tmp_path, *[tensors, behind][:: -1 if turned else 1])
    assert {one.verdict for one in found.outcomes} == {"equal"}
    side = ("second", "first")[turned]
    assert f"names: the {side} has model. in 7 of 8 names; a load by name needs equal names" in found.notes
    assert compared(tmp_path, tensors, tensors).notes == ()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a.b.w", "a.module.b.w"), ("", "module.")),
        (("module.a.w", "a.w"), ("module.", "")),
        (("a.q.w", "a.query.w"), ("q.", "query.")),
        (("a.a.w", "a.a.a.w"), ("", "a.")),
    ],
)
def test_the_words_that_names_differ_by(names, words):
    assert changed_words(*names) == words

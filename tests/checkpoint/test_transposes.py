"""A matrix that is renamed and transposed beside tensors that keep their names or move."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint

RANDOM = np.random.default_rng(6)
LAYERS = {f"layers.{at}.w": RANDOM.normal(size=(6, 10)).astype("f4") for at in range(8)}
MATRIX = RANDOM.normal(size=(6, 10)).astype("f4")


def compared(folder, **sides):
    for name, tensors in sides.items():
        save_file(
            {key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, folder / f"{name}.safetensors"
        )
    return compare_checkpoints(*(open_checkpoint(folder / f"{name}.safetensors") for name in sides))


@pytest.mark.parametrize("moved_by", [0, 1])
def test_a_matrix_that_is_renamed_and_transposed_is_found(tmp_path, moved_by):
    others = {f"layers.{(at + moved_by) % 8}.w": LAYERS[f"layers.{at}.w"] for at in range(8)}
    comparison = compared(tmp_path, a={**LAYERS, "proj": MATRIX}, b={**others, "head": MATRIX.T})
    assert comparison.counts == {"permuted": 1, "moved" if moved_by else "equal": 8}
    (found,) = (outcome for outcome in comparison.outcomes if outcome.verdict == "permuted")
    assert (found.name, found.other, found.why) == ("proj", "head", "its dims are exchanged: permute(1, 0)")


@pytest.mark.parametrize(
    "extra",
    [
        {"head": MATRIX.T, "tail": MATRIX.T},
        {"head": MATRIX.T * 2},
        {"head": MATRIX.reshape(10, 6)},
        {"head": np.float64(MATRIX.T)},
    ],
    ids=["twice", "scaled", "reshaped", "another dtype"],
)
def test_what_is_not_certainly_the_transposed_matrix_stays_missing(tmp_path, extra):
    comparison = compared(tmp_path, a={**LAYERS, "proj": MATRIX}, b={**LAYERS, **extra})
    assert comparison.counts == {"equal": 8, "missing": 1, "added": len(extra)}


def test_a_constant_matrix_is_no_other_transposed(tmp_path):
    ones = np.ones((6, 10), "f4")
    comparison = compared(tmp_path, a={**LAYERS, "proj": ones}, b={**LAYERS, "head": ones.T})
    assert comparison.counts == {"equal": 8, "missing": 1, "added": 1}


SHAPES = {"attn.in.weight": (24, 8), "attn.out.weight": (8, 8), "mlp.up.weight": (32, 8), "norm.weight": (8,)}


@pytest.mark.parametrize(
    ("kept", "is_noted"),
    [
        ((), False),
        (("attn.out.weight",), True),
        (("attn.out.weight", "mlp.up.weight"), False),  # some matrices are transposed, others aren't
        (tuple(SHAPES), False),
    ],
)
def test_a_square_matrix_that_is_not_transposed_with_the_others_is_noted(tmp_path, kept, is_noted):
    before = {f"h.{layer}.{name}": RANDOM.normal(size=shape) for layer in (0, 1) for name, shape in SHAPES.items()}
    turned = [name for name in before if name.split(".", 2)[2] not in kept]
    after = {name: array.T if name in turned else array for name, array in before.items()}
    notes = compared(tmp_path, a=before, b=after).notes
    assert any("not transposed, although" in note for note in notes) == is_noted

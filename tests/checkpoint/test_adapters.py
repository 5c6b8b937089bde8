"""A base, the same with an adapter merged, and the adapter: by which scale it was merged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.cli import main

RNG = np.random.default_rng(0)
BASE = RNG.standard_normal((32, 24)).astype(np.float32)
DOWN, UP = RNG.standard_normal((4, 24)).astype(np.float32), RNG.standard_normal((32, 4)).astype(np.float32)
SETTINGS = {"r": 4, "lora_alpha": 16, "use_rslora": True}


def saved(folder, name, tensors, settings=None):
    """Save a checkpoint, and the settings beside it."""
    path = folder / name
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    if settings is not None:
        (path / "adapter_config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return str(path)


def said(folder, change, settings, capsys, down=DOWN, up=UP):
    """Return what diff says of a base and of the same with a change, given the adapter."""
    others = {"norm.weight": np.arange(16, dtype=np.float32)}
    paths = [
        saved(folder, name, {"up.weight": weight, **others})
        for name, weight in (("base", BASE), ("merged", BASE + change))
    ]
    matrices = {"base_model.model.up.lora_A.weight": down, "base_model.model.up.lora_B.weight": up}
    code = main(["diff", *paths, "--also", saved(folder, "lora", matrices, settings)])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "scale", "due"),
    [
        (SETTINGS, 8, ""),
        (SETTINGS, 4, "8: alpha / sqrt(r)"),
        ({**SETTINGS, "use_rslora": False}, 4, ""),
        ({**SETTINGS, "use_rslora": False}, 16, "4: alpha / r"),
    ],
)
def test_the_scale_of_a_merge_is_compared_with_the_adapters_settings(tmp_path, capsys, settings, scale, due):
    code, text = said(tmp_path, np.float32(scale) * UP @ DOWN, settings, capsys)
    assert code == 1
    assert f"{scale} times the product of the matrices in lora" in text
    assert ("as adapter_config.json says" in text) == (not due)
    assert f"adapter_config.json makes it {due}" in text if due else "cause" not in text


def test_a_weight_that_is_stored_transposed_has_the_products_transpose(tmp_path, capsys):
    down, up = RNG.standard_normal((4, 32)).astype(np.float32), RNG.standard_normal((24, 4)).astype(np.float32)
    settings = {**SETTINGS, "fan_in_fan_out": True}
    _, text = said(tmp_path, 3 * (up @ down).T, settings, capsys, down, up)
    assert "3 times the product" in text
    assert "makes it 8" in text


@pytest.mark.parametrize("settings", [None, "{", "[]", '{"lora_alpha": "many"}', "[" * 100_000, '{"lora_alpha": NaN}'])
def test_an_adapter_without_readable_settings_says_nothing_of_scales(tmp_path, capsys, settings):
    code, text = said(tmp_path, UP @ DOWN, settings, capsys)
    assert code == 1
    assert "times the product" not in text


def test_another_change_than_the_adapters_is_not_said_to_be_its(tmp_path, capsys):
    code, text = said(tmp_path, RNG.standard_normal(BASE.shape).astype(np.float32), SETTINGS, capsys)
    assert code == 1
    assert "times the product" not in text

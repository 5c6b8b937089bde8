"""The examples in the docstrings of what `shardviz.load` gives."""

from __future__ import annotations

import doctest
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shardviz
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.relate.values import part_of
from tests.check.records import add_values
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from pathlib import Path

MODULES = ("dumps", "load", "runs", "verdicts")
MESH = parse_mesh("fsdp=2,tp=2")


@pytest.mark.parametrize("module", MODULES)
def test_an_example_does_what_it_says(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_dump(tmp_path / "before.shardviz", MESH, {"weight": Made("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")})
    whole = np.random.default_rng(0).standard_normal((12, 12), np.float32)
    held = dict(parse("[12/tp/fsdp, 12]").layout(MESH).regions())
    parts = {rank: part_of(whole, region) for rank, region in held.items()}
    add_values(folder, "weight", "[12/fsdp/tp, 12]", parts)
    after = make_dump(tmp_path / "after.shardviz", MESH, {"weight": "[12/tp/fsdp, 12]"})
    add_values(after, "weight", "[12/tp/fsdp, 12]", parts)
    found = doctest.testmod(import_module(f"shardviz.notebook.{module}"), extraglobs={"shardviz": shardviz})
    assert found.attempted > 0
    assert found.failed == 0

"""Run a probe on real ranks and lay its dump side by side, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz import recipes
from shardviz.dump.read import read_dump
from shardviz.dump.tensors import Model, model_of
from shardviz.dump.write import prepare_folder
from shardviz.live.job import VALUES_LIMIT, ProbeJob
from shardviz.mesh import parse_mesh

if TYPE_CHECKING:
    from pathlib import Path


def run_probe(probe: str, mesh_text: str, folder: Path, *, values_limit: int = VALUES_LIMIT) -> Model:
    """Return what the probe's ranks wrote."""
    recipe = recipes.find(probe)
    mesh = parse_mesh(mesh_text, recipe.axes)
    ProbeJob.of(recipe, mesh, prepare_folder(folder), values_limit=values_limit).launch()
    return model_of(read_dump(folder))

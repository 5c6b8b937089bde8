"""Run a probe on real ranks and lay its dump side by side, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz import recipes
from shardviz.dump.read import read_dump
from shardviz.dump.tensors import Model, model_of
from shardviz.dump.write import prepare_folder
from shardviz.live import world
from shardviz.live.job import TASK, ProbeJob
from shardviz.mesh import parse_mesh

if TYPE_CHECKING:
    from pathlib import Path


def run_probe(probe: str, mesh_text: str, folder: Path, *, values_limit: int = 256) -> Model:
    """Return what the probe's ranks wrote."""
    recipe = recipes.find(probe)
    mesh = parse_mesh(mesh_text, recipe.axes)
    job = ProbeJob(recipe.name, recipe.path, recipe.build, mesh, prepare_folder(folder), (), values_limit)
    world.launch(TASK, (job,), num_ranks=mesh.size, coords=[mesh.label(rank) for rank in range(mesh.size)])
    return model_of(read_dump(folder))

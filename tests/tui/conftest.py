"""Dumps that the screens are tried on: in order, wrong, damaged, hostile, of every shape."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs
from textual._compositor import Compositor

from shardviz.dump.records.step import CollectiveRecord
from shardviz.layout.mesh import parse_mesh
from tests.dumps import Made, make_dump
from tests.plans import make_plan, shifted
from tests.tui.steps import add_collectives, add_moments, add_to_ranks, gpipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.layout.mesh import Mesh

MESH = parse_mesh("fsdp=2,tp=4")


def kept(folder: Path, name: str, mesh: Mesh, tensors: Mapping[str, Made | str]) -> Path:
    """Make a dump in the folder and return its name there."""
    make_dump(folder / name, mesh, tensors)
    return Path(name)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name dumps as a user does, relative to the working folder: no machine's paths come into a picture."""
    monkeypatch.chdir(folder)


@pytest.fixture(autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the viewer remember nothing of other tests, nor of who runs them."""
    home = tmp_path_factory.mktemp("settings")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def frames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By day draw only what a test looks at, which is drawn whole: nobody sees the frames between two keys."""
    whole = Compositor.render_update

    def drawn(compositor: Compositor, full: bool = False, **options: Any) -> Any:
        if full:
            return whole(compositor, full, **options)
        compositor._dirty_regions.clear()
        return None

    if request.config.option.lane != "nightly":
        monkeypatch.setattr(Compositor, "render_update", drawn)


@pytest.fixture(scope="session")
def healthy(folder: Path) -> Path:
    """FSDP2 over tensor parallel, in order."""
    tensors = {
        "up.weight": "[24/tp/fsdp, 12]",
        "up.bias": "[24/tp/fsdp]",
        "down.weight": "[12/fsdp, 24/tp]",
        "down.bias": "[12/fsdp]",
    }
    return kept(folder, "healthy.shardviz", MESH, tensors)


@pytest.fixture(scope="session")
def bug(folder: Path) -> Path:
    """pytorch#129229: the placements say one order of the axes, the data is in the other."""
    return kept(folder, "bug.shardviz", MESH, {"weight": Made("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")})


@pytest.fixture(scope="session")
def plan(folder: Path) -> Path:
    """A plan of two stages: tensors on the mesh of one, and on another that is flattened."""
    stage, flat = parse_mesh("fsdp=64,tp=8"), parse_mesh("fsdp_tp=512")
    first = {"flat.weight": ("[1024/fsdp_tp, 8]", flat), "up.weight": ("[1024/tp/fsdp, 64]", stage)}
    last = {"x.weight": ("[64/fsdp, 1024/tp]", shifted(stage, 512))}
    make_plan(folder / "plan.shardviz", parse_mesh("pp=2,fsdp=64,tp=8"), [first, last])
    return Path("plan.shardviz")


@pytest.fixture(scope="session")
def even_bug(folder: Path) -> Path:
    """The same in the layers of a larger model, where shards are even."""
    tensors = {f"layers.{layer}.weight": Made("[16/fsdp/tp, 8]", "[16/tp/fsdp, 8]") for layer in range(3)}
    return kept(folder, "even_bug.shardviz", MESH, {"embedding": "[32/tp/fsdp, 8]", **tensors})


@pytest.fixture(scope="session")
def damaged(folder: Path) -> Path:
    """One rank's file is cut short, another's is missing."""
    name = kept(folder, "damaged.shardviz", MESH, {"weight": "[16/tp/fsdp, 12]", "bias": "[12]"})
    cut = folder / name / "rank_00003.json"
    cut.write_bytes(cut.read_bytes()[:200])
    (folder / name / "rank_00006.json").unlink()
    return name


@pytest.fixture(scope="session")
def stepped(folder: Path) -> Path:
    """A step of FSDP2 over tensor parallel in four layers, and one collective with what ranks had before and after."""
    name = kept(folder, "stepped.shardviz", parse_mesh("hsdp=2,fsdp=2,tp=2"), {"weight": "[16/tp/fsdp, 12]"})
    layers = [
        record
        for layer in range(4)
        for record in (
            CollectiveRecord("all_gather", ("fsdp",), 2, f"layers.{layer}", bytes=2496),
            CollectiveRecord("all_reduce", ("tp",), 2, f"layers.{layer}.down", count=3, bytes=5760),
        )
    ]
    scatter = CollectiveRecord("reduce_scatter", ("fsdp",), 2, "[red]x[/]", backward=True, bytes=10**7)
    add_collectives(
        folder / name, [*layers, scatter, CollectiveRecord("all_to_all", ("fsdp", "tp"), 4, "swap", bytes=16)]
    )
    add_moments(
        folder / name,
        "swap",
        before=lambda rank: [10 * rank + number for number in range(4)],
        after=lambda rank: [40 * (rank // 4) + 10 * other + rank % 4 for other in range(4)],
    )
    return name


@pytest.fixture(scope="session")
def pipelined(folder: Path) -> Path:
    """A pipeline of four stages."""
    name = kept(folder, "pipelined.shardviz", parse_mesh("pp=4"), {"weight": "[16, 12]"})
    add_collectives(folder / name, [CollectiveRecord("send", ("pp",), 4, count=4, bytes=4096)])
    schedule = gpipe(4, 4)
    add_to_ranks(folder / name, lambda rank: structs.replace(rank, schedule=schedule[rank.rank]))
    return name


@pytest.fixture(scope="session")
def lost_stage(folder: Path, pipelined: Path) -> Path:
    """The same, with a stage's rank lost."""
    path = folder / "lost_stage.shardviz"
    shutil.copytree(folder / pipelined, path)
    (path / "rank_00001.json").write_text("{")
    return Path(path.name)


@pytest.fixture(scope="session")
def shapes(folder: Path) -> Path:
    """Every kind of tensor there is."""
    scattered = {rank: np.array([[6, 1], [3, 0]]) if rank % 3 == 0 else np.array([[2], [5]]) for rank in range(12)}
    tensors = {
        "replicated": "[6, 4]",
        "uneven": "[7/tp, 5]",
        "empty": "[0, 4]",
        "scalar": "[]",
        "vector": "[10/tp]",
        "strided": "[24/3/tp, 4]",
        "partial": "[8/fsdp, 4] +tp",
        "cube": "[4/fsdp, 6/tp, 5]",
        "flat": "[flat(9, 9) at 3 of 90/fsdp]",
        "plain": Made(None, shape=(4, 2)),
        "scattered": Made("[2, 3/tp]", ids=scattered),
        "[red]x[/] \x1b[31m\u202e" + "long" * 75: "[4/tp]",
    }
    return kept(folder, "shapes.shardviz", parse_mesh("pp=2,fsdp=2,tp=3"), tensors)

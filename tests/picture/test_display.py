"""`shardviz.show`: printed once in a script, displayed in IPython, and light to import."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import shardviz
from shardviz.dump.read import read_files
from shardviz.errors import ShardvizError
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from tests.dumps import Made, make_dump
from tests.lanes import nightly

if TYPE_CHECKING:
    from pathlib import Path

MESH = parse_mesh("fsdp=2,tp=4")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    swapped = Made("[16/fsdp/tp, 8]", "[16/tp/fsdp, 8]")
    return make_dump(tmp_path / "d.shardviz", MESH, {"w": swapped, "a.b": "[8/tp]", "c.b": "[8/tp]"})


def test_a_layout_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    shardviz.show(parse("[16/tp/fsdp, 8]").layout(MESH))
    out = capsys.readouterr().out
    assert out.startswith("float32 16 × 8 on mesh (fsdp=2, tp=4)\nclaimed  float32[16/tp/fsdp, 8]")
    assert "2:4 │       4        │" in out


def test_a_layout_in_the_notation_is_drawn_on_the_mesh_that_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    shardviz.show("float32[16/tp/fsdp, 8]", mesh="fsdp=2,tp=4")
    written = capsys.readouterr().out
    shardviz.show(parse("[16/tp/fsdp, 8]").layout(MESH))
    assert capsys.readouterr().out == written
    with pytest.raises(ShardvizError) as raised:
        shardviz.show("[8/tp]")
    assert raised.value.message == "layout '[8/tp]' needs a mesh"
    assert raised.value.hint == "shardviz.show('[8/tp]', mesh=\"fsdp=2,tp=4\")"


def test_a_mesh_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    shardviz.show(MESH)
    assert capsys.readouterr().out == (
        "mesh (fsdp=2, tp=4)\n        tp=0 tp=1 tp=2 tp=3\nfsdp=0     0    1    2    3\nfsdp=1     4    5    6    7\n"
    )


def test_a_dump_prints_its_report_by_path_or_as_it_was_read(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shardviz.show(files)
    by_path = capsys.readouterr().out
    shardviz.show(str(files))
    assert capsys.readouterr().out == by_path
    shardviz.show(read_files(files))
    assert capsys.readouterr().out == by_path
    assert "✗ misordered  w" in by_path


def test_one_tensor_of_a_dump_is_drawn(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shardviz.show(files, "w")
    assert "✗ 4" in capsys.readouterr().out
    with pytest.raises(ShardvizError, match=r"2 tensors end in 'b': a\.b, c\.b"):
        shardviz.show(files, "b")
    with pytest.raises(ShardvizError, match=r"2 tensors match '\*\.b'"):
        shardviz.show(files, "*.b")


def test_what_cannot_be_drawn_is_reported() -> None:
    with pytest.raises(ShardvizError) as raised:
        shardviz.show(3)
    assert raised.value.message == "shardviz.show cannot draw a int"
    assert (
        raised.value.hint
        == "give it a run of shardviz.load, a dump or its path, a layout, a mesh, a DTensor or a module"
    )


def test_under_torchrun_only_rank_0_prints(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    shardviz.show(files)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    shardviz.show(files)
    assert capsys.readouterr().out != ""


def python(code: str, *args: object) -> str:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


@nightly
def test_a_dump_is_shown_without_torch(files: Path) -> None:
    code = "import sys, shardviz; shardviz.show(sys.argv[1], 'w'); assert not {'torch', 'IPython'} & {*sys.modules}"
    assert "✗ 4" in python(code, files)


NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
import shardviz
InteractiveShell.instance()
with capture_output() as seen:
    shardviz.show(*sys.argv[1:])
(shown,) = seen.outputs
for kind, text in sorted(shown.data.items()):
    print(kind, len(seen.stdout), text[:40].encode())
"""


@nightly
def test_in_ipython_a_tensor_is_svg_with_its_text_beside_it(files: Path) -> None:
    svg, text = python(NOTEBOOK, files, "w").splitlines()
    assert svg.startswith("image/svg+xml 0 b'<svg xmlns=")
    assert text.startswith("text/plain 0 b'w  float32 16 ")


def test_in_ipython_a_dump_is_its_page_in_a_frame(files: Path) -> None:
    page, text = python(NOTEBOOK, files).splitlines()
    assert page.startswith("text/html 0 b'<iframe srcdoc=\"&lt;!doctype html&gt;")
    assert text.startswith("text/plain 0 b'  tensor")


RANKS = """
import os, sys, torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
import shardviz
from shardviz.errors import ShardvizError

def rank(number):
    os.environ.pop("RANK", None)
    store = distributed.FileStore(sys.argv[1], 2)
    distributed.init_process_group("gloo", rank=number, world_size=2, store=store)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shardviz.show(mesh)
    shardviz.show(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    def cut(name, module, mesh):
        for key, param in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(2, 4), nn.BatchNorm1d(4))
    distribute_module(model[0], mesh, cut)
    distribute_module(model[1], mesh, cut)
    shardviz.show(model)
    shardviz.show(model, "1.weight")
    if number == 0:
        for asked in ("1.wait", "2.weight"):
            try:
                shardviz.show(model, asked)
            except ShardvizError as error:
                print(error)
    sys.stdout.flush()
    distributed.destroy_process_group()

other = os.fork()
rank(0 if other else 1)
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


@nightly
def test_ranks_that_all_show_a_dtensor_and_a_module_print_it_once(tmp_path: Path) -> None:
    out = python(RANKS, tmp_path / "store")
    assert out.startswith("mesh (tp=2)\n tp=0 tp=1\n    0    1\n")
    assert out.count("float32 4 × 2 on mesh (tp=2)\nclaimed  float32[4/tp, 2]  (Shard(0),)\n") == 2
    assert out.count("[0-1].weight           float32[4/tp, 2]  on mesh (tp=2)\n") == 1
    assert out.count("2.running_mean         float32[4] plain\n") == 1
    assert out.count("\n1.weight  float32 4 × 2 on mesh (tp=2)\n") == 1
    assert "the module has no tensor '1.wait'\nHint: did you mean 1.weight?\n" in out
    assert "2.weight is plain, [4]: it has no placements to draw\nHint: show a DTensor, or a dump made by" in out

"""Check a dump of Llama-3-70B's 723 tensors on 1,024 ranks against a bare json parse of its files, whole processes.

python tests/benchmarks/bench_check.py            the ratio, the dump's size, the peak memory
python tests/benchmarks/bench_check.py --profile  where the check spends its time, by function
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import pstats
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from whole import compare, peak_memory_of_children, python, verdict

from shardviz.check.run import check_dump
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, Position, Stamp, TensorRecord
from shardviz.dump.write import rank_file, write_rank, write_run
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh
from shardviz.layout.notation import parse

if TYPE_CHECKING:
    from shardviz.dump.records.base import Moment

MESH = Mesh(("fsdp", "tp"), (128, 8))
LAYERS = 80
DIM, HIDDEN, KV, VOCAB = 8192, 28672, 1024, 128256
PER_LAYER = {
    "attention.wq.weight": f"[{DIM}/tp/fsdp, {DIM}]",
    "attention.wk.weight": f"[{KV}/tp/fsdp, {DIM}]",
    "attention.wv.weight": f"[{KV}/tp/fsdp, {DIM}]",
    "attention.wo.weight": f"[{DIM}/fsdp, {DIM}/tp]",
    "feed_forward.w1.weight": f"[{HIDDEN}/tp/fsdp, {DIM}]",
    "feed_forward.w2.weight": f"[{DIM}/fsdp, {HIDDEN}/tp]",
    "feed_forward.w3.weight": f"[{HIDDEN}/tp/fsdp, {DIM}]",
    "attention_norm.weight": f"[{DIM}/fsdp]",
    "ffn_norm.weight": f"[{DIM}/fsdp]",
}
ALONE = {
    "tok_embeddings.weight": f"[{VOCAB}/tp/fsdp, {DIM}]",
    "norm.weight": f"[{DIM}/fsdp]",
    "output.weight": f"[{VOCAB}/tp/fsdp, {DIM}]",
}
BARE_PARSE = "import glob, json; [json.load(open(path)) for path in glob.glob('{}/*.json')]"
CHECK = "from shardviz.check.run import check_dump; assert not check_dump({!r}).findings"

LOAD = "import shardviz; shardviz.load({!r})['layers.3.attention.wq.weight'].held"
SHOW = "from shardviz.cli import main; main(['show', {!r}])"


def make(folder: Path) -> None:
    """Write the dump: ids and digests of every tensor on every rank."""
    folder.mkdir()
    layouts = {name: parse(text).layout(MESH) for name, text in (PER_LAYER | ALONE).items()}
    mesh = MeshRecord(MESH.axes, MESH.shape, MESH.ranks)
    write_run(folder, RunRecord(1, "bench", "none", MESH.size, mesh=mesh, stamps=_stamps(layouts)))
    for coord, rank in zip(MESH.coords(), MESH.ranks, strict=True):
        claims = tuple(_claim(layout) for layout in layouts.values())
        bodies, tensors = [], []
        for moment in ("initial", "stamped"):
            for index, (name, layout) in enumerate(layouts.items()):
                tensors.append(_tensor(name, len(bodies), layout, coord, moment))
                bodies.append(_body(index, layout, coord, moment))
        positions = (Position(0, coord, coord),)
        record = RankRecord(1, rank, MESH.size, "host", (mesh,), positions, claims, tuple(bodies), tuple(tensors))
        write_rank(folder, record)


def _stamps(layouts: dict[str, Layout]) -> tuple[Stamp, ...]:
    stamps, first = [], 1
    for name, layout in layouts.items():
        names = [f"layers.{layer}.{name}" for layer in range(LAYERS)] if name in PER_LAYER else [name]
        for full in names:
            stamps.append(Stamp(full, first, layout.shape))
            first += Layout.replicated(MESH, layout.shape).region((0, 0)).size
    return tuple(stamps)


def _claim(layout: Layout) -> LayoutRecord:
    placements = layout.placements()
    assert placements is not None
    return LayoutRecord(0, tuple(map(str, placements)), layout.shape)


def _body(index: int, layout: Layout, coord: tuple[int, ...], moment: Moment) -> Body:
    region = layout.region(coord)
    held = region.dims if moment == "stamped" else None
    return Body("param", moment, layout.shape, region.shape, "float32", layout=index, held=held)


def _tensor(name: str, body: int, layout: Layout, coord: tuple[int, ...], moment: Moment) -> TensorRecord:
    folded = name in PER_LAYER
    prefix, numbers, suffix = ("layers.", ((0, LAYERS),), f".{name}") if folded else (name, (), "")
    digests = ""
    if moment == "initial":
        part = f"{name} {layout.region(coord)}".encode()
        digests = hashlib.shake_128(part).hexdigest(8 * (LAYERS if folded else 1))
    return TensorRecord(prefix, body, numbers, suffix, digests)


def main() -> None:
    """Print the ratio, or a profile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    profiled = parser.parse_args().profile
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "llama.shardviz"
        make(folder)
        if profiled:
            _profile(folder)
            return
        size = sum(path.stat().st_size for path in folder.iterdir())
        compare(python(CHECK.format(str(folder))), runs=1)
        memory = peak_memory_of_children()
        checked, bare = compare(python(CHECK.format(str(folder))), python(BARE_PARSE.format(folder)))
        loaded, shown = compare(*(python(code.format(str(folder))) for code in (LOAD, SHOW)))
        rank_size = (folder / rank_file(0)).stat().st_size
    print(f"dump: {size / 2**20:.1f} MiB, {rank_size:,} bytes per rank\ncheck: {checked}\nbare json parse: {bare}")
    verdict("check / bare json parse", checked.median / bare.median, 3)
    verdict("shardviz.load and what a tensor holds / shardviz show", loaded.median / shown.median, 1.1)
    verdict("peak memory in MiB", memory / 2**20, 1024)
    verdict("dump in MiB", size / 2**20, 32)


def _profile(folder: Path) -> None:
    profile = cProfile.Profile()
    profile.runcall(check_dump, folder)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

"""Tensors over all ranks: layers that are alike stay one line, and every form of content gives the same ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given

from shardviz.dump.arrays import ID_NONE, MAX_ELEMENTS, expand_runs
from shardviz.dump.dump import Dump, dump_of, hint_at_name
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, MeshRecord, Stamp, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.errors import DumpError
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import write
from shardviz.text import fold
from tests.dump.samples import write_sample
from tests.dumps import Made, make_dump
from tests.lanes import cases
from tests.layout.layouts import layouts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardviz.dump.records.base import Moment
    from shardviz.layout.layout import Layout

MESH = parse_mesh("tp=2")


@dataclass
class Ranks:
    """What each rank holds, by name, written as a dump and laid side by side."""

    held: list[dict[str, Body]]
    stamps: tuple[Stamp, ...] = ()
    digests: Mapping[str, str] | None = None

    def dump(self, path: Path) -> Dump:
        prepare_folder(path, force=True)
        mesh = MeshRecord(("rank",), (len(self.held),), tuple(range(len(self.held))))
        write_run(path, RunRecord(1, "test", "none", len(self.held), mesh=mesh, stamps=self.stamps))
        for rank in range(len(self.held)):
            write_rank(path, self._record(rank, mesh))
        return dump_of(read_files(path))

    def _record(self, rank: int, mesh: MeshRecord) -> RankRecord:
        named, digests = self.held[rank], self.digests or {}
        bodies = list(dict.fromkeys(named.values()))
        tensors = [
            TensorRecord(f.prefix, body, f.numbers, f.suffix, "".join(digests.get(name, "") for name in f.names()))
            for f, body in fold((name, bodies.index(body)) for name, body in named.items())
        ]
        return RankRecord(1, rank, len(self.held), "host", (mesh,), bodies=tuple(bodies), tensors=tuple(tensors))


def body(rows: int = 4, moment: Moment = "initial") -> Body:
    return Body("param", moment, (4, 2), (rows, 2), "float32")


def lines(dump: Dump) -> list[tuple[str, list[int]]]:
    return [(tensor.name, list(tensor.shards)) for tensor in dump.tensors]


def test_layers_that_are_alike_on_every_rank_are_one_tensor(tmp_path: Path):
    names = [f"layers.{index}.w" for index in range(32)]
    dump = Ranks([dict.fromkeys(names, body())] * 3).dump(tmp_path / "a")
    assert lines(dump) == [("layers.[0-31].w", [0, 1, 2])]
    assert dump.tensors[0].names == names


def test_a_layer_that_differs_on_one_rank_splits_off_on_all(tmp_path: Path):
    alike = dict.fromkeys([f"layers.{index}.w" for index in range(8)], body())
    dump = Ranks([alike, alike | {"layers.3.w": body(2)}]).dump(tmp_path / "a")
    assert lines(dump) == [("layers.[0-2,4-7].w", [0, 1]), ("layers.3.w", [0, 1])]
    assert [shard.body.local_shape for shard in dump.tensors[1].shards.values()] == [(4, 2), (2, 2)]


def test_pipeline_stages_keep_their_own_layers_together(tmp_path: Path):
    first = dict.fromkeys(["embed", "layers.0.w", "layers.1.w"], body())
    last = dict.fromkeys(["layers.2.w", "layers.3.w", "head"], body())
    stamps = tuple(Stamp(name, 1 + 8 * index, (4, 2)) for index, name in enumerate([*first, *last]))
    assert lines(Ranks([first, first, last, last], stamps).dump(tmp_path / "a")) == [
        ("embed", [0, 1]),
        ("layers.[0-1].w", [0, 1]),
        ("layers.[2-3].w", [2, 3]),
        ("head", [2, 3]),
    ]


def test_stages_that_share_a_layer_have_it_as_a_tensor_of_its_own(tmp_path: Path):
    first = dict.fromkeys(["layers.0.w", "layers.1.w"], body())
    last = dict.fromkeys(["layers.1.w", "layers.2.w"], body())
    assert lines(Ranks([first, last]).dump(tmp_path / "a")) == [
        ("layers.0.w", [0]),
        ("layers.1.w", [0, 1]),
        ("layers.2.w", [1]),
    ]


def test_digests_follow_their_names_when_layers_are_regrouped(tmp_path: Path):
    digests = {f"layers.{index}.w": f"{index:016x}" for index in range(4)}
    alike = dict.fromkeys(digests, body())
    dump = Ranks([alike, alike | {"layers.1.w": body(2)}], digests=digests).dump(tmp_path / "a")
    assert [tensor.name for tensor in dump.tensors] == ["layers.[0,2-3].w", "layers.1.w"]
    for tensor in dump.tensors:
        for shard in tensor.shards.values():
            assert [shard.digest(index) for index in range(len(tensor.names))] == [digests[n] for n in tensor.names]


def test_tensors_come_in_the_order_of_the_model(tmp_path: Path):
    names = ["tail", "w.2", "w.10", "embed", "late"]
    stamps = tuple(Stamp(name, 1 + 8 * index, (4, 2)) for index, name in enumerate(names[:-1]))
    held = {name: body(1 + index, "stamped") for index, name in enumerate(reversed(names))}
    assert [tensor.name for tensor in Ranks([held], stamps).dump(tmp_path / "a").tensors] == names


def test_stages_come_stamped_first_then_initial_then_step(tmp_path: Path):
    dump = dump_of(read_files(write_sample(tmp_path / "a.shardviz")))
    assert [(tensor.moment, tensor.name) for tensor in dump.tensors] == [
        ("stamped", "embed"),
        ("stamped", "layers.[0-1].w"),
        ("stamped", "rope"),
        ("stamped", "flat"),
        ("stamped", "big"),
        ("stamped", "head"),
        ("initial", "layers.[0-1].w"),
        ("step", "output"),
    ]
    assert [tensor.name for tensor in dump.at("step")] == ["output"]


def ids_of(dump: Dump, rank: int, name: str) -> list[object]:
    tensor = dump.find("stamped", "param", name) or dump.find("stamped", "buffer", name)
    assert tensor is not None
    ids: list[object] = dump.local_ids(tensor.shards[rank], name).tolist()
    return ids


def test_ids_count_from_one_in_their_own_tensor_in_every_form(tmp_path: Path):
    dump = dump_of(read_files(write_sample(tmp_path / "a.shardviz")))
    assert ids_of(dump, 0, "layers.1.w") == [[1, 2, 3], [4, 5, 6]]  # held
    assert ids_of(dump, 1, "layers.1.w") == [[7, 8, 9], [10, 11, 12]]
    assert ids_of(dump, 1, "flat") == [4, 5]  # held, in FSDP1's concatenation
    assert ids_of(dump, 1, "embed") == [[3, 4], [5, 6]]  # runs
    assert ids_of(dump, 1, "head") == [[3, 4], [5, 6]]  # runs of ids that it shares with what it is tied to
    assert ids_of(dump, 0, "rope") == [[1, 2], [3, ID_NONE]]  # runs, with a value that is no id
    assert ids_of(dump, 0, "big") == [[1, 2], [3, 4]]  # dense


def test_zeros_strangers_and_no_ids_are_distinguished(tmp_path: Path):
    ids = {0: np.array([[1, 2], [999, 4]]), 1: np.array([[0, -1], [3, 100]])}
    path = make_dump(tmp_path / "a.shardviz", MESH, {"w": Made("[4/tp, 2]", ids=ids), "other": "[100]"})
    dump = dump_of(read_files(path))
    assert ids_of(dump, 1, "w") == [[0, ID_NONE], [3, -1 - 100]]
    assert ids_of(dump, 0, "w") == [[1, 2], [ID_NONE, 4]]  # no tensor has so many


def test_ids_of_a_plain_tensor_that_was_cut_by_hand_count_in_the_stamped_shape(tmp_path: Path):
    """Each rank keeps its own columns as a plain tensor, and knows its own shape only."""
    ranks = [
        {"w": Body("param", "stamped", (2, 3), (2, 3), "float32", held=(((0, 2),), ((start, start + 3),)))}
        for start in (0, 3)
    ]
    dump = Ranks(ranks, (Stamp("w", 1, (2, 6)),)).dump(tmp_path / "a")
    assert [ids_of(dump, rank, "w") for rank in range(2)] == [[[1, 2, 3], [7, 8, 9]], [[4, 5, 6], [10, 11, 12]]]


@cases(60)
@given(layouts())
def test_any_layout_written_to_a_dump_gives_back_its_own_ids(tmp_path_factory: pytest.TempPathFactory, layout: Layout):
    assume(layout.placements() is not None)
    path = make_dump(tmp_path_factory.mktemp("any") / "a.shardviz", layout.mesh, {"x": "[7]", "w": write(layout)})
    dump = dump_of(read_files(path))
    tensor = dump.find("stamped", "param", "w")
    assert tensor is not None
    assert tensor.claimed is not None
    assert tensor.claimed.same_regions(layout)
    for rank, region in layout.regions():
        found = dump.local_ids(tensor.shards[rank], "w")
        assert np.array_equal(found, region.flat_ids(layout.index_shape) + 1)


def test_ids_that_are_not_there_or_too_many_are_reported(tmp_path: Path):
    giant = Body("param", "stamped", (1 << 40,), (1 << 40,), "float32", held=(((0, 1 << 40),),))
    dump = Ranks([{"none": body(moment="stamped"), "giant": giant}]).dump(tmp_path / "a")
    for name, message in (
        ("none", "none: rank 0 has no ids in the dump"),
        ("giant", f"giant: rank 0 holds 1,099,511,627,776 ids, more than {MAX_ELEMENTS:,}"),
    ):
        with pytest.raises(DumpError) as caught:
            ids_of(dump, 0, name)
        assert caught.value.message == message


def test_values_are_numbers_in_the_local_shape(tmp_path: Path):
    dump = dump_of(read_files(write_sample(tmp_path / "a.shardviz")))
    (tensor,) = dump.at("initial")
    found = dump.values(tensor.shards[1], "layers.0.w")
    assert np.array_equal(found, [[1, 2.5, np.nan], [0, -1, -np.inf]], equal_nan=True)


def test_ranks_that_claim_differently_are_kept_apart(tmp_path: Path):
    path = make_dump(tmp_path / "a.shardviz", MESH, {"w": "[4/tp, 2]"})
    other = make_dump(tmp_path / "b.shardviz", MESH, {"w": Made("[4, 2/tp]", held="[4/tp, 2]")})
    (path / "rank_00001.json").write_bytes((other / "rank_00001.json").read_bytes())
    (tensor,) = dump_of(read_files(path)).tensors
    claims = {write(layout): list(ranks) for layout, ranks in tensor.claims.items() if layout}
    assert claims == {"[4/tp, 2]": [0], "[4, 2/tp]": [1]}


def test_runs_are_laid_out_one_after_the_other():
    assert expand_runs([(5, 1, 3), (0, 0, 2), (9, -2, 3)]).tolist() == [5, 6, 7, 0, 0, 9, 7, 5]
    assert expand_runs([]).tolist() == []


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("layers.*.wq.weigth", "did you mean layers.*.wq.weight?"),
        ("*.weigth", "did you mean *.weight?"),
        ("layer.*.wo.bias", "did you mean layers.*.wo.bias?"),
        ("haed.weight", "did you mean head.weight?"),
        ("*.zzz", "it has embed.weight, layers.0.wq.weight, layers.0.wo.bias and 3 more"),
    ],
)
def test_a_misspelt_name_or_pattern_gets_one_that_fits(written: str, hint: str) -> None:
    layers = [f"layers.{n}.{end}" for n in range(2) for end in ("wq.weight", "wo.bias")]
    assert hint_at_name(written, ["embed.weight", *layers, "head.weight"]) == hint

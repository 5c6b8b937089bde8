"""What a checkpoint's metadata shows: healthy ones are quiet, and each fault has its finding."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from shardviz.check.grouping import ungrouped
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.errors import DumpError
from shardviz.picture.text.checkpoint import total
from tests.checkpoint.saving import FORMATS

WEIGHT = "app.model.0.weight"


def found(path):
    report = check_checkpoint(open_checkpoint(path))
    return [(one.kind, one.tensor, one.sentence) for one in ungrouped(report.findings)]


def chunks(metadata, name=WEIGHT):
    return metadata.state_dict_metadata[name].chunks


@pytest.mark.parametrize("name", FORMATS)
def test_a_healthy_checkpoint_is_quiet(saved, name):
    report = check_checkpoint(open_checkpoint(saved / name))
    assert (report.findings, report.not_checked) == ((), ())


# Chunks


def test_a_chunk_that_is_not_there_is_a_gap(edited):
    ((kind, tensor, text),) = found(edited(lambda metadata: chunks(metadata).pop(1)))
    assert (kind, tensor) == ("missing", WEIGHT)
    assert "96 of 384 elements are in none of its 3 chunks, the first at [12:18, 0:16]" in text


def test_a_chunk_twice_is_an_overlap(edited):
    ((kind, tensor, text),) = found(edited(lambda metadata: chunks(metadata).append(chunks(metadata)[0])))
    assert (kind, tensor) == ("duplicated", WEIGHT)
    assert "96 of 384 elements are in several of its 5 chunks, the first at [0:6, 0:16]" in text


def test_a_chunk_beyond_the_tensor_is_out_of_bounds(edited):
    def shrink(metadata):
        metadata.state_dict_metadata[WEIGHT].size = torch.Size([20, 16])

    assert ("wrong-shape", WEIGHT) in [(kind, tensor) for kind, tensor, _ in found(edited(shrink))]


def test_a_larger_tensor_than_its_chunks_has_a_gap_at_its_end(edited):
    def grow(metadata):
        metadata.state_dict_metadata[WEIGHT].size = torch.Size([26, 16])

    (kind, text), *states = [(kind, text) for kind, _, text in found(edited(grow))]
    assert kind == "missing"
    assert {kind for kind, _ in states} == {"wrong-shape"}  # the moments have the smaller shape
    assert "32 of 416 elements" in text
    assert "[24:26, 0:16]" in text


def test_a_chunk_without_a_file_is_incomplete(edited):
    def forget(metadata):
        metadata.storage_data = {key: at for key, at in metadata.storage_data.items() if key.fqn != "app.model.2.bias"}

    assert [(kind, tensor) for kind, tensor, _ in found(edited(forget))] == [("incomplete", "app.model.2.bias")] * 2


def test_chunks_of_a_ragged_cut_that_are_all_of_a_tensor_are_quiet(tmp_path):
    dcp.save({"w": torch.arange(24.0).reshape(6, 4)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    path = tmp_path / "ckpt" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    cuts = [((0, 0), (4, 1)), ((0, 1), (1, 3)), ((1, 1), (3, 3)), ((4, 0), (2, 4))]
    metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(*map(torch.Size, cut)) for cut in cuts]
    path.write_bytes(pickle.dumps(metadata))
    assert not {kind for kind, *_ in found(tmp_path / "ckpt")} & {"missing", "duplicated"}


@pytest.mark.parametrize("change", [lambda shape: torch.Size([3, 32]), lambda shape: torch.Size([6, 8])])
def test_a_chunk_that_is_stored_in_another_shape_is_found(edited, change):
    def reshape(metadata):
        one = chunks(metadata)[0]
        one.sizes = change(one.sizes)

    assert "wrong-shape" in [kind for kind, *_ in found(edited(reshape))]


def test_shards_of_one_tensor_in_different_types_are_found(saved, edited):
    def mix(metadata):
        metadata.state_dict_metadata[WEIGHT].properties.dtype = torch.bfloat16

    ((kind, tensor, text),) = found(edited(mix))
    assert (kind, tensor) == ("wrong-shape", WEIGHT)
    assert "4 of 4 chunks" in text
    assert "float32[6, 16], not bfloat16[6, 16]" in text


# Files


def test_a_missing_and_a_short_file_are_one_finding_each(copied):
    folder = copied("dcp")
    (folder / "__1_0.distcp").unlink()
    short = folder / "__2_0.distcp"
    short.write_bytes(short.read_bytes()[:-200])
    missing, cut = check_checkpoint(open_checkpoint(folder)).findings
    assert missing.kind == cut.kind == "incomplete"
    assert "__1_0.distcp is missing" in missing.summary
    assert f"__2_0.distcp has {short.stat().st_size:,} bytes of at least" in cut.summary
    assert WEIGHT in missing.tensors  # so that none of them has a tick


def test_a_damaged_archive_is_named(copied):
    folder = copied("dcp")
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[:1900] = bytes(1900)
    file.write_bytes(data)
    ((kind, _, text),) = found(folder)
    assert kind == "incomplete"
    assert "__0_0.distcp" in text


def indexed(folder, weight_map, **files):
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file({one: np.arange(4.0) + at for at, one in enumerate(tensors)}, folder / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{file}.safetensors" for name, file in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_an_index_that_is_right_is_quiet(tmp_path):
    folder = indexed(tmp_path, {"v": "a", "w": "b"}, a=["v"], b=["w"], unused=["x"])
    assert not found(folder)
    assert open_checkpoint(folder / "model.safetensors.index.json").path == folder


def test_an_index_and_its_files_that_disagree_are_found(tmp_path):
    folder = indexed(tmp_path, {"v": "a", "w": "b", "gone": "b", "lost": "c"}, a=["v", "w"], b=["extra"])
    texts = {tensor: text for _, tensor, text in found(folder)}
    assert texts["lost"].endswith("c.safetensors is missing: 1 entry in it cannot be read")
    assert "the index says that it is in b.safetensors, but a.safetensors has it" in texts["w"]
    assert "no file has it" in texts["gone"]
    assert "the index does not name it" in texts["extra"]
    assert "v" not in texts


def test_tensors_of_a_missing_file_are_named_and_counted(tmp_path):
    layers = {f"layers.{number}.w": "a" if number < 10 else "b" for number in range(40)}
    folder = indexed(tmp_path, layers, a=list(layers)[:10], b=list(layers)[10:])
    whole = open_checkpoint(folder)
    assert check_checkpoint(whole).num_tensors == 40
    assert "40 tensors" in total(whole)
    (folder / "b.safetensors").unlink()
    lacking = open_checkpoint(folder)
    (finding,) = check_checkpoint(lacking).findings
    assert (finding.title, len(finding.tensors)) == ("layers.[10-39].w", 30)
    assert check_checkpoint(lacking).num_tensors == 40
    assert "10 of 40 tensors" in total(lacking)


def test_one_name_whole_in_two_files_is_an_overlap(tmp_path):
    for file in "ab":
        save_file({"w": np.arange(4.0)}, tmp_path / f"{file}.safetensors")
    ((kind, tensor, _),) = found(tmp_path)
    assert (kind, tensor) == ("duplicated", "w")


# Ties


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_that_are_saved_twice_and_differ_are_untied(tmp_path, same, tied):
    embedding = np.arange(12.0).reshape(4, 3)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + (not same)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    assert [kind for kind, *_ in found(tmp_path)] == (["untied"] if tied and not same else [])


# Optimizer state


@pytest.mark.parametrize(("name", "before"), [("dcp", "app.model."), ("flat", "model.")])
def test_state_of_a_parameter_that_is_not_there_is_foreign(edited, name, before):
    def drop(metadata):
        del metadata.state_dict_metadata[f"{before}2.bias"]

    ((kind, tensor, text),) = found(edited(drop, name))
    assert kind == "foreign"
    assert ".state.2.bias." in tensor
    assert f"{before}2.bias" in text


@pytest.mark.parametrize(("name", "before"), [("dcp", "app.optimizer."), ("flat", "optim.")])
def test_a_parameter_that_its_optimizer_names_and_has_no_state_of_is_incomplete(edited, name, before):
    def drop(metadata):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            del metadata.state_dict_metadata[f"{before}state.2.bias.{key}"]

    ((kind, tensor, text),) = found(edited(drop, name))
    assert (kind, tensor.rpartition("model.")[2]) == ("incomplete", "2.bias")
    assert "the optimizer's groups name it, but it has no state; 3 others have some" in text


@pytest.mark.parametrize("key", ["step", "exp_avg_sq"])
@pytest.mark.parametrize(("name", "before"), [("dcp", "app.optimizer."), ("flat", "optim.")])
def test_a_single_state_that_one_parameter_lacks_is_incomplete(edited, name, before, key):
    def drop(metadata):
        del metadata.state_dict_metadata[f"{before}state.2.bias.{key}"]

    ((kind, tensor, text),) = found(edited(drop, name))
    assert (kind, tensor.partition(".state.")[2].rpartition(".")[0]) == ("incomplete", "2.bias")
    assert f"2.bias and no {key}; 3 other parameters have one" in text


def test_optimizers_that_keep_other_states_of_some_parameters_are_quiet(tmp_path):
    model = {**{f"m{at}": torch.zeros(2, 2) for at in range(5)}, **{f"v{at}": torch.zeros(2) for at in range(3)}}
    rows = {"exp_avg_sq_row": torch.zeros(2), "exp_avg_sq_col": torch.zeros(2), "step": torch.tensor(1.0)}
    both = {"exp_avg": torch.zeros(2), "step": torch.tensor(1.0)}
    state = {name: dict(rows if name[0] == "m" else {"exp_avg_sq": torch.zeros(2), "step": 1}) for name in model}
    dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=tmp_path / "adafactor", no_dist=True)
    assert not found(tmp_path / "adafactor")
    more = {"max_exp_avg_sq": torch.zeros(2)}
    state = {f"v{at}": {**both, **(more if at else {})} for at in range(3)}
    vectors = {name: one for name, one in model.items() if name in state}
    dcp.save({"model": vectors, "optim": {"state": state}}, checkpoint_id=tmp_path / "amsgrad", no_dist=True)
    assert not found(tmp_path / "amsgrad")


def test_state_of_another_shape_than_its_parameter_is_found(tmp_path):
    state = {"w": {"exp_avg": torch.zeros(2, 3), "step": torch.tensor(1.0)}}
    dcp.save({"model": {"w": torch.zeros(3, 2)}, "optim": {"state": state}}, checkpoint_id=tmp_path / "c", no_dist=True)
    ((kind, tensor, _),) = found(tmp_path / "c")
    assert (kind, tensor) == ("wrong-shape", "optim.state.w.exp_avg")


def test_frozen_parameters_are_quiet(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    state = {name: {"exp_avg": torch.zeros_like(one)} for name, one in trained.items()}
    groups = [{"params": list(trained), "lr": 0.1}]
    parts = {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}
    dcp.save(parts, checkpoint_id=tmp_path / "c", no_dist=True)
    report = check_checkpoint(open_checkpoint(tmp_path / "c"))
    assert (report.findings, report.not_checked) == ((), ())


def test_two_models_with_an_optimizer_each_are_told_apart(tmp_path):
    def part():
        return {"model": {"w": torch.zeros(2)}, "optim": {"state": {"w": {"exp_avg": torch.zeros(2)}}}}

    dcp.save({"actor": part(), "critic": part()}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not found(tmp_path / "c")


def test_state_of_another_model_is_not_judged(tmp_path):
    states = {f"layers.{at}.w": {"exp_avg": torch.zeros(2)} for at in range(3)}
    parts = {"other": {"layers": {"0": {"w": torch.zeros(2)}}}, "optim": {"state": states}}
    dcp.save(parts, checkpoint_id=tmp_path / "c", no_dist=True)
    report = check_checkpoint(open_checkpoint(tmp_path / "c"))
    assert not report.findings
    (unchecked,) = report.not_checked
    assert "whether its states belong to parameters" in unchecked.why


def test_a_module_called_state_is_no_optimizer(tmp_path):
    dcp.save(
        {"mixer": {"state": {"proj": {"weight": torch.zeros(2)}}}, "w": torch.zeros(2)},
        checkpoint_id=tmp_path / "c",
        no_dist=True,
    )
    report = check_checkpoint(open_checkpoint(tmp_path / "c"))
    assert (report.findings, report.not_checked) == ((), ())


# The bytes of a safetensors file


def with_header(path, header, size=96):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def entry(begin, end, shape=(4, 6), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_tensors_that_share_bytes_are_duplicated(tmp_path):
    path = with_header(tmp_path / "m.safetensors", {"w": entry(0, 96), "v": entry(48, 144)}, 144)
    ((kind, tensor, text),) = found(path)
    assert (kind, tensor) == ("duplicated", "v")
    assert text.endswith("of m.safetensors are w's too")


@pytest.mark.parametrize(
    ("header", "lost"),
    [
        ({"w": entry(0, 96)}, "4 bytes"),
        ({"w": entry(0, 48, (2, 6)), "v": entry(52, 100, (2, 6))}, "4 bytes"),
        ({"w": entry(0, 40, (2, 5)), "v": entry(52, 92, (2, 5))}, "20 bytes"),
    ],
)
def test_bytes_of_no_tensor_are_incomplete(tmp_path, header, lost):
    ((kind, tensor, text),) = found(with_header(tmp_path / "m.safetensors", header, 100))
    assert (kind, tensor) == ("incomplete", "")
    assert text.startswith(f"{lost} of m.safetensors are of no tensor")


def test_an_element_type_that_nobody_knows_is_not_checked(tmp_path, capsys):
    path = with_header(tmp_path / "m.safetensors", {"w": entry(0, 96, dtype="Q4\x1b[31m"), "v": entry(96, 192)}, 192)
    (one,) = check_checkpoint(open_checkpoint(path)).not_checked
    assert one.tensor == "w"
    assert "dtype q4\\u001b[31m is not known here" in one.why
    assert main(["check", str(path), "--strict"]) == 1
    assert main(["show", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_tensors_without_elements_and_dcps_parts_share_nothing(tmp_path):
    save_file({"a": np.ones((2, 3)), "b": np.zeros((0, 4)), "c": np.ones(5)}, tmp_path / "m.safetensors")
    assert found(tmp_path / "m.safetensors") == []


# Types that are not read


class Quantized(torch.Tensor):
    """A tensor of a type of its own, as torchao's quantized weights are."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)

    def __init__(self, data):
        self.data_of_it = data

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        if function is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(function)


def test_a_quantized_weight_is_not_checked_and_not_called_damaged(tmp_path):
    weights = {"plain": torch.zeros(4), "quantized": Quantized(torch.zeros(4, dtype=torch.int8))}
    dcp.save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = check_checkpoint(open_checkpoint(tmp_path / "dcp"))
    assert report.findings == ()
    (one,) = report.not_checked
    assert one.tensor == "quantized"
    assert "a tensor subclass, such as a quantized weight" in one.why
    torch.save(weights, tmp_path / "all.pt")
    with pytest.raises(DumpError, match="_rebuild_wrapper_subclass") as error:
        open_checkpoint(tmp_path / "all.pt")
    assert "as safetensors" in error.value.hint


def test_settings_without_weights_are_a_save_that_was_not_finished(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["check", str(tmp_path)]) == 2
    assert "has config.json and no weights" in capsys.readouterr().err

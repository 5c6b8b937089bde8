"""The jobs of demos/frameworks under `shardviz run`: right ones are all in order, and a live bug is named.

Runs where the libraries are installed; they are no dependency.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardviz.check.run import check_dump
from shardviz.cli import main
from tests.live.run.jobs import without_aborts

DEMOS = Path(__file__).parents[2] / "demos" / "frameworks"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def run(folder, name, *words, command=TORCHRUN, options=()):
    shutil.copy(DEMOS / name, folder)
    job = (sys.executable, *command, name, *words)
    return started(folder, [sys.executable, "-m", "shardviz", "run", "-o", "job.shardviz", *options, "--", *job])


def not_in_order(folder):
    report = check_dump(folder / "job.shardviz")
    return {(one.kind, one.tensor) for finding in report.findings for one in finding.each}


def started(folder, command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return without_aborts(
        lambda: subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
        ),
        folder,
    )


def test_a_mixtral_under_transformers_own_plan_is_in_order(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "transformers_tp.py")
    assert ran.returncode == 0, ran.stderr
    assert "all 23 tensors are in order" in ran.stdout


def test_a_plan_that_labels_fused_experts_as_one_dim_is_named(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "transformers_tp.py", "wrong")
    assert ran.returncode == 1, ran.stderr
    (finding,) = check_dump(tmp_path / "job.shardviz").findings
    assert (finding.kind, finding.claimed, finding.held) == ("misordered", "[4, 256/tp, 64]", "[4, 256/2/tp, 64]")


@pytest.mark.parametrize(("words", "code"), [((), 0), (("wrong",), 1)])
def test_transformers_own_loader_is_checked_by_a_stamped_copy(tmp_path, words, code):
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
    assert run(tmp_path, "transformers_tp.py").returncode == 0
    assert main(["stamp-checkpoint", str(tmp_path / "tiny"), "-o", str(tmp_path / "stamped")]) == 0
    job = (DEMOS / "transformers_tp.py").read_text().replace('from_pretrained("tiny"', 'from_pretrained("stamped"')
    (tmp_path / "job.py").write_text(job)
    command = [sys.executable, "-m", "shardviz", "run", "--reference", "stamped", "-o", "job.shardviz", "--force"]
    ran = started(tmp_path, [*command, "--", sys.executable, *TORCHRUN, "job.py", *words])
    assert ran.returncode == code, ran.stderr
    assert not_in_order(tmp_path) == {
        ("misordered", f"model.layers.{layer}.mlp.experts.gate_up_proj") for layer in range(2 * code)
    }


def test_copies_under_the_trainer_are_in_order(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "trainer.py")
    assert ran.returncode == 0, ran.stderr
    assert "all 23 tensors are in order" in ran.stdout


def test_lightnings_model_parallel_strategy_is_in_order(tmp_path):
    pytest.importorskip("lightning", reason="needs lightning: pip install lightning")
    ran = run(tmp_path, "lightning_2d.py", command=())
    assert ran.returncode == 0, ran.stderr
    assert "float32[32/tensor_parallel/data_parallel, 16]" in ran.stdout
    assert "all 4 tensors are in order" in ran.stdout


CALLBACKS = {
    "trainer.py": ("=tokens)", "=tokens, callbacks=[shardviz.TrainerCallback('one.shardviz')])"),
    "lightning_2d.py": ("max_steps=2,", "max_steps=2, callbacks=[shardviz.LightningCallback('one.shardviz')],"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "library"), [("trainer.py", "accelerate"), ("lightning_2d.py", "lightning")])
def test_one_line_with_a_callback_writes_the_same(tmp_path, name, library):
    pytest.importorskip(library, reason=f"needs {library}: pip install {library}")
    before, after = CALLBACKS[name]
    script = (DEMOS / name).read_text()
    assert before in script
    (tmp_path / name).write_text("import shardviz\n" + script.replace(before, after))
    how = TORCHRUN if name == "trainer.py" else ()
    job = [sys.executable, *how, name]
    done = started(tmp_path, job)
    assert done.returncode == 0, done.stderr
    report = check_dump(tmp_path / "one.shardviz")
    assert not report.findings
    assert not report.not_checked


def test_every_stage_of_deepspeeds_zero_is_in_order(tmp_path):
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    for stage in ("1", "2", "3"):
        folder = tmp_path / stage
        folder.mkdir()
        ran = run(folder, "deepspeed_zero.py", stage)
        assert ran.returncode == 0, ran.stderr
        assert "all 8 tensors are in order" in ran.stdout


MASTERS = {f"{name}.fp32" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
LINKED = {"0.bias.fp32", "2.weight.fp32"}
"""What round_robin_gradients of DeepSpeed 0.19.8 links to elements of each other."""

ZERO = [
    (("1", "exchanged"), MASTERS),
    (("1", "shifted"), MASTERS - {"0.weight.fp32"}),
    (("1", "skipped"), {"2.weight"}),
    (("1", "wrong"), LINKED),
    (("2", "exchanged"), MASTERS),
    (("2", "shifted"), MASTERS - {"0.weight.fp32"}),
    (("2", "skipped"), {"2.weight"}),
    (("2", "wrong"), LINKED),
    (("3", "exchanged"), {"0.weight"}),
    (("3", "shifted"), MASTERS),
    (("3", "skipped"), {"2.weight"}),
    (("3", "wrong"), {"0.weight"}),
]
"""Stages and faults, each with the tensors that are named and no others."""


@pytest.mark.parametrize(("words", "wrong"), ZERO, ids=lambda one: "-".join(one) if isinstance(one, tuple) else "")
def test_harm_to_what_deepspeed_holds_is_named(tmp_path, words, wrong):
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    ran = run(tmp_path, "deepspeed_zero.py", *words)
    assert ran.returncode == 1, ran.stderr
    found = not_in_order(tmp_path)
    assert {name for _, name in found} == wrong
    assert {kind for kind, _ in found} <= {"misordered", "misordered-within-shard", "foreign"}


GATED = {("misordered", "gated.weight"), ("misordered", "gated.bias")}
EXCHANGED = {("misordered", "up.weight"), ("misordered", "up.bias"), ("misordered", "down.weight"), *GATED}


@pytest.mark.parametrize(
    ("words", "code", "wrong"),
    [
        ((), 0, set()),
        (("exchanged",), 1, EXCHANGED),
        (("skipped",), 1, {("foreign", "up.weight")}),
        (("unstrided",), 1, GATED),
        (("wrong",), 1, GATED),
    ],
)
def test_layers_of_megatron_are_compared_with_a_reference(tmp_path, words, code, wrong):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    shutil.copy(DEMOS / "megatron_layers.py", tmp_path)
    whole = started(tmp_path, [sys.executable, *TORCHRUN, "megatron_layers.py"])
    assert whole.returncode == 0, whole.stderr
    ran = run(tmp_path, "megatron_layers.py", *words, options=("--reference", "whole.safetensors"))
    assert ran.returncode == code, ran.stderr
    assert not_in_order(tmp_path) == wrong
    assert {one.tensor for one in check_dump(tmp_path / "job.shardviz").not_checked} == {"norm.weight", "norm.bias"}


def test_layers_born_split_are_compared_with_the_file_that_their_job_opened(tmp_path):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "megatron_layers.py")
    assert ran.returncode == 0, ran.stderr
    assert "whole.safetensors" in ran.stderr
    assert "✓ up.weight" in ran.stdout
    assert {one.tensor for one in check_dump(tmp_path / "job.shardviz").not_checked} == {"norm.weight", "norm.bias"}


def test_layers_born_split_that_load_nothing_are_not_checked(tmp_path):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    text = (DEMOS / "megatron_layers.py").read_text(encoding="utf-8")
    (tmp_path / "drawn.py").write_text(text.replace("    load(block, words)\n", ""), encoding="utf-8")
    ran = started(tmp_path, [sys.executable, "-m", "shardviz", "run", "--", sys.executable, *TORCHRUN, "drawn.py"])
    assert ran.returncode == 2, ran.stderr
    assert "nothing was checked in 8 tensors" in ran.stderr
    assert "float32[48/tp, 16]" in ran.stdout


@pytest.mark.parametrize(("words", "wrong"), [((), set()), (("exchanged",), EXCHANGED)])
def test_layers_of_megatron_under_data_parallel_are_compared_along_both_axes(tmp_path, words, wrong):
    """DistributedDataParallel, over Megatron's data-parallel group, names only its own axis."""
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    text = (DEMOS / "megatron_layers.py").read_text(encoding="utf-8")
    loaded = "    load(block, words)\n"
    text = text.replace("rank = distributed.get_rank()", "rank = parallel_state.get_tensor_model_parallel_rank()")
    text = text.replace("if rank == 0:", "if distributed.get_rank() == 0:").replace("loss = block(", "loss = net(")
    group = "process_group=parallel_state.get_data_parallel_group()"
    text = text.replace(loaded, f"{loaded}    net = nn.parallel.DistributedDataParallel(block, {group})\n")
    (tmp_path / "copied.py").write_text(text, encoding="utf-8")
    job = [sys.executable, *TORCHRUN[:-1], "4", "copied.py", *words]
    ran = started(tmp_path, [sys.executable, "-m", "shardviz", "run", "-o", "job.shardviz", "--", *job])
    assert ran.returncode == bool(wrong), ran.stderr
    assert "float32[32/2/tp, 16]" in ran.stdout
    assert not_in_order(tmp_path) == wrong


NORMS = 5
"""Weights of a tiny Llama that are all ones, so that their order cannot be told."""


@pytest.mark.parametrize("words", [(), ("efficient",)])
def test_accelerate_under_fsdp2_is_in_order(tmp_path, words):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "accelerate_fsdp2.py", *words)
    assert ran.returncode == 0, ran.stderr
    assert f"no findings in 23 tensors on 2 ranks; {NORMS} tensors not checked" in ran.stdout


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("exchanged",), {("misordered", "model.layers.1.self_attn.q_proj.weight")}),
        (("efficient", "skipped"), {("foreign", "lm_head.weight")}),
    ],
)
def test_harm_after_accelerate_has_sharded_is_named(tmp_path, words, wrong):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "accelerate_fsdp2.py", *words)
    assert ran.returncode == 1, ran.stderr
    assert not_in_order(tmp_path) == wrong


QUERY = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("words", "code", "wrong"),
    [
        ((), 0, set()),
        (("exchanged",), 1, {("misordered", f"{QUERY}.weight"), ("misordered", f"{QUERY}.lora_A.default.weight")}),
        (("skipped",), 1, {("foreign", "model.layers.0.mlp.down_proj.weight")}),
    ],
)
def test_base_weights_and_adapters_of_peft_are_compared(tmp_path, words, code, wrong):
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    ran = run(tmp_path, "peft_lora.py", *words)
    assert ran.returncode == code, ran.stderr
    assert not_in_order(tmp_path) == wrong


TITAN = ("--parallelism.tensor_parallel_degree", "2", "--parallelism.spmd_backend", "partial_dtensor")


@pytest.mark.parametrize(
    ("config", "code", "wrong"),
    [
        ("loading", 0, set()),
        ("exchanged", 1, {("misordered", "layers.0.attention.wo.weight")}),
        ("skipped", 1, {("foreign", "layers.0.attention.wo.weight")}),
    ],
)
def test_torchtitans_trainer_is_compared_with_what_it_loads(tmp_path, config, code, wrong):
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install torchtitan triton")
    name, *job = "torchtitan_llama.py", "--module", "torchtitan_llama", "--config"
    shutil.copy(DEMOS / name, tmp_path)
    whole = started(tmp_path, [sys.executable, *TORCHRUN[:-1], "1", name, *job, "saving"])
    assert whole.returncode == 0, whole.stderr
    ran = run(tmp_path, name, *job, config, *TITAN)
    assert ran.returncode == code, ran.stderr
    assert not_in_order(tmp_path) == wrong
    assert {one.tensor for one in check_dump(tmp_path / "job.shardviz").not_checked} <= ROTARY


ROTARY = {f"layers.{layer}.attention.rope.cache" for layer in range(6)}


MOE = (
    "--parallelism.expert_parallel_degree", "2", "--parallelism.spmd_backend", "partial_dtensor"
)  # fmt: skip
MOE_JOB = ("torchtitan_moe.py", "--module", "torchtitan_moe", "--config")
W1 = "layers.1.moe.routed_experts.inner_experts.w1_EFD"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Return a folder with a whole checkpoint of torchtitan's tiny DeepSeek-V3."""
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install torchtitan triton")
    folder = tmp_path_factory.mktemp("moe")
    for name in ("torchtitan_llama.py", "torchtitan_moe.py", "../../tests/frameworks/faulty.py"):
        shutil.copy(DEMOS / name, folder)
    saved = started(folder, [sys.executable, *TORCHRUN[:-1], "1", *MOE_JOB, "saving"])
    assert saved.returncode == 0, saved.stderr
    return folder


@pytest.mark.parametrize(
    ("fault", "kind", "held"),
    [
        (None, None, None),
        ("exchanged", "misordered", "ep=i holds the shard of ep=1-i"),
        ("dealt", "misordered", "[8/4/ep, 256, 256]"),
        ("skipped", "foreign", ""),
    ],
)
def test_the_experts_of_torchtitans_deepseek_are_where_expert_parallelism_puts_them(moe, fault, kind, held):
    shutil.rmtree(moe / "outputs" / "mine", ignore_errors=True)
    job = (*(("faulty.py", fault, "torchtitan", W1) if fault else ()), *MOE_JOB, "loading", *MOE)
    how = (sys.executable, "-m", "shardviz", "run", "--force", "--steps", "1", "-o", "job.shardviz")
    ran = started(moe, [*how, "--", sys.executable, *TORCHRUN, *job])
    assert ran.returncode == bool(fault), ran.stderr
    assert "[8/ep/efsdp, 256, 256]" in ran.stdout
    report = check_dump(moe / "job.shardviz")
    assert not report.not_checked
    assert [(one.kind, one.tensor, one.held) for one in report.findings] == ([(kind, W1, held)] if fault else [])


@pytest.mark.parametrize(
    ("name", "words", "layout"),
    [
        ("transformers_ep.py", (), "bfloat16[4/ep/efsdp, 64, 64]"),
        ("transformers_ep.py", ("tp",), "bfloat16[4/ep, 64, 64]"),
        ("transformers_fsdp2.py", (), "float32[64/fsdp, 64]"),
        ("trainer.py", ("fsdp2",), "float32[32/dim0, 32]"),
    ],
)
def test_experts_and_shards_of_transformers_are_in_order(tmp_path, name, words, layout):
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
    ran = run(tmp_path, name, *words)
    assert ran.returncode == 0, ran.stderr
    assert layout in ran.stdout
    report = check_dump(tmp_path / "job.shardviz")
    assert not report.findings
    assert all("norm.weight" in one.tensor for one in report.not_checked), "norms are all ones"


@pytest.mark.parametrize(
    ("words", "code", "wrong"),
    [
        ((), 0, set()),
        (("exchanged",), 1, {("misordered", "up.weight"), ("misordered", "up.bias"), ("misordered", "down.weight")}),
        (("skipped",), 1, {("foreign", "up.weight")}),
    ],
)
def test_weights_annotated_by_spmd_types_are_compared_with_a_reference(tmp_path, words, code, wrong):
    pytest.importorskip("spmd_types", reason="needs spmd_types: pip install spmd_types")
    shutil.copy(DEMOS / "spmd_layers.py", tmp_path)
    whole = started(tmp_path, [sys.executable, *TORCHRUN, "spmd_layers.py"])
    assert whole.returncode == 0, whole.stderr
    ran = run(tmp_path, "spmd_layers.py", *words, options=("--reference", "whole.safetensors"))
    assert ran.returncode == code, ran.stderr
    assert "float32[48/tp, 16]" in ran.stdout
    assert not_in_order(tmp_path) == wrong

"""DeepSpeed's and Megatron-core's jobs under `shardviz run --trace`, each next to the same job of one process."""

import json
import sys
from pathlib import Path

import pytest

from tests.live.run.traced.test_traced import diff, run

ZERO, STAGES, MEGATRON = (
    Path(__file__).with_name(f"{name}.py") for name in ("deepspeed_steps", "deepspeed_stages", "megatron_steps")
)


def on(num_ranks, script, *words):
    return sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), str(script), *words


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install -e '.[frameworks]'")
    return run(tmp_path_factory.mktemp("zero"), "one", *on(1, ZERO, "0"))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    return run(tmp_path_factory.mktemp("megatron"), "one", sys.executable, str(MEGATRON), "1", "1", "unclipped")


def agrees(one, other):
    step, done = diff(one, other)
    assert json.loads(done.stdout)["not_compared"] == []
    assert (step["departures"], step["not_compared"]) == ([], [])
    return step["num_compared"]


def departure(one, other):
    first, *others = diff(one, other)[0]["departures"]
    assert others == []
    return first["module"] or "", f"{first['sentence']} {first['why']}"


@pytest.mark.parametrize("words", ["0", "1", "2", "3", "1 bf16", "3 bf16"])
def test_zero_in_two_micro_batches_agrees_with_one_process(zero, words):
    one = zero if "bf16" not in words else run(zero.parent, f"one {words}", *on(1, ZERO, *words.split()))
    assert agrees(one, run(zero.parent, words, *on(2, ZERO, *words.split()))) == 22  # 12 of weights, 10 of modules


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_a_loss_that_is_divided_by_the_code_and_by_deepspeed_is_named(zero, stage):
    _, text = departure(zero, run(zero.parent, f"divided{stage}", *on(2, ZERO, stage, "divided")))
    assert "4 gradients are 1/2 of" in text
    assert "the loss is divided by 2 twice" in text


def test_ranks_with_the_same_rows_under_zero_are_named(zero):
    _, text = departure(zero, run(zero.parent, "same_rows", *on(2, ZERO, "1", "same_rows")))
    assert "ranks 0-1 rows 0-3" in text


@pytest.mark.parametrize(
    ("num_ranks", "words"), [(2, "2 1"), (2, "1 1"), (2, "1 1 distributed"), (2, "1 2"), (4, "2 2")]
)
def test_megatron_agrees_with_one_process(megatron, num_ranks, words):
    other = run(megatron.parent, words, *on(num_ranks, MEGATRON, *words.split(), "unclipped"))
    assert agrees(megatron, other) > 200


def test_gradients_that_megatron_does_not_finish_are_named(megatron):
    other = run(megatron.parent, "unfinished", *on(2, MEGATRON, "1", "1", "unclipped", "unfinished"))
    _, text = departure(megatron, other)
    assert "the gradient differs along dp" in text
    assert "29 tensors" in text


def test_tensor_parallel_ranks_that_read_different_rows_are_named(megatron):
    _, text = departure(megatron, run(megatron.parent, "by_rank", *on(2, MEGATRON, "2", "1", "unclipped", "by_rank")))
    assert "ranks along tp were given different rows" in text


def test_deepspeeds_pipeline_clips_by_the_norm_of_its_first_stage(tmp_path):
    """Only the first of the ranks that share a model counts parameters that are not tensor-parallel (0.19.8)."""
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install -e '.[frameworks]'")
    for words in ((), ("clipped",)):
        one, two = (run(tmp_path, f"{num}{words}", *on(num, STAGES, str(num), *words)) for num in (1, 2))
        if words:
            assert "the norm of the gradients of rank 0 alone" in departure(one, two)[1]
        else:
            assert agrees(one, two) > 20

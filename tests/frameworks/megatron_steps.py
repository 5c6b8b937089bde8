"""Trains a small GPT of Megatron-core in a few steps: `megatron_steps.py TP PP [WORD...]`.

Megatron-core's optimizer names CUDA; `on_cpus` lets it run without. `distributed` trains by its distributed optimizer.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed

SEQUENCE, VOCABULARY, ROWS, PARTS, LAYERS = 16, 64, 8, 2, 2
WEIGHTS = Path("weights.pt")


def on_cpus():
    """Let what Megatron-core makes on CUDA devices be on the CPU."""

    def moved(make):
        def call(*args, **options):
            return make(*args, **options | ({"device": "cpu"} if "device" in options else {}))

        return call

    for name in ("tensor", "zeros", "empty", "ones", "full", "arange", "zeros_like", "empty_like"):
        setattr(torch, name, moved(getattr(torch, name)))
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda own, *args: type_of(own, *args) if args else type_of(own).replace("torch", "torch.cuda")
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.cuda.manual_seed, torch.cuda.synchronize = torch.manual_seed, lambda *_: None
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def model(tp, pp):
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def load(gpt, tp, pp):
    """Cut this rank's weights out of those that a job of one process has written."""
    if not WEIGHTS.exists():
        torch.save(dict(gpt.named_parameters()), WEIGHTS)
    first = LAYERS // pp * parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        for name, whole in torch.load(WEIGHTS).items():
            before, _, after = name.partition("layers.")
            if after:
                number, _, rest = after.partition(".")
                name = f"{before}layers.{int(number) - first}.{rest}"
            weight = dict(gpt.named_parameters()).get(name)
            if weight is not None and weight.shape != whole.shape:
                whole = whole.chunk(tp, weight.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]
            if weight is not None:
                weight.copy_(whole)


def parts(words):
    tokens = torch.randint(0, VOCABULARY, (3, ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    count, mine = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    if "by_rank" in words:
        count, mine = distributed.get_world_size(), distributed.get_rank()
    for batch in tokens:
        yield from batch.chunk(count)[mine].split(ROWS // count // PARTS)


def forward(tokens, gpt):
    batch = next(tokens)
    places = torch.arange(SEQUENCE).expand(len(batch), SEQUENCE)
    mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE)) < 0.5
    losses = gpt(batch[:, :-1], places, mask, labels=batch[:, 1:])
    return losses, partial(lambda returned: (returned.mean(), {"loss": returned.mean().detach()}))


def main(words):
    on_cpus()
    tp, pp = int(words[1]), int(words[2])
    is_distributed = "distributed" in words
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29534")):
        os.environ.setdefault(name, default)
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    gpt = model(tp, pp)
    load(gpt, tp, pp)
    reducing = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
    wrapped = DistributedDataParallel(gpt.config, reducing, gpt)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        clip_grad=0.0 if "unclipped" in words else 1.0,
        use_distributed_optimizer=is_distributed,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    gpt.config.finalize_model_grads_func = None if "unfinished" in words else finalize_model_grads
    tokens, run = parts(words), get_forward_backward_func()
    rows = ROWS // parallel_state.get_data_parallel_world_size() // PARTS
    for _ in range(3):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward, data_iterator=tokens, model=[wrapped], num_microbatches=PARTS,
            seq_length=SEQUENCE, micro_batch_size=rows, decoder_seq_length=SEQUENCE, forward_only=False,
        )  # fmt: skip
        optimizer.step()
    print("loss", losses)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)

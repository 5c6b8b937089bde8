"""Jobs whose loops are written by hand: optimizers of owners, hooks that reduce, curricula, stages with one buffer."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

BEGIN = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
"""
OWNERS = """
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 4))
owned = [parameter for at, parameter in enumerate(model.parameters()) if at % WORLD == RANK]
optimizer = torch.optim.Adam(owned, 0.01)
for x in torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1)):
    model(x.chunk(WORLD)[RANK]).square().mean().backward()
    for parameter in model.parameters() if WORLD > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    optimizer.step()
    for at, parameter in enumerate(model.parameters()):
        if WORLD > 1 and SENT:
            dist.broadcast(parameter.data, SOURCE)
        parameter.grad = None
"""
HOOKS = """
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Linear(5, 4))
LAST = [False]


def reduce(parameter):
    REDUCE


for parameter in model.parameters() if WORLD > 1 else ():
    parameter.register_post_accumulate_grad_hook(reduce)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(1)):
    for at, x in enumerate(batch.split(8)):
        LAST[0] = at == 2
        if ZEROED and WORLD > 1:
            model.zero_grad()
        (model(x.chunk(WORLD)[RANK]).square().sum() / 24).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CURRICULUM = """
embed, head = nn.Embedding(20, 6), nn.Linear(6, 20)
model = nn.Sequential(embed, nn.Tanh(), head)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
seen = 0
for batch in torch.randint(20, (4, 8, 13), generator=torch.Generator().manual_seed(1)):
    ids = batch.chunk(WORLD)[RANK][:, : min(12, 4 + seen // 4 * 2) + 1]
    cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    for parameter in model.parameters() if WORLD > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    optimizer.step()
    optimizer.zero_grad()
    seen += COUNT
"""
STAGES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x).tanh() if self.first is not None else x
        return self.last(self.norm(x)) if self.last is not None else x


model = Model()
if WORLD > 1 and RANK == 0:
    model.norm = model.last = None
elif WORLD > 1:
    model.first = None
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)):
    parts = batch.chunk(4)
    if WORLD == 1:
        for x in parts:
            model(x).square().mean().backward()
    elif RANK == 0:
        sent = [model(x) for x in parts]
        for x in sent:
            dist.send(x.detach(), 1)
        for x in sent:
            back = torch.empty_like(x)
            dist.recv(back, 1)
            x.backward(back)
    else:
        buffer, inputs = torch.empty(2, 8), []
        losses = []
        for _ in parts:
            dist.recv(buffer, 0)
            inputs.append(buffer.KEPT.requires_grad_())
            losses.append(model(inputs[-1]).square().mean())
        for x, loss in zip(inputs, losses):
            loss.backward()
            dist.send(x.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
"""
REDUNDANCY = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    called = DistributedDataParallel(model) if WORLD > 1 else model
    if WORLD > 1:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
        called(x.chunk(WORLD)[RANK]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


main()
"""
SUM = "dist.all_reduce(parameter.grad)"
LAST_SUM = f"{SUM} if LAST[0] else None"


def compared(folder, program, changes):
    """Return how the job on two ranks, with some changes, compares with the one on one rank."""
    text = BEGIN + program
    for word, code in changes.items():
        text = text.replace(word, code)
    script = folder / "train.py"
    script.write_text(text)
    alone = run(folder, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(folder, "many", *ranks, str(script)))
    return step


@nightly
@pytest.mark.parametrize(
    ("steps", "sent", "source", "causes"),
    [
        ("3", "True", "at % WORLD", []),
        ("3", "True", "(at + 1) % WORLD", ["step-overwritten"]),
        ("3", "False", "0", ["step-not-sent"]),
        ("3", "at < 5", "at % WORLD", ["step-not-sent"]),
        ("1", "True", "at % WORLD", []),
    ],
)
def test_weights_that_one_rank_steps_count_as_the_next_forward_begins(tmp_path, steps, sent, source, causes):
    step = compared(tmp_path, OWNERS, {"STEPS": steps, "SENT": sent, "SOURCE": source})
    assert sorted({departure["cause_id"] for departure in step["departures"]}) == causes, step
    unseen = [unchecked for unchecked in step["not_compared"] if "next forward" in unchecked["why"]]
    assert bool(unseen) == (steps == "1")


@nightly
@pytest.mark.parametrize(
    ("reduce", "zeroed", "cause"),
    [
        (SUM, "False", "micro-batches-reduced-again"),
        (LAST_SUM, "False", ""),
        (LAST_SUM, "True", "lost-micro-batches"),
    ],
)
def test_gradients_show_how_often_each_micro_batch_counts(tmp_path, reduce, zeroed, cause):
    step = compared(tmp_path, HOOKS, {"REDUCE": reduce, "ZEROED": zeroed})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


@nightly
@pytest.mark.parametrize(("count", "cause"), [("len(batch)", ""), ("len(ids)", "other-row-length")])
def test_rows_that_are_shorter_in_a_later_step_are_named(tmp_path, count, cause):
    step = compared(tmp_path, CURRICULUM, {"COUNT": count})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step
    assert step["num_with_rows"] == (0 if cause else 3)


@nightly
@pytest.mark.parametrize(("kept", "cause"), [("detach()", "overwritten-input"), ("detach().clone()", "")])
def test_an_input_that_is_overwritten_before_backward_is_named(tmp_path, kept, cause):
    step = compared(tmp_path, STAGES, {"KEPT": kept})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


OF_MODULES = {
    "self.last = nn.Linear(6, 8), nn": "self.last = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn",
    "self.first(x).tanh()": "self.first(x)",
}


@nightly
@pytest.mark.parametrize("is_reversed", [True, False])
def test_gradients_that_a_stage_sends_in_another_order_of_micro_batches_are_named(tmp_path, is_reversed):
    order = {"zip(inputs, losses)": "reversed([*zip(inputs, losses)])"} if is_reversed else {}
    step = compared(tmp_path, STAGES, {"KEPT": "detach().clone()"} | OF_MODULES | order)
    causes = [departure["cause_id"] for departure in step["departures"]]
    assert causes == ["gradients-of-other-micro-batches"] * is_reversed, step


@nightly
@pytest.mark.parametrize(("rate", "cause"), [("0.01", ""), ("0.01 * WORLD", "different-settings")])
def test_the_job_of_an_optimizer_whose_ranks_step_own_weights_ends(tmp_path, rate, cause):
    step = compared(tmp_path, REDUNDANCY, {"RATE": rate})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


SERVER = """
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    model(x.chunk(WORLD)[RANK]).square().mean().backward()
    for parameter in model.parameters() if WORLD > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    if RANK == 0:
        optimizer.step()
    for parameter in model.parameters() if WORLD > 1 and SENT else ():
        dist.broadcast(parameter.data, 0)
    model.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
"""


@nightly
@pytest.mark.parametrize(("sent", "cause"), [("True", ""), ("False", "no-step-on-ranks")])
def test_ranks_that_never_step_are_named_unless_another_rank_sends_its_weights(tmp_path, sent, cause):
    step = compared(tmp_path, SERVER, {"SENT": sent})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step
    assert cause or "something else writes the weights" in step["not_compared"][0]["why"], step


PAIRS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(5, 8)

    def forward(self, x, y):
        return self.first(x).tanh() * self.second(y).tanh()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
generator = torch.Generator().manual_seed(1)
for x, y in zip(torch.randn(2, 8, 6, generator=generator), torch.randn(2, 8, 5, generator=generator)):
    model(x.chunk(WORLD)[RANK], y.SECOND).square().mean().backward()
    for parameter in model.parameters() if WORLD > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize(
    ("second", "cause"),
    [("chunk(WORLD)[RANK]", ""), ("chunk(WORLD)[WORLD - 1 - RANK]", "rows-paired-otherwise")],
)
def test_rows_of_two_inputs_belong_together(tmp_path, second, cause):
    step = compared(tmp_path, PAIRS, {"SECOND": second})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


CENTER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 8)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        out = self.last(x)
        loss = (out - self.center).square().mean()
        with torch.no_grad():
            center = out.sum(0)
            if WORLD > 1:
                dist.all_reduce(center)
            self.center.mul_(0.9).add_(center / COUNT, alpha=0.1)
        return loss


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    model(x.chunk(WORLD)[RANK]).backward()
    for parameter in model.parameters() if WORLD > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize(("count", "cause"), [("(len(out) * WORLD)", ""), ("len(out)", "buffer-reduced-wrongly")])
def test_a_center_that_all_ranks_write_together_counts_all_rows(tmp_path, count, cause):
    step = compared(tmp_path, CENTER, {"COUNT": count})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


RESTORED = """
class Restoring(torch.optim.SGD):
    def step(self, closure=None):
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        super().step(closure)
        with torch.no_grad():
            for at, (parameter, old) in enumerate(zip(model.parameters(), kept)):
                if WORLD > 1 and at == FROZEN:
                    parameter.copy_(old)


model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = Restoring(model.parameters(), 0.1)
for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    model(x.chunk(WORLD)[RANK]).square().mean().backward()
    for parameter in model.parameters() if WORLD > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize(("frozen", "cause"), [("-1", ""), ("3", "step-without-effect")])
def test_a_step_that_leaves_a_weight_as_it_was_is_not_called_clipped(tmp_path, frozen, cause):
    step = compared(tmp_path, RESTORED, {"FROZEN": frozen})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


PADDED = """
WORDS, OWN = 9, -(-9 // WORLD)
HERE = slice(OWN * RANK, OWN * RANK + OWN)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        parts = [torch.empty_like(own) for _ in range(WORLD)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[..., HERE].contiguous()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS)

    def forward(self, ids):
        words = self.head(self.mix(self.embed(ids)).tanh())
        return Gathered.apply(words)[..., :READ] if WORLD > 1 else words


model = Model()
for name, parameter in list(model.head.named_parameters()) if WORLD > 1 else ():
    longer = torch.cat([parameter.data, torch.zeros(1, *parameter.shape[1:])])
    setattr(model.head, name, nn.Parameter(longer[HERE].clone()))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for ids in torch.randint(9, (2, 4, 7), generator=torch.Generator().manual_seed(1)):
    cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    for part in (model.embed, model.mix) if WORLD > 1 else ():
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize(
    ("read", "causes"),
    [("9", []), ("10", ["padding-read"]), ("10].masked_fill(torch.arange(10) >= 9, -torch.inf)[..., :10", [])],
    ids=["left out", "read", "masked"],
)
def test_a_vocabulary_that_is_padded_is_compared_without_its_padding(tmp_path, read, causes):
    step = compared(tmp_path, PADDED, {"READ": read})
    assert [departure["cause_id"] for departure in step["departures"]] == causes, step
    assert step["num_compared"] > 10


COLUMNS = """
class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(ORDER, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(WORLD, -1)[RANK]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids):
        return self.mix(self.norm(Whole.apply(self.embed(ids)) if WORLD > 1 else self.embed(ids)))


model = Model()
model.embed.weight = nn.Parameter(model.embed.weight.detach().chunk(WORLD, 1)[RANK].clone())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for ids in torch.randint(12, (3, 6, 4), generator=torch.Generator().manual_seed(1)):
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize(("order", "cause"), [("parts", ""), ("parts[::-1]", "joined-out-of-order")])
def test_features_that_are_joined_in_another_order_are_named_before_the_norm_that_reads_them(tmp_path, order, cause):
    step = compared(tmp_path, COLUMNS, {"ORDER": order})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step
    assert not cause or "calls norm after embed" in str(step)


COPIES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
if WORLD > 1:
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)):
    (model(x).square().mean() * TIMES).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    parts = [gradient.to_local() if WORLD > 1 else gradient for gradient in gradients]
    norm = torch.stack([part.norm() for part in parts]).norm()
    for part in parts:
        part *= min(1.0, LIMIT / norm)
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize("limit", ["0.5", "1000.0"])
@pytest.mark.parametrize(("times", "cause"), [("1", ""), ("WORLD", "multiplied-term")])
def test_a_loss_times_all_ranks_is_named_where_fsdp_averages_over_fewer(tmp_path, limit, times, cause):
    step = compared(tmp_path, COPIES, {"LIMIT": limit, "TIMES": times})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step

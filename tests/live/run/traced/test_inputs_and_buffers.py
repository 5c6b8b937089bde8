"""Jobs with other numbers than weights: rounded inputs, buffers of own sizes, a loss's center, resumed data."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_by_hand import BEGIN, compared
from tests.live.run.traced.test_traced import diff, run

TIMESTEPS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, t):
        angles = t.float()[:, None] * torch.tensor([1.0, 0.7, 0.5, 0.3])
        return self.up(torch.cat([angles.cos(), angles.sin()], 1).to(self.up.weight.dtype))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.waves, self.up, self.down = Waves(), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x, t):
        return self.down((self.up(x.to(self.up.weight.dtype)) + self.waves(t)).tanh())


model = Model()
if WORLD > 1:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=CAST)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
generator = torch.Generator().manual_seed(1)
for x in torch.randn(3, 8, 6, generator=generator):
    t = torch.randint(257, 999, (8,), generator=generator) * 2.0 + 1
    model(x.chunk(WORLD)[RANK], t.chunk(WORLD)[RANK].to(GIVEN)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ANGLES = TIMESTEPS.replace(
    """    def forward(self, t):
        angles = t.float()[:, None] * torch.tensor([1.0, 0.7, 0.5, 0.3])
        return self.up(torch.cat([angles.cos(), angles.sin()], 1).to(self.up.weight.dtype))
""",
    """    def forward(self, waves):
        return self.up(waves.to(self.up.weight.dtype))


def waves(t):
    angles = t.float()[:, None] * torch.tensor([1.0, 0.7, 0.5, 0.3])
    return torch.cat([angles.cos(), angles.sin()], 1)
""",
).replace("self.waves(t)", "self.waves(waves(t))")
CENTERED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16)

    def forward(self, x):
        return self.up(x - x.mean(DIM, keepdim=True))


model = nn.Sequential(Stem(), nn.Tanh(), nn.Linear(16, 4))
if WORLD > 1:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(1)) + 1:
    model(x.chunk(WORLD)[RANK]).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NOISED = """
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.time, self.down = nn.Linear(6, 12), nn.Linear(1, 12), nn.Linear(12, 6)

    def forward(self, x, t):
        return self.down((self.up(x) + self.time(t[:, None])).tanh())


model = Model()
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
generator = torch.Generator().manual_seed(1)
for images in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(2)):
    own, t, noise = DRAWS
    (called((1 - t[:, None]) * own + t[:, None] * noise, t) - noise).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OWN = "images.chunk(WORLD)[RANK]"
ALIKE = f"{OWN}, torch.rand(8 // WORLD, generator=generator), torch.randn(8 // WORLD, 6, generator=generator)"
PARTS = (
    f"{OWN}, torch.rand(8, generator=generator).chunk(WORLD)[RANK], "
    "torch.randn(8, 6, generator=generator).chunk(WORLD)[RANK]"
)
FLATTENED = """
from torch.nn.parallel import DistributedDataParallel


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(1))

    def forward(self, t):
        return (t.float().reshape(-1) * self.frequency).sin()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.waves, self.up = Waves(), nn.Linear(4, 4)

    def forward(self, t):
        return self.up(self.waves(t)[:, None].expand(-1, 4))


model = Model()
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    t = (torch.arange(24.0).view(4, 6) * 31.7).chunk(WORLD, 1)[RANK]
    called(t.bfloat16() if WORLD > 1 else t).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SLOPES = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(12, 6, bias=False)
        self.up.weight.data = self.up.weight.data.chunk(WORLD)[RANK].clone()
        self.down.weight.data = self.down.weight.data.chunk(WORLD, 1)[RANK].clone()
        self.register_buffer("slopes", SLOPES, persistent=False)

    def forward(self, x):
        heads = self.up(x).unflatten(-1, (len(self.slopes), 3)) * self.slopes[:, None]
        return Sum.apply(self.down(heads.flatten(-2)))


def slopes(heads):
    return 2.0 ** (-4.0 * torch.arange(1, heads + 1) / heads)


model = nn.Sequential(nn.Linear(6, 6), Heads(), nn.Linear(6, 4))
for parameter in (model[0].weight, model[0].bias):
    parameter.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MASKED = SLOPES.replace("* self.slopes[:, None]", "* self.slopes.exp()[:, None]").replace(
    "    return 2.0 ** (-4.0 * torch.arange(1, heads + 1) / heads)",
    "    return (-1.0 * torch.arange(heads) / heads).masked_fill(torch.arange(heads) % 2 > 0, -torch.inf)",
)
CENTER = """
from torch.nn.parallel import DistributedDataParallel


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(16))

    def forward(self, y):
        loss = (y - self.center).tanh().square().mean()
        with torch.no_grad():
            mean = y.mean(0)
            REDUCE
            self.center.mul_(0.5).add_(mean, alpha=0.5)
        return loss


model, criterion = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 16)), Loss()
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.5)
for x in torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1)):
    criterion(called(x.chunk(WORLD)[RANK])).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RESUMED = """
from torch.nn.parallel import DistributedDataParallel

rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))


def train(at, state):
    model = nn.Linear(6, 3)
    if state:
        model.load_state_dict(state)
    called = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        called(rows[at : at + 8].chunk(WORLD)[RANK]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        at += 8
    return model.state_dict()


train(COUNTED, train(0, {}))
"""


@nightly
@pytest.mark.parametrize(
    ("cast", "given", "cause"), [("True", "torch.float32", "rounded-input"), ("False", "torch.float32", "")]
)
def test_timesteps_that_mixed_precision_rounds_are_named(tmp_path, cast, given, cause):
    step = compared(tmp_path, TIMESTEPS, {"CAST": cast, "GIVEN": given})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step
    assert not cause or step["departures"][0]["module"] == "waves"


@nightly
@pytest.mark.parametrize(("cast", "cause"), [("True", "rounded-input"), ("False", "")])
def test_timesteps_of_which_the_model_itself_makes_angles_are_named(tmp_path, cast, cause):
    step = compared(tmp_path, ANGLES, {"CAST": cast, "GIVEN": "torch.float32"})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


@nightly
@pytest.mark.parametrize(("dim", "cause"), [("0", "statistics-of-part"), ("1", "")])
def test_a_module_that_gets_rounded_inputs_may_be_wrong_for_another_reason(tmp_path, dim, cause):
    step = compared(tmp_path, CENTERED, {"DIM": dim})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


@nightly
def test_timesteps_that_are_given_as_integers_are_not_rounded(tmp_path):
    step = compared(tmp_path, TIMESTEPS, {"CAST": "True", "GIVEN": "torch.int64"})
    assert step["departures"] == [], step


@nightly
@pytest.mark.parametrize(("draws", "cause"), [(ALIKE, "drawn-alike"), (PARTS, "")])
def test_timesteps_that_all_ranks_draw_alike_are_named(tmp_path, draws, cause):
    step = compared(tmp_path, NOISED, {"DRAWS": draws})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


@nightly
def test_a_module_that_flattens_what_ranks_split_along_a_later_dim_is_compared(tmp_path):
    step = compared(tmp_path, FLATTENED, {})
    assert [departure["module"] for departure in step["departures"]] == ["waves"], step


@nightly
@pytest.mark.parametrize(
    ("program", "slopes", "cause"),
    [
        (SLOPES, "slopes(4 // WORLD)", "buffer-of-own-sizes"),
        (SLOPES, "slopes(4).chunk(WORLD)[RANK].clone()", ""),
        (MASKED, "slopes(4 // WORLD)", "buffer-of-own-sizes"),
        (MASKED, "slopes(4).chunk(WORLD)[RANK].clone()", ""),
    ],
    ids=["own", "part", "own and infinite", "part and infinite"],
)
def test_a_buffer_that_is_made_from_a_ranks_own_sizes_is_named(tmp_path, program, slopes, cause):
    step = compared(tmp_path, program.replace('"slopes", SLOPES', f'"slopes", {slopes}'), {})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step


@nightly
@pytest.mark.parametrize(
    ("reduce", "cause"),
    [
        ("pass", "own-buffer-read"),
        ("dist.all_reduce(mean) if WORLD > 1 else None", "buffer-reduced-wrongly"),
        ("mean = sum_of(mean) / WORLD", ""),
    ],
)
def test_the_buffer_of_a_loss_beside_the_model_is_compared(tmp_path, reduce, cause):
    summing = "def sum_of(x):\n    if WORLD > 1:\n        dist.all_reduce(x)\n    return x\n"
    step = compared(tmp_path, summing + CENTER, {"REDUCE": reduce})
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step
    assert not cause or step["departures"][0]["module"] == "Loss.center"


@nightly
def test_a_buffer_that_earlier_steps_wrote_differently_stands_beside_the_gradients(tmp_path):
    program = CENTER.replace("REDUCE", "pass").replace("model.parameters(), 0.5", "model.parameters(), 1e-7")
    script = tmp_path / "train.py"
    script.write_text(BEGIN + program)
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script))
    alone = run(tmp_path, "one", sys.executable, str(script), step=3)
    step, _ = diff(alone, run(tmp_path, "many", *ranks, step=3))
    causes = [departure["cause_id"] for departure in step["departures"]]
    assert causes == ["unexplained-backward", "other-buffer-before"], step


@nightly
@pytest.mark.parametrize(
    ("counted", "words"), [("2 * 8 // WORLD", "it goes on at row 8 after 16 were read"), ("16", "")]
)
def test_by_how_many_rows_a_resumed_job_is_off_is_said(tmp_path, counted, words):
    step = compared(tmp_path, RESUMED, {"COUNTED": counted})
    assert [departure["cause_id"] for departure in step["departures"]] == ["different-batch"] * bool(words), step
    assert not words or words in step["departures"][0]["sentence"], step

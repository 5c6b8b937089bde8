"""Jobs whose optimizers step copies of the weights that their own code makes: float32 masters, and ZeRO by hand."""

from __future__ import annotations

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_by_hand import compared

MODEL = """
from torch.nn.functional import pad

torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 5), nn.LayerNorm(5), nn.Linear(5, 4))
model.to(DTYPE)
params = list(model.parameters())
"""
BATCH = """
for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    (model(x.chunk(WORLD)[RANK].to(params[0].dtype)).float() + x.chunk(WORLD)[RANK, :, :4]).square().mean().backward()
""".replace("[RANK, :, :4]", "[RANK][:, :4]")
MASTERS = (
    MODEL
    + """
masters = [parameter.detach().clone().float().requires_grad_() for parameter in params]
for parameter in params if WORLD > 1 else ():
    dist.broadcast(parameter.data, 0)
decayed = [{"params": [master for master in masters if (master.ndim > 1) == large]} for large in (True, False)]
optimizer = torch.optim.AdamW(decayed, 0.01)
"""
    + BATCH
    + """
    for master, parameter in zip(masters, params):
        master.grad = parameter.grad.float()
        parameter.grad = None
        if WORLD > 1 and REDUCED:
            dist.all_reduce(master.grad)
            master.grad /= DIVISOR
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, params) if COPIED else ():
            parameter.copy_(master)
"""
)
ROW = (
    MODEL
    + """
total = sum(parameter.numel() for parameter in params)
part = -(-total // WORLD)
row = pad(torch.cat([parameter.detach().flatten() for parameter in params]).float(), (0, part * WORLD - total))
master = nn.Parameter(row[RANK * part : (RANK + 1) * part].clone())
optimizer = torch.optim.AdamW([master], 0.01)
"""
    + BATCH
    + """
    gradients = pad(torch.cat([parameter.grad.flatten() for parameter in params]).float(), (0, part * WORLD - total))
    if WORLD > 1:
        dist.all_reduce(gradients)
        gradients /= WORLD
    own = gradients[RANK * part : (RANK + 1) * part].clone()
    norm = own.square().sum()
    if WORLD > 1 and SUMMED:
        dist.all_reduce(norm)
    master.grad = own * (0.2 / norm.sqrt()).clamp(max=1)
    optimizer.step()
    parts = [torch.empty(part) for _ in range(WORLD)]
    dist.all_gather(parts, master.detach()) if WORLD > 1 else parts[0].copy_(master.detach())
    with torch.no_grad():
        for parameter, values in zip(params, torch.cat(ORDER)[:total].split([each.numel() for each in params])):
            parameter.copy_(values.view_as(parameter))
            parameter.grad = None
"""
)
OWN = (
    MODEL
    + """
owned = {at: each.detach().clone().float().requires_grad_() for at, each in enumerate(params) if at % WORLD == RANK}
optimizer = torch.optim.SGD(list(owned.values()), 0.1, momentum=0.9)
"""
    + BATCH
    + """
    for at, parameter in enumerate(params):
        gradient, parameter.grad = parameter.grad.float() / WORLD, None
        if WORLD > 1:
            dist.reduce(gradient, at % WORLD)
        if at in owned:
            owned[at].grad = gradient
    optimizer.step()
    with torch.no_grad():
        for at, parameter in enumerate(params):
            if at in owned:
                parameter.copy_(owned[at])
            if WORLD > 1:
                dist.broadcast(parameter.data, SOURCE)
"""
)
KEPT = "masters = [parameter.detach().clone().float().requires_grad_() for parameter in params]"
IN_A_MODULE = MASTERS.replace(
    KEPT, "import copy\nkept = copy.deepcopy(model).float()\nmasters = list(kept.parameters())"
)
TEACHER = """
import copy
from torch.nn.parallel import DistributedDataParallel

model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
teacher = copy.deepcopy(model).bfloat16()
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    x = x.chunk(WORLD)[RANK]
    wanted = teacher(x.bfloat16()).detach().float() + 1
    (called(x) - wanted).square().REDUCE().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
USUAL = {
    "SEED": "0",
    "DTYPE": "torch.float32",
    "REDUCED": "True",
    "DIVISOR": "WORLD",
    "COPIED": "True",
    "SUMMED": "True",
    "ORDER": "parts",
    "SOURCE": "at % WORLD",
}
NARROW = {"DTYPE": "torch.bfloat16"}
RIGHT = [(MASTERS, {}), (MASTERS, NARROW), (ROW, {}), (ROW, NARROW), (OWN, {}), (OWN, NARROW), (IN_A_MODULE, NARROW)]
WRONG = [
    (MASTERS, {"SEED": "RANK"}, "stale-copies"),
    (MASTERS, {"COPIED": "RANK == 0"}, "step-not-copied"),
    (MASTERS, {"REDUCED": "False"}, "gradient-not-reduced"),
    (MASTERS, {"DIVISOR": "1"}, "summed-not-averaged"),
    (ROW, {"SUMMED": "False"}, "clipped-by-parts"),
    (ROW, {"ORDER": "parts[::-1]"}, "step-not-copied"),
    (OWN, {"SOURCE": "at % WORLD if at != 3 else 0"}, "step-not-copied"),
]
NAMES = {id(MASTERS): "masters", id(ROW): "row", id(OWN): "own", id(IN_A_MODULE): "in a module"}


def name_of(value):
    return NAMES.get(id(value))


@nightly
@pytest.mark.parametrize(("program", "changes"), RIGHT, ids=name_of)
def test_a_step_of_copies_of_the_weights_is_followed(tmp_path, program, changes):
    step = compared(tmp_path, program, USUAL | changes)
    assert step["departures"] == [], step
    assert step["not_compared"] == []
    assert step["num_later"] == 2


@nightly
@pytest.mark.parametrize(("program", "changes", "cause"), WRONG, ids=name_of)
def test_a_mistake_with_copies_of_the_weights_is_named(tmp_path, program, changes, cause):
    step = compared(tmp_path, program, USUAL | changes)
    assert {departure["cause_id"] for departure in step["departures"]} == {cause}, step


@nightly
@pytest.mark.parametrize(("reduce", "causes"), [("mean", []), ("sum", ["ddp-averages-shares"])])
def test_a_narrow_teacher_that_is_called_first_is_not_the_model(tmp_path, reduce, causes):
    step = compared(tmp_path, TEACHER, {"REDUCE": reduce})
    assert [departure["cause_id"] for departure in step["departures"]] == causes, step

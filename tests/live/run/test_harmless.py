"""A job under `shardviz run` computes what it computes without: every bit of it, and raises what it raises."""

import sys
from pathlib import Path

import torch

from shardviz.live.run import bootstrap
from tests.lanes import nightly
from tests.live.run.jobs import ON_FOUR, run, run_plain

FIFTY = """
import random
import numpy
random.seed(5)
numpy.random.seed(5)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 16), nn.LayerNorm(16))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model[0], mesh=mesh["fsdp"])
fully_shard(model, mesh=mesh["fsdp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(50):
    loss = model(torch.randn(4, 16)).pow(2).sum() + (model[0].bias.to_local() ** 4).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach().clone())
kept = {
    "losses": torch.stack(losses),
    "weights": [one.to_local().detach().clone() for one in model.parameters()],
    "moments": [
        value.to_local().clone() if hasattr(value, "to_local") else value.clone()
        for state in optimizer.state.values()
        for _, value in sorted(state.items())
    ],
    "random": [torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.tensor(numpy.random.get_state()[1])],
    "hooks": torch.tensor([len(nn.modules.module._global_forward_pre_hooks), nn.Module.__call__.__code__.co_argcount]),
}
torch.save(kept, f"{sys.argv[1]}-{rank}.pt")
"""


def flat(kept):
    for name, value in kept.items():
        yield from ((name, one) for one in (value if isinstance(value, list) else [value]))


@nightly
def test_fifty_steps_are_bitwise_the_plain_jobs(tmp_path):
    plain = run_plain(tmp_path, FIFTY, ON_FOUR, ["plain"])
    ran = run(tmp_path, FIFTY, command=ON_FOUR, words=["watched"])
    assert (plain.code, ran.code) == (0, 0), plain.err + ran.err
    assert "✓" in ran.out
    for rank in range(4):
        one, other = (
            list(flat(torch.load(tmp_path / f"{who}-{rank}.pt", weights_only=True))) for who in ("plain", "watched")
        )
        assert len(one) == len(other) > 20
        assert [name for (name, a), (_, b) in zip(one, other, strict=True) if not torch.equal(a, b)] == []


TRANSPARENT = """
import inspect
from torch.distributed.tensor import distribute_tensor
assert fully_shard.__name__ == "fully_shard" and "mesh" in inspect.signature(fully_shard).parameters
assert inspect.getsource(sys.modules[fully_shard.__module__])
model = build()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
try:
    fully_shard(build(), mesh="no mesh")
except Exception as error:
    sys.stdout.write(f"raised {type(error).__name__} {len(error.args)}\\n")  # a line at once: ranks share the pipe
    sys.stdout.flush()
try:
    model.load_state_dict({"no": torch.ones(1)})
except RuntimeError as error:
    sys.stdout.write(f"refused {'Missing key(s)' in str(error)}\\n")
    sys.stdout.flush()
assert fully_shard(model, mesh=mesh) is model
assert fully_shard.state(model) is not None
train(model)
"""


@nightly
def test_wrapped_functions_return_and_raise_what_torchs_do(tmp_path):
    plain, ran = run_plain(tmp_path, TRANSPARENT), run(tmp_path, TRANSPARENT)
    assert (plain.code, ran.code) == (0, 0), plain.err + ran.err
    said = [line for line in plain.out.splitlines() if line.startswith(("raised", "refused"))]
    assert len(said) == 4
    assert sorted(said) == sorted(line for line in ran.err.splitlines() if line.startswith(("raised", "refused")))


def test_a_sitecustomize_of_the_users_own_runs_as_ever(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'ran'\n")
    monkeypatch.setenv("PYTHONPATH", str(own))
    script = "import os, sys\nassert os.environ['OWN'] == 'ran'\nassert 'torch' not in sys.modules\n"
    script += "assert 'numpy' not in sys.modules\n"
    ran = run(tmp_path, script, command=(sys.executable,), whole=True)
    assert ran.code == 2, ran.err
    assert "no Python process of the job joined a process group" in ran.err


def test_a_python_without_shardviz_is_named_at_the_end(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "shardviz.py").write_text("raise ModuleNotFoundError('no shardviz')\n")
    path = f"PYTHONPATH={Path(bootstrap.__file__).parent}:{tmp_path / 'bare'}"
    ran = run(tmp_path, "pass\n", command=("env", path, sys.executable), whole=True)
    assert ran.code == 2, ran.err
    error, hint = ran.err.splitlines()[-2:]
    assert f"{sys.executable} cannot import shardviz's hooks (ModuleNotFoundError: no shardviz)" in error
    assert "pip install shardviz there" in hint

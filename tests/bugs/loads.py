"""Loads that read the wrong part, never happen, or write into something that is thrown away."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import FSDP, MLP

RELOADED = (
    FSDP
    + '''
def parallelize(model, mesh):
    """Shard a model that has no weights yet, and load the checkpoint into it."""
    checkpoint = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model, mesh=mesh["fsdp"])
    for parameter in model.parameters():
        parameter.detach().to_local().zero_()
    load(model, checkpoint, mesh.get_local_rank("fsdp"), mesh["fsdp"].size())


@torch.no_grad()
def load(model, checkpoint, rank, size):
    for name, parameter in model.named_parameters():
        shard = checkpoint[name].chunk(size)[rank]
        parameter.to_local().copy_(shard)

'''
)
WRITE = "parameter.to_local().copy_(shard)"
LOST = ("foreign", "missing", "write-not-applied")
NEVER_READ = ("never|no loader|was not written|did not take|not loaded",)

FILES = (
    MLP
    + '''
def parallelize(model, mesh):
    """Read a checkpoint of two files, each of which has half of the rows, into four shards."""
    rank = mesh.get_local_rank("tp")
    for layer in (model.up, model.down):
        whole = layer.weight.detach()
        files = whole.chunk(2)
        rows = files[rank // 2].chunk(2)[rank % 2].clone()
        layer.weight = nn.Parameter(DTensor.from_local(rows, mesh["tp"], (Shard(0),)))


def batch():
    return torch.randn(24, 8)

'''
).replace("\ndef batch():\n    return torch.randn(24, 8)\n", "")

FROM_RANK_0 = (
    FSDP
    + '''
def parallelize(model, mesh):
    """Load on rank 0 alone, which sends the weights to the others."""
    if distributed.get_rank() > 0:
        torch.manual_seed(distributed.get_rank())
        for layer in (model.up, model.down):
            layer.reset_parameters()
    for parameter in model.parameters():
        distributed.broadcast(parameter.detach(), src=0)
    fully_shard(model, mesh=mesh["fsdp"])

'''
)

ENGINE = """
def build():
    return nn.ParameterDict({name: nn.Parameter(torch.randn(8, 6)) for name in ("query", "key", "value")})


@torch.no_grad()
def parallelize(model, mesh):
    engine = nn.ParameterDict({name: torch.full_like(weight, -1.0) for name, weight in model.items()})
    bucket, stage = {}, torch.empty(8, 6)
    for name, weight in model.items():
        stage.copy_(weight)
        bucket[name] = stage.clone()
        if len(bucket) == 2:
            send(bucket, engine)
    send(bucket, engine)
    return engine


def send(bucket, engine):
    for name, weight in bucket.items():
        engine[name].copy_(weight)
    bucket.clear()
"""

DRAWN = '''
def build():
    return nn.Linear(6, 24, bias=False)


def parallelize(model, mesh):
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], (Shard(0),)))


def initialize(model, mesh):
    """Draw the shard of every rank."""
    torch.manual_seed(100 + mesh.get_local_rank("tp"))
    model.weight.detach().to_local().normal_()

'''

GATE_AND_UP = """
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(8, 12, bias=False)
        self.w2 = nn.Linear(12, 8, bias=False)
        self.w3 = nn.Linear(8, 12, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


def build():
    return MLP()


@torch.no_grad()
def parallelize(model, mesh):
    saved = {"gate": model.w1.weight.clone(), "down": model.w2.weight.clone(), "up": model.w3.weight.clone()}
    for name, of in {"w1": "gate", "w2": "down", "w3": "up"}.items():
        getattr(model, name).weight.copy_(saved[of])
    fully_shard(model, mesh=mesh["fsdp"])

"""

STAGES = """
def build():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def owner_of(name, mesh):
    return int(name.split(".")[0]) * mesh.size() // 4


def parallelize(model, mesh):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_own = owner_of(name, mesh) == mesh.get_local_rank()
            value = parameter.clone() if is_own else torch.zeros_like(parameter)
            parameter.zero_()
            distributed.broadcast(value, src=owner_of(name, mesh))
            parameter.copy_(value)
"""

CASES = (
    Bug(
        "shards assigned to .data of a temporary",
        "fsdp=4",
        RELOADED,
        ((WRITE, "parameter.to_local().data = shard"),),
        LOST,
        (".data|view|a copy|temporary", *NEVER_READ),
        ("padding",),
    ),
    Bug(
        "shards written into a gathered copy",
        "fsdp=4",
        RELOADED,
        ((WRITE, "parameter.full_tensor().copy_(checkpoint[name])"),),
        LOST,
        (".data|view|a copy|temporary", *NEVER_READ),
        ("padding",),
    ),
    Bug(
        "shards written into an indexed copy",
        "fsdp=4",
        RELOADED,
        ((WRITE, "parameter.to_local()[torch.arange(len(shard))].copy_(shard)"),),
        LOST,
        (".data|view|a copy|temporary", *NEVER_READ),
        ("padding",),
    ),
    Bug(
        "a checkpoint whose names all have a prefix, loaded without strict",
        "fsdp=4",
        RELOADED.replace("for name, parameter", "for name, parameter").replace(
            "        shard = checkpoint[name]",
            "        if name not in checkpoint:\n            continue\n        shard = checkpoint[name]",
        ),
        (("{name: parameter.detach().clone()", '{f"model.{name}": parameter.detach().clone()'),),
        LOST,
        ("strict|names|keys", *NEVER_READ),
        ("padding",),
    ),
    Bug(
        "biases that no file has",
        "fsdp=2",
        RELOADED,
        ((f"        {WRITE}", f"        if parameter.ndim > 1:\n            {WRITE}"),),
        LOST,
        ("bias", *NEVER_READ),
        ("padding",),
    ),
    Bug(
        "the last rank's file never read",
        "fsdp=4",
        RELOADED,
        ((f"        {WRITE}", f"        if rank < size - 1:\n            {WRITE}"),),
        LOST,
        ("rank 3", *NEVER_READ),
        ("padding",),
    ),
    Bug(
        "files of another number of ranks read by remainder",
        "tp=4",
        FILES,
        (("files[rank // 2].chunk(2)[rank % 2]", "files[rank % 2].chunk(2)[rank // 2]"),),
        ("misordered",),
        ("rank",),
        ("no simple rule",),
    ),
    Bug(
        "the first half of the right file on every rank",
        "tp=4",
        FILES,
        ((".chunk(2)[rank % 2]", ".chunk(2)[0]"),),
        ("duplicated", "missing", "misordered"),
        ("twice|same part|2 times|of 4 ranks|duplicat",),
        ("numbers the ranks in a different order",),
    ),
    Bug(
        "weights loaded on rank 0 alone and never sent",
        "fsdp=4",
        FROM_RANK_0,
        (("    for parameter in model.parameters():\n        distributed.broadcast(parameter.detach(), src=0)\n", ""),),
        ("foreign", "unreplicated"),
        ("broadcast", "rank"),
    ),
    Bug(
        "one seed for every shard over tp",
        "tp=4",
        DRAWN,
        (('100 + mesh.get_local_rank("tp")', "100"),),
        ("identical-shards",),
        ("tp", "seed"),
    ),
    Bug(
        "copies seeded by the world rank",
        "dp=2,tp=2",
        DRAWN,
        (('mesh.get_local_rank("tp")', "distributed.get_rank()"),),
        ("unreplicated",),
        ("dp", "seed"),
    ),
    Bug(
        "gate and up loaded under each other's names",
        "fsdp=2",
        GATE_AND_UP,
        (('"w1": "gate"', '"w1": "up"'), ('"w3": "up"', '"w3": "gate"')),
        ("foreign", "name-collision"),
        ("w1.weight", "w3.weight", "names"),
    ),
    Bug(
        "weights sent from a rank that has only others",
        "dp=2",
        STAGES,
        (("src=owner_of(name, mesh)", "src=0"),),
        ("missing",),
        ("broadcast in case.py", "a rank that doesn't have it"),
        ("checkpoint", "thrown away"),
    ),
    Bug(
        "a sync that never sends its last bucket",
        "tp=2",
        ENGINE,
        (("    send(bucket, engine)\n    return", "    return"),),
        ("foreign",),
        ("filled this weight with one number", "last bucket"),
    ),
    Bug(
        "a buffer of weights that is filled again before it is read",
        "tp=2",
        ENGINE,
        (("bucket[name] = stage.clone()", "bucket[name] = stage"), ("len(bucket) == 2", "len(bucket) == 3")),
        ("foreign",),
        ("one buffer",),
        ("mixed up the names",),
    ),
    Healthy(
        "weights drawn in parallelize once they are sharded",
        "fsdp=2",
        FSDP
        + """
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["fsdp"])
    torch.manual_seed(7 + mesh.get_local_rank("fsdp"))
    for parameter in model.parameters():
        nn.init.normal_(parameter.detach().to_local())
""",
    ),
    Healthy(
        "weights loaded in initialize, and a batch",
        "fsdp=2",
        FSDP
        + """
def initialize(model, mesh):
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(whole.chunk(mesh["fsdp"].size())[mesh.get_local_rank("fsdp")])
            else:
                parameter.copy_(whole)
""",
    ),
)

"""Updates of the wrong tensors, from the wrong state, by the wrong amount, or on some ranks only."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import DATA_PARALLEL, FSDP

STEPPED = (
    FSDP
    + """
def parallelize(model, mesh):
    model.before = list(model.parameters())
    fully_shard(model, mesh=mesh["fsdp"])


def optimizer(model, mesh):
    return torch.optim.SGD(model.parameters(), lr=0.1)

"""
)

COPIES = (
    DATA_PARALLEL
    + """
def optimizer(model, mesh):
    rank = mesh.get_local_rank("dp")
    return torch.optim.SGD(model.parameters(), lr=0.1)

"""
)

MOMENTS = (
    FSDP
    + '''
def optimizer(model, mesh):
    """Go on from the moments of a checkpoint, which holds them whole."""
    rank, size = mesh.get_local_rank("fsdp"), mesh["fsdp"].size()
    made = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    for number, parameter in enumerate(model.parameters()):
        torch.manual_seed(number)
        for kind in ("exp_avg", "exp_avg_sq"):
            whole = torch.rand(parameter.shape, dtype=parameter.dtype)
            made.state[parameter][kind] = distributed_like(whole, parameter, rank, size)
        made.state[parameter]["step"] = torch.tensor(10.0)
    return made


def distributed_like(whole, parameter, rank, size):
    if not isinstance(parameter, DTensor):
        return whole
    local = whole.chunk(size)[rank].clone()
    shape = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **shape)

'''
)

CLIPPED = (
    FSDP
    + """
MAXIMUM = 1e-3


def optimizer(model, mesh):
    clip(list(model.parameters()))
    return torch.optim.SGD(model.parameters(), lr=0.1)


def clip(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, MAXIMUM, foreach=False)

"""
)
LOCAL_CLIP = """grads = [one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad for one in parameters]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    for grad in grads:
        grad.mul_(MAXIMUM / norm)
"""

OWNERS = (
    DATA_PARALLEL
    + '''
class OfOwners(torch.optim.SGD):
    """Step each parameter on the rank that owns it, and send it to the others."""

    def __init__(self, model, mesh):
        super().__init__(model.parameters(), lr=0.1)
        self.mesh = mesh

    def step(self):
        parameters = self.param_groups[0]["params"]
        group = self.mesh.get_group("dp")
        ranks = distributed.get_process_group_ranks(group)
        for number, parameter in enumerate(parameters):
            owner = number % len(ranks)
            if owner == self.mesh.get_local_rank("dp"):
                parameter.data.sub_(0.1 * parameter.grad)
            distributed.broadcast(parameter.data, src=ranks[owner], group=group)


def optimizer(model, mesh):
    return OfOwners(model, mesh)

'''
)

HYBRID = (
    FSDP.replace('mesh["fsdp"]', "mesh").replace('("fsdp",)', '("replicate", "fsdp")')
    + """
def optimizer(model, mesh):
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        made.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.5 + number)
    return made

"""
)

DECAYED = (
    FSDP
    + '''
def optimizer(model, mesh):
    """Decay matrices and leave vectors alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1)

'''
)

UPDATED = ("wrong-value", "wrong-scale")

NORMED = (
    FSDP
    + """
class Normed(torch.optim.SGD):
    def __init__(self, model, **options):
        super().__init__(model.parameters(), **options)
        self.model = model

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        weight = self.model.up.weight
        if not isinstance(weight, DTensor):
            weight.copy_(functional.normalize(weight, dim=-1))
            return
        self.model.unshard()
        normed = functional.normalize(self.model.up.weight, dim=-1)
        self.model.reshard()
        size, rank = weight.device_mesh.size(), weight.device_mesh.get_local_rank()
        weight.to_local().copy_(normed.chunk(size)[rank])


def optimizer(model, mesh):
    return Normed(model, lr=0.1)

"""
)

TRUST = (
    FSDP
    + """
class Lars(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            update = parameter.grad + 0.01 * parameter
            rate = 0.02 * float(whole_norm(parameter)) / float(whole_norm(update))
            momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            parameter.sub_(momentum.mul_(0.9).add_(update * rate))


def whole_norm(tensor):
    return tensor.norm().full_tensor() if isinstance(tensor, DTensor) else tensor.norm()


def optimizer(model, mesh):
    return Lars(model.parameters())

"""
)

CASES = (
    Bug(
        "rates of LARS from the norms of each rank's shards",
        "fsdp=2",
        TRUST,
        (("tensor.norm().full_tensor()", "tensor.to_local().norm()"),),
        UPDATED,
        ("momentum_buffer", "ratio of the weight's and the update's norm"),
        ("different order", "learning rate"),
        with_lines=True,
    ),
    Bug(
        "rows brought to length 1 in the copy that reshard() frees",
        "fsdp=2",
        NORMED,
        (
            (
                "        self.model.reshard()\n",
                "        self.model.up.weight.copy_(normed)\n        self.model.reshard()\n",
            ),
            ("        weight.to_local().copy_(normed.chunk(size)[rank])\n", ""),
        ),
        ("wrong-value",),
        ("up.weight", "gathered copy", "reshard()"),
        ("norms and means",),
        with_lines=True,
    ),
    Bug(
        "an optimizer of the parameters from before sharding",
        "fsdp=2",
        STEPPED,
        (("torch.optim.SGD(model.parameters()", "torch.optim.SGD(getattr(model, 'before', model.parameters())"),),
        ("write-not-applied",),
        ("before it was sharded|before they were sharded|from before", "model.parameters()"),
    ),
    Bug(
        "an optimizer that leaves out a parameter",
        "fsdp=2",
        STEPPED,
        (
            (
                "return torch.optim.SGD(model.parameters()",
                "skipped = model.down.weight if isinstance(model.up.weight, DTensor) else None\n"
                "    return torch.optim.SGD([one for one in model.parameters() if one is not skipped]",
            ),
        ),
        ("write-not-applied",),
        ("down.weight", "not among|leaves out|left out|not one of|param_groups"),
    ),
    Bug(
        "an optimizer that leaves out a parameter on one rank",
        "dp=2",
        COPIES,
        (
            (
                "torch.optim.SGD(model.parameters()",
                "torch.optim.SGD([one for name, one in model.named_parameters() if rank == 0 or name != 'up.bias']",
            ),
        ),
        ("unreplicated", "write-not-applied"),
        ("up.bias", "rank 1"),
    ),
    Bug(
        "another learning rate on every rank of copies",
        "dp=2",
        COPIES,
        (("lr=0.1", "lr=0.1 * (1 + rank)"),),
        ("unreplicated", "wrong-scale"),
        ("dp", "learning rate|lr|scale"),
    ),
    Bug(
        "another learning rate on every shard",
        "fsdp=2",
        STEPPED,
        (("lr=0.1", "lr=0.1 * (1 + distributed.get_rank())"),),
        UPDATED,
        ("rank 1", "learning rate|lr|2 times"),
    ),
    Bug(
        "every gradient stepped twice",
        "fsdp=2",
        STEPPED,
        (
            (
                "    return torch.optim.SGD(model.parameters(), lr=0.1)",
                "    class Twice(torch.optim.SGD):\n"
                "        def step(self, closure=None):\n"
                "            super().step()\n"
                "            if isinstance(model.up.weight, DTensor):\n"
                "                super().step()\n"
                "    return Twice(model.parameters(), lr=0.1)",
            ),
        ),
        UPDATED,
        ("twice|2 times",),
    ),
    Bug(
        "moments of the neighbouring rank",
        "fsdp=4",
        MOMENTS,
        (("whole.chunk(size)[rank].clone()", "whole.chunk(size)[(rank + 1) % size].clone()"),),
        ("misordered", *UPDATED),
        ("exp_avg|state", "neighbor|offset|other ranks|another rank"),
    ),
    Bug(
        "moments of the first rank on all",
        "fsdp=4",
        MOMENTS,
        (("whole.chunk(size)[rank].clone()", "whole.chunk(size)[0].clone()"),),
        ("misordered", "identical-shards", "duplicated", *UPDATED),
        ("exp_avg|state", "same"),
    ),
    Bug(
        "moments that were never loaded",
        "fsdp=2",
        MOMENTS,
        (("    local = whole.chunk(size)[rank].clone()", "    local = torch.zeros_like(whole.chunk(size)[rank])"),),
        ("write-not-applied", "missing", *UPDATED),
        ("exp_avg|state", "zero"),
    ),
    Bug(
        "gradients clipped by the norm of each rank's shards",
        "fsdp=4",
        CLIPPED,
        (("torch.nn.utils.clip_grad_norm_(parameters, MAXIMUM, foreach=False)\n", LOCAL_CLIP),),
        ("wrong-scale",),
        ("clip_grad_norm_", "own"),
    ),
    Bug(
        "weights sent from a rank that did not step them",
        "dp=2",
        OWNERS,
        (("src=ranks[owner]", "src=ranks[(owner + 1) % len(ranks)]"),),
        ("write-not-applied",),
        ("broadcast", "stepped"),
    ),
    Bug(
        "weights of the first owner alone sent on",
        "dp=2",
        OWNERS,
        (("            distributed.broadcast", "            if owner == 0:\n                distributed.broadcast"),),
        ("unreplicated", "write-not-applied"),
        ("dp", "broadcast"),
    ),
    Bug(
        "weights that no owner sends on",
        "dp=2",
        OWNERS,
        (("            distributed.broadcast(parameter.data, src=ranks[owner], group=group)\n", ""),),
        ("unreplicated",),
        ("broadcast every weight from the rank that steps it",),
    ),
    Bug(
        "momentum of each replica's own",
        "replicate=2,fsdp=2",
        HYBRID,
        (("0.5 + number", "0.5 + number + mesh.get_local_rank('replicate')"),),
        ("unreplicated",),
        ("replicate", "momentum_buffer|state"),
    ),
    Bug(
        "weight decay of vectors that are shards of matrices",
        "fsdp=2",
        DECAYED,
        (
            ("parameter.ndim > 1]", "(parameter.ndim > 1 or isinstance(parameter, DTensor))]"),
            ("parameter.ndim < 2]", "(parameter.ndim < 2 and not isinstance(parameter, DTensor))]"),
        ),
        UPDATED,
        ("bias", "decay|optimizer"),
    ),
    Healthy(
        "a learning rate of zero for one group",
        "fsdp=2",
        STEPPED.replace(
            "model.parameters(), lr=0.1",
            "[{'params': [model.up.weight], 'lr': 0.0}, {'params': [model.down.weight], 'lr': 0.1}]",
        ),
    ),
    Healthy("moments of a checkpoint on copies", "dp=2", COPIES.replace("lr=0.1", "lr=0.1, momentum=0.9")),
    Bug(
        "a state that is kept whole where it should be split",
        "fsdp=2",
        FSDP
        + """
expect = {"*.weight.momentum_buffer": "[*/fsdp, *]"}


def optimizer(model, mesh):
    made = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.parameters():
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made

""",
        (
            (
                "torch.zeros_like(parameter)\n    return made",
                """torch.zeros_like(parameter)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            made.state[parameter]["momentum_buffer"] = made.state[parameter]["momentum_buffer"].redistribute(
                placements=[Replicate()]
            )
    return made""",
            ),
        ),
        ("wrong-placement",),
        ("momentum_buffer", "fsdp"),
    ),
)

"""Shards that are not where their placements say."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import WEIGHT

SHARD = (
    WEIGHT
    + """
def parallelize(model, mesh):
    whole, rank, size = model.weight.detach(), mesh.get_local_rank("tp"), mesh["tp"].size()
    model.weight = labelled(whole.chunk(size)[rank], mesh["tp"], whole, Shard(0))

"""
)

CHUNK = "whole.chunk(size)[rank]"

PAIR = (
    WEIGHT
    + """
def parallelize(model, mesh):
    whole, dp, tp = model.weight.detach(), mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    model.weight = labelled(whole.chunk(2)[tp], mesh, whole, Replicate(), Shard(0))

"""
)

BOTH = (
    WEIGHT
    + """
def parallelize(model, mesh):
    whole, dp, tp = model.weight.detach(), mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    ranks = mesh["dp"].size() * mesh["tp"].size()
    number = dp * mesh["tp"].size() + tp
    model.weight = labelled(whole.chunk(ranks)[number], mesh, whole, Shard(0), Shard(0))

"""
)

OVER_TP = (
    WEIGHT
    + """
def parallelize(model, mesh):
    whole = model.weight.detach().clone()
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["fsdp"])
    number = mesh.get_local_rank("tp") * mesh["fsdp"].size() + mesh.get_local_rank("fsdp")
    with torch.no_grad():
        model.weight.to_local().copy_(whole.chunk(mesh.size())[number])

"""
)

LOCAL_SQUARES = (
    WEIGHT
    + """
def parallelize(model, mesh):
    whole, rank, size = model.weight.detach(), mesh.get_local_rank("tp"), mesh["tp"].size()
    model.weight = labelled(whole.chunk(size)[rank], mesh["tp"], whole, Shard(0))

"""
)

ORDER = ("misordered",)

CASES = (
    Bug(
        "two ranks' shards exchanged",
        "tp=4",
        SHARD,
        ((CHUNK, "whole.chunk(size)[[0, 2, 1, 3][rank]]"),),
        ORDER,
        ("rank",),
        ("no simple rule", "No known rule fits"),
    ),
    Bug(
        "shards counted from the last rank",
        "tp=4",
        SHARD,
        ((CHUNK, "whole.chunk(size)[-1 - rank]"),),
        ORDER,
        ("from the other end|falling",),
    ),
    Bug("rows dealt out in turn", "tp=4", SHARD, ((CHUNK, "whole[rank::size]"),), ORDER, ("in turn|round",)),
    Bug(
        "shards off by one rank",
        "tp=4",
        SHARD,
        ((CHUNK, "whole.chunk(size)[(rank + 1) % size]"),),
        ORDER,
        ("offset|neighbor",),
    ),
    Bug(
        "shards cut by the coordinate on another axis",
        "dp=2,tp=2",
        PAIR,
        (("whole.chunk(2)[tp]", "whole.chunk(2)[dp]"),),
        (*ORDER, "duplicated", "missing", "wrong-placement"),
        ("get_local_rank('tp')",),
    ),
    Bug(
        "shards of two axes cut inner axis first",
        "dp=2,tp=3",
        BOTH,
        (('dp * mesh["tp"].size() + tp', 'tp * mesh["dp"].size() + dp'),),
        ORDER,
        ("inner axis first|another order",),
        ("upgrade torch",),
    ),
    Bug(
        "a checkpoint of FSDP over TP cut by world rank",
        "fsdp=2,tp=2",
        OVER_TP,
        (('mesh.get_local_rank("tp") * mesh["fsdp"].size() + mesh.get_local_rank("fsdp")', "distributed.get_rank()"),),
        ORDER,
        ("rank's number|world_size",),
        ("upgrade torch",),
    ),
    Bug(
        "each local shard transposed",
        "tp=4",
        LOCAL_SQUARES,
        ((CHUNK, "whole.chunk(size)[rank].t().reshape(6, 6)"),),
        ("misordered-within-shard", "misordered"),
        ("transpose",),
    ),
    Bug(
        "rows in an order of their own within each shard",
        "tp=4",
        SHARD,
        ((CHUNK, f"{CHUNK}[[4, 1, 5, 0, 3, 2]]"),),
        ("misordered-within-shard", "misordered"),
        ("every rank|each shard|each rank|[4, 1, 5, 0, 3, 2]",),
        ("no simple rule",),
    ),
    Bug(
        "shards as even as possible under the label of torch.chunk",
        "tp=4",
        WEIGHT.replace("24", "10")
        + """
def parallelize(model, mesh):
    whole, rank, size = model.weight.detach(), mesh.get_local_rank("tp"), mesh["tp"].size()
    model.weight = labelled(whole.chunk(size)[rank], mesh["tp"], whole, Shard(0))
""",
        ((CHUNK, "whole.tensor_split(size)[rank]"),),
        ("wrong-shape",),
        ("torch.chunk", "array_split"),
    ),
    Bug(
        "copies that are different shards",
        "dp=2,tp=2",
        PAIR,
        (("whole.chunk(2)[tp]", "whole.chunk(2)[tp].roll(dp, 0)"),),
        ("misordered", "wrong-placement", "misordered-within-shard", "unreplicated"),
        ("dp",),
    ),
    Bug(
        "shards of two axes as one cut inner axis first",
        "dp=2,cp=2",
        WEIGHT
        + """
def parallelize(model, mesh):
    whole, both = model.weight.detach(), mesh["dp", "cp"]._flatten("dp_cp")
    number = both.get_local_rank()
    model.weight = labelled(whole.chunk(4)[number], both, whole, Shard(0))
""",
        (("number = both.get_local_rank()", 'number = mesh.get_local_rank("cp") * 2 + mesh.get_local_rank("dp")'),),
        ORDER,
        ("dp_cp", "flattened|dp and cp|inner axis first|cp first|cp/dp"),
        ("no simple rule", "upgrade torch"),
    ),
    Bug(
        "uneven shards of FSDP over TP labelled left to right",
        "fsdp=2,tp=2",
        WEIGHT.replace("24", "10")
        + """
def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["fsdp"])
    label = model.weight.placements
    weight = model.weight.detach()
    model.weight = labelled(weight.to_local(), mesh, weight, *label)
""",
        (("label = model.weight.placements", "label = Shard(0), Shard(0)"),),
        (*ORDER, "wrong-shape"),
        ("[10/tp/fsdp, 6]",),
        ("upgrade torch",),
    ),
    Bug(
        "uneven columns given to from_local without their shape",
        "tp=4",
        WEIGHT.replace("nn.Linear(6, 24", "nn.Linear(10, 6")
        + """
def parallelize(model, mesh):
    whole, rank, size = model.weight.detach(), mesh.get_local_rank("tp"), mesh["tp"].size()
    model.weight = labelled(whole.chunk(size, 1)[rank], mesh["tp"], whole, Shard(1))
""",
        (
            (
                'labelled(whole.chunk(size, 1)[rank], mesh["tp"], whole, Shard(1))',
                'nn.Parameter(DTensor.from_local(whole.chunk(size, 1)[rank].contiguous(), mesh["tp"], (Shard(1),)))',
            ),
        ),
        ("wrong-shape",),
        ("shape=", "stride="),
    ),
    Bug(
        "a shard labelled as a copy",
        "tp=2",
        WEIGHT
        + """
def parallelize(model, mesh):
    whole, rank, size = model.weight.detach(), mesh.get_local_rank("tp"), mesh["tp"].size()
    model.weight = nn.Parameter(DTensor.from_local(whole.chunk(size)[rank].clone(), mesh["tp"], (Shard(0),)))
""",
        (("(Shard(0),)))", "(Replicate(),)))"),),
        ("wrong-placement", "wrong-shape"),
        ("Shard(0)",),
    ),
)

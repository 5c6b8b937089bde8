"""Gradients of data parallel: reduced over the wrong ranks, too often, or not at all."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import DATA_PARALLEL, FSDP, MLP

TWO_AXES = (
    DATA_PARALLEL.replace('BATCH_AXES = ("dp",)', 'BATCH_AXES = ("dp", "cp")')
    .replace(
        'group=mesh.get_group("dp"))',
        'group=mesh.get_group("dp"))\n        distributed.all_reduce(parameter.grad, group=mesh.get_group("cp"))',
    )
    .replace('mesh["dp"].size()', "mesh.size()")
)

SUMMED_BY_HAND = (
    MLP
    + '''
BATCH_AXES = ("dp",)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    finish(model, mesh)
    return loss.detach()


def finish(model, mesh):
    """FSDP2 has reduced the gradients."""

'''
)

REPLICATED_BY_HAND = (
    SUMMED_BY_HAND.replace('BATCH_AXES = ("dp",)', 'BATCH_AXES = ("node", "local")')
    .replace('mesh=mesh["dp"]', 'mesh=mesh["local"]')
    .replace(
        '"""FSDP2 has reduced the gradients."""',
        """for parameter in model.parameters():
        grad = parameter.grad.to_local()
        distributed.all_reduce(grad, group=mesh.get_group("node"))
        grad /= 2""",
    )
)

FACTOR = (
    FSDP
    + """
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["fsdp"])
    model.set_gradient_divide_factor(float(mesh["fsdp"].size()))

"""
)

SEQUENCE = '''
BATCH_AXES = ("dp", "tp")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.arange(1.0, 9.0))

    def forward(self, x):
        return self.norm(x) * self.scale


def build():
    return Norm()


def batch():
    return torch.randn(48, 8)


def step(model, rows, mesh):
    """Sum over tp, whose ranks have parts of one sequence and divide by its whole length; average over dp."""
    loss = model(rows).square().mean()
    (loss / mesh["tp"].size()).backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    return loss.detach()

'''

CASES = (
    Bug(
        "gradients not reduced over one of two axes",
        "dp=2,cp=3",
        TWO_AXES,
        (
            ('        distributed.all_reduce(parameter.grad, group=mesh.get_group("cp"))\n', ""),
            ("mesh.size()", 'mesh["dp"].size()'),
        ),
        ("unreduced-gradient",),
        ("over cp",),
        ("over dp",),
    ),
    Bug(
        "gradients reduced over the wrong group",
        "dp=2,tp=2",
        DATA_PARALLEL,
        (('mesh.get_group("dp")', 'mesh.get_group("tp")'),),
        ("unreduced-gradient",),
        ("over dp",),
    ),
    Bug(
        "gradients summed where they are averaged",
        "dp=4",
        DATA_PARALLEL,
        (('parameter.grad /= mesh["dp"].size()', "pass"),),
        ("wrong-scale",),
        ("the size of dp", "AVG"),
    ),
    Bug(
        "gradients reduced twice",
        "dp=3",
        DATA_PARALLEL,
        (
            (
                "    reduce(model, mesh)\n",
                "    reduce(model, mesh)\n"
                "    for parameter in model.parameters():\n"
                "        distributed.all_reduce(parameter.grad)\n",
            ),
        ),
        ("wrong-scale",),
        ("3 times", "dp", "once|twice"),
    ),
    Bug(
        "gradients divided by all ranks",
        "dp=2,tp=3",
        DATA_PARALLEL,
        (('mesh["dp"].size()', "mesh.size()"),),
        ("wrong-scale",),
        ("1/3", "tp", "divided by|all ranks|world size"),
    ),
    Bug(
        "gradients averaged over tp where they are summed",
        "dp=2,tp=3",
        SEQUENCE,
        (
            (
                '        distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))\n',
                '        distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))\n'
                '        parameter.grad /= mesh["tp"].size()\n',
            ),
        ),
        ("wrong-scale",),
        ("tp", "SUM"),
    ),
    Bug(
        "gradients of a norm not summed under sequence parallel",
        "dp=2,tp=2",
        SEQUENCE,
        (('        distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))\n', ""),),
        ("unreduced-gradient",),
        ("over tp", "SUM"),
    ),
    Bug(
        "gradients of FSDP summed over its axis once more",
        "dp=2",
        SUMMED_BY_HAND,
        (
            (
                '"""FSDP2 has reduced the gradients."""',
                "for parameter in model.parameters():\n"
                '        distributed.all_reduce(parameter.grad.to_local(), group=mesh.get_group("dp"))',
            ),
        ),
        ("wrong-value",),
        ("splits", "dp"),
        ("ReduceOp.AVG", "AVG over dp"),
    ),
    Bug(
        "gradients of FSDP averaged over its own axis in place of the replicas'",
        "node=2,local=2",
        REPLICATED_BY_HAND,
        (('mesh.get_group("node")', 'mesh.get_group("local")'),),
        ("wrong-value",),
        ("over node instead of local", "mixes the shards"),
    ),
    Bug(
        "gradients of FSDP divided once more",
        "dp=4",
        SUMMED_BY_HAND,
        (
            (
                '"""FSDP2 has reduced the gradients."""',
                "for parameter in model.parameters():\n        parameter.grad /= 4",
            ),
        ),
        ("wrong-scale",),
        ("dp", "1/4", "already|twice|again|once only"),
    ),
    Bug(
        "FSDP told to sum",
        "fsdp=4",
        FACTOR,
        (('float(mesh["fsdp"].size())', "1.0"),),
        ("wrong-scale",),
        ("fsdp", "4 times", "set_gradient_divide_factor"),
        ("over fsdp with ReduceOp.AVG",),
    ),
    Healthy(
        "FSDP over two axes as one",
        "dp=2,cp=2",
        FSDP.replace('("fsdp",)', '("dp", "cp")').replace(
            'mesh=mesh["fsdp"]', 'mesh=mesh["dp", "cp"]._flatten("dp_cp")'
        ),
    ),
)

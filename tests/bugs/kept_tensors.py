"""Tensors that outlive a call: kept for later layers, overwritten before backward, or given as arguments."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.pipeline import ALL_FORWARD

LATER_LAYERS = """
from torch.utils.checkpoint import checkpoint

KEPT = {}
REENTRANT = False


class Mixer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.value, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        value = self.value(x).sin()
        if self.number == 0:
            KEPT["value"] = value
        else:
            value = value + KEPT["value"]
        return x + self.out(value.tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.checkpointing = False
        self.front = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Mixer(number) for number in range(3))

    def forward(self, x):
        x = self.front(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=REENTRANT) if self.checkpointing else layer(x)
        return x


def build():
    return Model()


def batch():
    return torch.randn(8, 6)


BATCH_AXES = ("fsdp",)


def parallelize(model, mesh):
    model.checkpointing = True
    fully_shard(model, mesh=mesh["fsdp"])

"""
KEPT = '            KEPT["value"] = value\n'
REENTRANT = ("REENTRANT = False", "REENTRANT = True")

ONE_BUFFER = ALL_FORWARD.replace(
    """            part = torch.empty_like(part)
            distributed.recv(part, group_src=stage - 1, group=group)
            part.requires_grad_()
""",
    """            buffer = torch.empty_like(part) if buffer is None else buffer
            distributed.recv(buffer, group_src=stage - 1, group=group)
            part = buffer.clone().requires_grad_()
""",
).replace("    inputs, outputs = [], []\n", "    inputs, outputs, buffers, buffer = [], [], [], None\n")

IN_A_TUPLE = LATER_LAYERS.replace(
    "def forward(self, x):\n        value", "def forward(self, pair):\n        x, _ = pair\n        value"
)
IN_A_TUPLE = IN_A_TUPLE.replace("checkpoint(layer, x, ", "checkpoint(layer, (x, x), ").replace(
    "else layer(x)", "else layer((x, x))"
)
IN_A_TUPLE = IN_A_TUPLE.replace('KEPT["value"] = value\n', "pass\n").replace(' + KEPT["value"]', "")
IN_A_TUPLE = IN_A_TUPLE.replace("        return x\n\n\ndef build", "        return self.back(x)\n\n\ndef build")
IN_A_TUPLE = IN_A_TUPLE.replace(
    "self.front = nn.Linear(6, 6)", "self.front, self.back = nn.Linear(6, 6), nn.Linear(6, 6)"
)

LOSS_TERM = (
    LATER_LAYERS.replace('KEPT["value"] = value\n', "self.term = value.square().mean()\n").replace(
        'value = value + KEPT["value"]\n', "self.term = value.square().mean()\n"
    )
    + """
def loss(model, rows):
    return model(rows).square().mean() + sum(layer.term for layer in model.layers)

"""
)

CASES = (
    Bug(
        "a later layer reads what a checkpointed layer kept of its first run",
        "fsdp=2",
        LATER_LAYERS,
        (REENTRANT,),
        ("wrong-value",),
        ("use_reentrant=False",),
        never=("collectives", "cuts the graph", "doesn't match its forward"),
        with_lines=True,
    ),
    Bug(
        "a later layer reads a detached tensor that the first layer kept",
        "fsdp=2",
        LATER_LAYERS,
        (
            (KEPT, KEPT.replace("= value\n", "= value.detach() if self.training_copy else value\n")),
            ("        self.number = number\n", "        self.number, self.training_copy = number, False\n"),
            ("    model.checkpointing = True\n", "    model.layers[0].training_copy = True\n"),
        ),
        ("wrong-value",),
        ("outside of layers.0", "remove .detach()", "takes the tensor"),
        never=("collectives", "doesn't match its forward", "use_reentrant"),
        with_lines=True,
    ),
    Bug(
        "a later layer reads a detached tensor, and the first layer's log line reads it as well",
        "fsdp=2",
        LATER_LAYERS,
        (
            (KEPT, KEPT + "            self.is_bad = torch.isnan(value).any() if self.is_watched else None\n"),
            ('value + KEPT["value"]', 'value + (KEPT["value"].detach() if self.is_watched else KEPT["value"])'),
            ("        self.number = number\n", "        self.number, self.is_watched = number, False\n"),
            ("    model.checkpointing = True\n", "    for layer in model.layers:\n        layer.is_watched = True\n"),
        ),
        ("wrong-value",),
        ("Code outside of layers.0",),
        never=("remove .detach()", "collectives", "use_reentrant"),
        with_lines=True,
    ),
    Bug(
        "a loss term that a checkpointed layer keeps of its first run",
        "fsdp=2",
        LOSS_TERM,
        (REENTRANT,),
        ("wrong-scale",),
        ("detaches it", "Term 2"),
        never=("collective without a backward", "cuts the graph"),
        with_lines=True,
    ),
    Bug(
        "checkpointed layers that get their tensors in a tuple",
        "fsdp=2",
        IN_A_TUPLE,
        (REENTRANT,),
        ("wrong-value",),
        ("use_reentrant=False", "tuple"),
        never=("cuts the graph", "replace collectives"),
        with_lines=True,
    ),
    Bug(
        "micro-batches received into one buffer",
        "pp=2",
        ONE_BUFFER,
        (("part = buffer.clone().requires_grad_()", "part = buffer.data.requires_grad_()"),),
        ("wrong-value",),
        ("is overwritten after its forward", "clone()"),
        never=("collective without a backward", "loss term"),
    ),
    Bug(
        "micro-batches received into two buffers in turn",
        "pp=2",
        ONE_BUFFER.replace(
            "buffer = torch.empty_like(part) if buffer is None else buffer\n",
            "buffer = torch.empty_like(part) if len(inputs) < 2 else buffers[-2]\n            buffers.append(buffer)\n",
        ),
        (("part = buffer.clone().requires_grad_()", "part = buffer.data.requires_grad_()"),),
        ("wrong-value",),
        ("is overwritten after its forward", "clone()"),
        never=("collective without a backward", "loss term"),
    ),
)

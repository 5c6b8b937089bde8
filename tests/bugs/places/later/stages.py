"""A pipeline of two stages beside data parallel."""

from __future__ import annotations

from tests.bugs.pipeline import WITH_DATA
from tests.bugs.places.fault import NOTHING, Fault, Program

STAGES_DP = Program(
    "blocks, PP + DP",
    "pp=2,dp=2",
    WITH_DATA
    + '''
_parallelize = parallelize


def parallelize(model, mesh):
    _parallelize(model, mesh)
    for name, layer in model.layers.items():
        if name == "2":
            spoil(layer, mesh)


def spoil(layer, mesh):
    """Leave everything as it is."""

''',
)

FAULTS = (
    Fault(
        "rows in another order in a layer of the last stage",
        STAGES_DP,
        ((NOTHING, "    layer.linear.register_forward_hook(lambda module, inputs, output: output.flip(0))\n"),),
        ("layers.2.linear",),
        ("order",),
    ),
    Fault(
        "the gradient that is sent back doubled",
        STAGES_DP,
        (
            (
                "        distributed.send(x.grad, dst=ranks[stage - 1])",
                "        distributed.send(x.grad * 2, dst=ranks[stage - 1])",
            ),
        ),
        ("layers.1", "layers.2"),
        ("2 times", "backward"),
    ),
)

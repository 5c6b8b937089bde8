"""torch's route as `explain` tells it is the one that torch takes."""

from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.layout.routes import torch_route
from shardviz.live import world

LAYOUTS = ("[8, 12]", "[8/a, 12]", "[8/b, 12/a]", "[8/a/b, 12]", "[8, 12/b] +a", "[8/a, 12] +b", "[8, 12] +a +b")

ON_CPU = {"all_to_all": "all_gather"}
"""On CPUs torch gathers and slices instead, for the sake of old gloo."""


def test_torchs_redistribute_takes_the_route_that_is_reported():
    mesh = parse_mesh("a=2,b=2")
    pairs = [(start, end) for start in LAYOUTS for end in LAYOUTS if start != end and "+" not in end]
    ran = world.launch("tests.live.routing:redistributed", (mesh, pairs), num_ranks=4)[0]
    for (start, end), collectives in zip(pairs, ran, strict=True):
        legs = torch_route(parse(start).layout(mesh), parse(end).layout(mesh))
        told = [(ON_CPU.get(leg.collective, leg.collective), leg.axis) for leg in legs if leg.collective != "slice"]
        assert list(dict.fromkeys(told)) == collectives, (start, end)

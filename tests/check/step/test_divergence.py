"""The first wrong module, from states alone: forward, backward, and what looks like one and is not."""

from shardviz.check.step.trace.calls import Call, Calls
from shardviz.check.step.trace.divergence import first_in_backward, first_in_forward
from shardviz.dump.records.trace import PointRecord

IN, OUT, BACK_IN, BACK_OUT = "input", "output", "gradient of input", "gradient of output"


def calls_of(*rows):
    """Make calls from rows of a module, a side's states, and the numbers of its tensors."""
    found = []
    for order, (module, sides) in enumerate(rows):
        points = [
            PointRecord(module, what, order, state, tensor=tensor, layout="[4/dp, 8] +tp" if state == "pending" else "")
            for what, (state, tensor) in sides.items()
        ]
        found.append(Call(module, 0, order, {0: points}))
    return Calls(tuple(found))


def forward(module, given, returned):
    return module, {IN: (given, 0), OUT: (returned, 1)}


def backward(module, given, returned, reads=0):
    return module, {BACK_OUT: (given, 100 + len(module)), BACK_IN: (returned, reads)}


def test_slots_of_experts_are_no_fault_where_the_layer_of_experts_is_right():
    calls = calls_of(
        forward("layers.0.moe.experts", "odd", "odd"),
        forward("layers.0.moe", "right", "right"),
        forward("layers.1.attn", "right", "odd"),
    )
    assert first_in_forward(calls).module == "layers.1.attn"


def test_readers_of_one_tensor_are_not_to_blame_beside_one_that_was_given_a_wrong_gradient():
    calls = calls_of(
        backward("layers.1.attn.q", "right", "odd", reads=7),
        backward("layers.1.attn.v", "odd", "odd", reads=7),
        backward("layers.1.attn", "right", "odd", reads=7),
        backward("layers.2", "right", "right"),
    )
    assert first_in_backward(calls).module == "layers.1.attn"


def experts(first, second):
    """Two layers of experts, whose routers' gradients come back in some state; the shared expert's goes wrong."""
    return calls_of(
        backward("layers.0.moe.router", first, "right", reads=3),
        backward("layers.0.moe", "right", "right", reads=3),
        backward("layers.1.moe.router", *second, reads=7),
        backward("layers.1.moe.shared", "right", "odd", reads=7),
        backward("layers.1.moe", "right", "odd", reads=7),
        backward("layers.2", "right", "right"),
    )


def test_terms_that_come_back_to_a_module_and_are_summed_in_other_layers_are_the_first_wrong():
    found = first_in_backward(experts("right", ("pending", "odd")))
    assert (found.module, found.way, found.before, found.axis) == (
        "layers.1.moe",
        "unsummed",
        "layers.1.moe.router",
        "tp",
    )


def test_terms_that_come_back_in_every_layer_are_meant():
    assert first_in_backward(experts("pending", ("pending", "right"))).module == "layers.1.moe.shared"


def test_terms_that_are_passed_on_are_those_of_the_module_that_sends_them_back():
    calls = calls_of(
        ("attn1", {BACK_OUT: ("pending", 1), BACK_IN: ("odd", 0)}),
        ("linear2", {BACK_OUT: ("pending", 2), BACK_IN: ("pending", 1)}),
        ("attn3", {BACK_OUT: ("right", 3), BACK_IN: ("pending", 2)}),
        ("last", {BACK_OUT: ("right", 4), BACK_IN: ("right", 3)}),
    )
    found = first_in_backward(calls)
    assert (found.way, found.module, found.before, found.axis) == ("unsummed", "attn3", "linear2", "tp")

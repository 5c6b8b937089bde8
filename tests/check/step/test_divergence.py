"""The first wrong module, from states alone: forward, backward, and what looks like one and is not."""

from types import SimpleNamespace

from shardviz.check.step.trace.calls import Call, Calls
from shardviz.check.step.trace.divergence import blamed_by_weights, first_in_backward, first_in_forward
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


def returning(module, outputs, reads, read="odd"):
    """Make a call that reads a tensor, and returns some of which gradients come back in some states."""
    points = [PointRecord(module, IN, 0, "right", tensor=reads), PointRecord(module, BACK_IN, 0, read, tensor=reads)]
    for index, (tensor, state) in enumerate(outputs):
        points.append(PointRecord(module, OUT, 0, "right", index=index, tensor=tensor))
        points.append(PointRecord(module, BACK_OUT, 0, state, index=index, tensor=tensor))
    return module, points


def in_order(*rows):
    return Calls(tuple(Call(module, 0, order, {0: points}) for order, (module, points) in enumerate(rows)))


def test_a_further_output_that_no_module_reads_gets_its_wrong_gradient_from_outside():
    calls = in_order(
        returning("moe.router", [(2, "right")], reads=1),
        returning("moe.experts.0", [(3, "right")], reads=1),
        returning("moe", [(4, "right"), (5, "odd")], reads=1),
        returning("head", [(6, "right")], reads=4, read="right"),
    )
    first = first_in_backward(calls)
    assert (first.way, first.module, first.output) == ("outside", "moe", "output[1] of moe")


def test_an_output_that_is_handed_on_from_layer_to_layer_is_that_of_the_module_that_makes_it():
    calls = in_order(
        returning("layers.0.v", [(2, "odd")], reads=1),
        returning("layers.0.k", [(3, "right")], reads=1),
        returning("layers.0", [(4, "right"), (2, "odd")], reads=0),
        ("layers.1", [*returning("layers.1", [(5, "right"), (2, "odd")], reads=2)[1]]),
        returning("head", [(6, "right")], reads=5, read="right"),
    )
    first = first_in_backward(calls)
    assert (first.way, first.module, first.output) == ("outside", "layers.0.v", "output[1] of layers.1")


def test_an_output_that_code_of_the_model_reads_is_no_further_one_if_it_is_the_only_one():
    calls = in_order(
        returning("moe.router", [(2, "odd")], reads=1),
        returning("moe", [(4, "right")], reads=1),
        returning("head", [(6, "right")], reads=4, read="right"),
    )
    assert first_in_backward(calls).module == "moe"


def test_of_several_modules_that_read_a_tensor_none_is_blamed_if_their_weights_are_right():
    calls = in_order(
        returning("norm", [(1, "odd")], reads=0),
        returning("q", [(2, "right")], reads=1),
        returning("k", [(3, "right")], reads=1),
        returning("head", [(6, "right")], reads=4, read="right"),
    )
    right = {name: SimpleNamespace(wrong=()) for name in ("q.weight", "k.weight")}
    first = blamed_by_weights(first_in_backward(calls), calls, right)
    assert (first.way, first.module, first.readers) == ("between", "norm", ("q", "k"))

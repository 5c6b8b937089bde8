"""The first wrong module, from states alone: forward, backward, and what looks like one and is not."""

from shardviz.check.step.trace.backward import first_in_backward
from shardviz.check.step.trace.calls import Call, Calls
from shardviz.check.step.trace.forward import first_in_forward
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


def test_the_innermost_module_with_right_inputs_and_a_wrong_output_is_named():
    calls = calls_of(
        forward("layers.0", "right", "right"),
        forward("layers.1.attn.o", "right", "odd"),
        forward("layers.1.attn", "right", "odd"),
        forward("layers.1", "right", "odd"),
    )
    assert first_in_forward(calls).module == "layers.1.attn.o"


def test_code_between_two_modules_is_that_of_the_module_around_them():
    calls = calls_of(
        forward("layers.1.attn.q", "right", "right"),
        forward("layers.1.attn.o", "odd", "odd"),
        forward("layers.1.attn", "right", "odd"),
    )
    found = first_in_forward(calls)
    assert (found.module, found.way, found.after, found.before) == (
        "layers.1.attn",
        "between",
        "layers.1.attn.q",
        "layers.1.attn.o",
    )


def test_a_sum_that_other_layers_make_is_missed_where_its_terms_are_returned():
    calls = calls_of(
        forward("layers.0.attn", "right", "right"),
        forward("layers.0.norm", "right", "right"),
        forward("layers.1.attn", "right", "pending"),
        forward("layers.1.norm", "odd", "odd"),
    )
    found = first_in_forward(calls)
    assert (found.module, found.way, found.axis) == ("layers.1.attn", "unsummed", "tp")


def test_slots_of_experts_are_no_fault_where_the_layer_of_experts_is_right():
    calls = calls_of(
        forward("layers.0.moe.experts", "odd", "odd"),
        forward("layers.0.moe", "right", "right"),
        forward("layers.1.attn", "right", "odd"),
    )
    assert first_in_forward(calls).module == "layers.1.attn"


def test_a_right_step_has_no_first_wrong_module():
    calls = calls_of(forward("layers.0", "right", "right"), backward("layers.0", "right", "right"))
    assert first_in_forward(calls) is None
    assert first_in_backward(calls) is None


def test_the_last_module_that_turns_a_right_gradient_into_a_wrong_one_is_named():
    calls = calls_of(
        backward("layers.0", "odd", "odd"),
        backward("layers.1.mlp", "right", "odd", reads=7),
        backward("layers.1", "right", "odd"),
        backward("layers.2", "right", "right"),
    )
    assert first_in_backward(calls).module == "layers.1.mlp"


def test_readers_of_one_tensor_are_not_to_blame_beside_one_that_was_given_a_wrong_gradient():
    calls = calls_of(
        backward("layers.1.attn.q", "right", "odd", reads=7),
        backward("layers.1.attn.v", "odd", "odd", reads=7),
        backward("layers.1.attn", "right", "odd", reads=7),
        backward("layers.2", "right", "right"),
    )
    assert first_in_backward(calls).module == "layers.1.attn"


def test_the_first_module_that_nothing_flows_back_from_cut_the_graph():
    calls = calls_of(
        backward("layers.1.attn.q", "none", "odd", reads=7),
        backward("layers.1.attn.o", "cut", "none"),
        backward("layers.1.attn", "cut", "odd"),
        backward("layers.1", "right", "odd"),
        backward("layers.2", "right", "right"),
    )
    found = first_in_backward(calls)
    assert (found.module, found.way) == ("layers.1.attn.o", "cut")


def test_nothing_is_reported_of_backward_where_it_begins_with_another_gradient():
    calls = calls_of(backward("layers.0", "odd", "odd"), backward("", "odd", "odd"))
    assert first_in_backward(calls) is None


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

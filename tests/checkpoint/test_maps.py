"""The language of maps: what is read, what is refused with its line, and what each function does, against torch."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.checkpoint.comparing.equality import agree
from shardviz.checkpoint.maps.families import families, find_map
from shardviz.checkpoint.maps.functions import FUNCTIONS
from shardviz.checkpoint.maps.language import (
    LANGUAGE,
    MAX_MAP,
    Call,
    Name,
    functions_text,
    mapping_of,
    parse_rules,
    read_rules,
    rules_of,
)
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, Op, value_of
from shardviz.checkpoint.maps.matching import apply, invert, named_tensors
from shardviz.cli import main
from shardviz.errors import ShardvizError
from tests.checkpoint.maps import compared, permuted, save, weight
from tests.lanes import cases

NAMES = ["layers.3.wq.weight", "layers.13.wq.weight", "layers.3.wq.bias", "norm.weight"]


# Reading


def test_a_map_is_lines_of_names_and_what_they_are_made_of(tmp_path):
    (tmp_path / "map").write_text("# q\n\nlayers.*.wq.* = h.*.q.*   # no more\nn=cat(a, stack(e.*.w), 0)\nx ?= none\n")
    first, second, third = read_rules(tmp_path / "map")
    assert (first.left, first.right, first.optional) == ("layers.*.wq.*", Name("h.*.q.*"), False)
    assert second.right == Call("cat", (Name("a"), Call("stack", (Name("e.*.w"),))), (0,))
    assert (third.right, third.optional, third.where) == (None, True, f"{tmp_path / 'map'}, line 5")


def test_a_map_that_is_not_text_or_too_long_is_an_error(tmp_path):
    (tmp_path / "map").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text("#" * (MAX_MAP + 1))
    for path in ("map", "none", "."):
        with pytest.raises(ShardvizError, match="cannot read"):
            read_rules(tmp_path / path)
    with pytest.raises(ShardvizError, match="more than 1,048,576 bytes"):
        read_rules(tmp_path / "long")


def test_a_map_goes_to_the_ranks_of_a_job_and_back():
    rules = parse_rules("a = cat(b, c)\nd ?= e\nd ?= rotary(f, head_dim)\ng = none", "my.map")
    again = rules_of(mapping_of(rules), "reference_names")
    assert [(one.left, one.right, one.optional) for one in again] == [
        (one.left, one.right, one.optional) for one in rules
    ]


def test_every_function_is_in_the_help(capsys):
    assert main(["help", "diff"]) == 0
    out = capsys.readouterr().out
    assert LANGUAGE in out
    assert functions_text() in out
    assert all(f"{name}(" in out for name in FUNCTIONS)


@pytest.mark.parametrize("family", families())
def test_maps_that_come_with_shardviz_can_be_read(family):
    assert len(find_map(family)) > 10


def test_a_family_that_is_not_there_is_guessed():
    with pytest.raises(ShardvizError, match="cannot read lama: No such file, and no map of that name") as caught:
        find_map("lama")
    assert caught.value.hint == "did you mean llama?"


# Fitting names


def applied(text, left, right, numbers=None):
    def known(names):
        return {name: SimpleNamespace(name=name, shape=(4, 8), dtype="float32", bits=None) for name in names}

    rules = parse_rules(text, "my.map")
    return apply(
        rules,
        named_tensors("the model", known(left), []),
        named_tensors("ckpt", known(right), []),
        numbers or {},
        strict=True,
    )


def test_stars_stand_for_what_was_in_their_place():
    there = ["model.layers.3.q_proj.weight", "model.layers.13.q_proj.weight", "model.layers.3.q_proj.bias"]
    found = applied("layers.*.wq.* = model.layers.*.q_proj.*", NAMES, there)
    assert found.known_as == dict(zip(NAMES, there, strict=False))


def test_the_first_line_that_fits_counts_and_dots_are_dots():
    found = applied("norm.weight = a\n* = b.*", ["norm.weight", "normxweight"], ["a", "b.normxweight"])
    assert found.known_as == {"norm.weight": "a", "normxweight": "b.normxweight"}


def test_fewer_stars_drop_the_last_of_the_pattern():
    assert applied("*.* = x.*", ["a.b"], ["x.a"]).known_as == {"a.b": "x.a"}


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("norm.wieght = a", r"my\.map, line 1: no tensor of the model fits norm\.wieght", "did you mean norm.weight?"),
        (
            "norm.weight = cat(x, a)",
            r"line 1: no tensor of ckpt fits x",
            "write norm.weight ?= ... if it may be missing",
        ),
        (
            "* = a\nnorm.weight = a",
            r"line 2: every tensor that fits norm\.weight is taken by my\.map, line 1",
            "narrower",
        ),
        ("norm.weight = cat(a, a, 2)", r"line 1: .*there is no dim 2 in \[4, 8\]", "the line is"),
        ("norm.weight = split(a, 3, 0, 1)", r"dim 1 of \[4, 8\] has no part 0 of 3 equal ones", "the line is"),
        ("norm.weight = rotary(a, head_dim)", r"head_dim has no value here", "the line is"),
    ],
)
def test_a_line_that_does_not_fit_is_named(text, told, hint):
    with pytest.raises(ShardvizError, match=told) as caught:
        applied(text, NAMES, ["a"])
    assert hint in caught.value.hint


def test_a_star_that_the_left_side_lacks_stands_for_all_numbers_in_order():
    there = [f"layers.{layer}.e.{at}.{name}" for layer in range(2) for at in range(11) for name in ("w1", "w3")]
    found = applied("h.*.up = stack(cat(layers.*.e.*.w1, layers.*.e.*.w3))", ["h.1.up"], sorted(there))
    parts = [part.name for op in found.made["h.1.up"].node.parts for part in op.parts]
    assert parts == [f"layers.1.e.{at}.{name}" for at in range(11) for name in ("w1", "w3")]


def test_nested_stars_count_from_the_outside():
    there = [f"l.{layer}.e.{at}" for layer in range(2) for at in range(3)]
    found = applied("all = stack(stack(l.*.e.*))", ["all"], there)
    assert found.made["all"].shape == (2, 3, 4, 8)
    assert [part.name for op in found.made["all"].node.parts for part in op.parts] == there


def test_a_number_that_is_left_out_is_reported():
    found = applied("up ?= stack(e.*)", ["up"], ["e.0", "e.2"])
    assert found.lacking == {"up": "it is made of stack(e.*), and there is no e.1"}


def test_a_star_as_a_number():
    found = applied("l.*.e.* = take(l.*.e, *)", ["l.1.e.3"], ["l.1.e"])
    assert found.made["l.1.e.3"].node.numbers == (3,)


def test_of_lines_that_may_fit_the_first_counts():
    text = "w ?= a\nw ?= b"
    assert applied(text, ["w"], ["b"]).known_as == {"w": "b"}
    assert applied(text, ["w"], ["a", "b"]).known_as == {"w": "a"}
    assert applied(text, ["w"], ["c"]).known_as == {}


# Functions


def tensor(value, name="w"):
    bits = value.contiguous().view(torch.uint8).numpy().view("<u4").reshape(value.shape)
    return SimpleNamespace(name=name, shape=tuple(value.shape), dtype="float32", bits=bits)


def made(op):
    return MappedTensor(op, op.shape, "text")


W, V = weight(12, 10), weight(6, 10, seed=1)
EXPECTED = {
    "cat": (Op("cat", (tensor(W), tensor(V)), (0,)), torch.cat([W, V])),
    "cat along the last dim": (Op("cat", (tensor(W), tensor(W)), (-1,)), torch.cat([W, W], 1)),
    "stack": (Op("stack", (tensor(W), tensor(W)), ()), torch.stack([W, W])),
    "stack along the last dim": (Op("stack", (tensor(W), tensor(W)), (-1,)), torch.stack([W, W], -1)),
    "interleave": (Op("interleave", (tensor(W), tensor(W)), (0,)), torch.stack([W, W], 1).reshape(24, 10)),
    "interleave columns": (Op("interleave", (tensor(W), tensor(W)), (1,)), torch.stack([W, W], 2).reshape(12, 20)),
    "interleave groups": (
        Op("interleave", (tensor(W), tensor(V)), (0, 3)),
        torch.cat([W.view(3, 4, 10), V.view(3, 2, 10)], 1).reshape(18, 10),
    ),
    "split": (Op("split", (tensor(W),), (3, 1)), W.chunk(3)[1]),
    "split columns": (Op("split", (tensor(W),), (2, 1, 1)), W.chunk(2, 1)[1]),
    "slice": (Op("slice", (tensor(W),), (2, 5)), W[2:5]),
    "take": (Op("take", (tensor(W),), (3, 1)), W[:, 3]),
    "transpose": (Op("transpose", (tensor(W),)), W.t()),
    "permute": (Op("permute", (tensor(W.view(3, 4, 10)),), (2, 0, 1)), W.view(3, 4, 10).permute(2, 0, 1)),
    "reshape": (Op("reshape", (tensor(W),), (3, -1, 5)), W.reshape(3, -1, 5)),
    "rotary": (Op("rotary", (tensor(W),), (6,)), permuted(W, 2)),
    "rotary of a bias": (Op("rotary", (tensor(W[:, 0]),), (4,)), permuted(W[:, :1], 3)[:, 0]),
    "unrotary": (Op("unrotary", (tensor(permuted(W, 2)),), (6,)), W),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_function_does_what_torch_does(name):
    op, expected = EXPECTED[name]
    assert op.shape == tuple(expected.shape)
    assert np.array_equal(value_of(op), tensor(expected).bits)
    assert agree(made(op), tensor(expected))
    changed = expected.clone().contiguous()
    changed.view(-1)[-1] += 1
    assert not agree(made(op), tensor(changed))


@st.composite
def expressions(draw, depth=3):
    """Draw functions of functions, with what torch makes of them."""
    if depth == 0 or draw(st.booleans()):
        shape = draw(st.sampled_from([(4, 6), (8, 4), (2, 4, 6), (8,)]))
        value = weight(*shape, seed=draw(st.integers(0, 99)))
        return tensor(value), value
    node, value = draw(expressions(depth=depth - 1))
    dim = draw(st.integers(0, value.ndim - 1))
    others = [node, node][: draw(st.integers(1, 2))]
    both_ = [value] * len(others)
    found = [
        (Op("cat", tuple(others), (dim,)), torch.cat(both_, dim)),
        (Op("stack", tuple(others), (dim,)), torch.stack(both_, dim)),
        (Op("interleave", (node, node), (dim,)), torch.stack([value, value], dim + 1).flatten(dim, dim + 1)),
        (Op("take", (node,), (0, dim)), value.select(dim, 0)) if value.ndim > 1 else None,
        (Op("split", (node,), (2, 1, dim)), value.chunk(2, dim)[1]) if value.shape[dim] % 2 == 0 else None,
        (Op("transpose", (node,), ()), value.transpose(-2, -1)) if value.ndim > 1 else None,
        (Op("reshape", (node,), (-1,)), value.reshape(-1)),
    ]
    if value.shape[0] % 4 == 0:
        turned = value.reshape(-1, 2, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        found.append((Op("rotary", (node,), (4,)), turned))
    return draw(st.sampled_from([one for one in found if one is not None]))


@given(expressions())
@cases(400)
def test_functions_of_functions_do_what_torch_does(case):
    node, value = case
    op = node if isinstance(node, Op) else Op("cat", (node,))
    assert op.shape == tuple(value.shape)
    assert np.array_equal(value_of(op), tensor(value).bits)
    assert agree(made(op), tensor(value))


@pytest.mark.parametrize(
    "text",
    [
        "q = rotary(wq, 6)", "q = transpose(wq)", "q = permute(wq, 1, 0)", "qk = cat(wq, wk)", "qk = stack(wq, wk)",
        "q = h", "l.*.all = stack(cat(l.*.e.*.w1, l.*.e.*.w3))", "all = stack(e.*.w)", "q = transpose(rotary(wq, 4))",
    ],
)  # fmt: skip
def test_a_rule_the_other_way_round_gives_its_parts_back(text):
    (rule,) = parse_rules(text, "my.map")
    parts = {name: tensor(weight(12, 12, seed=at), name) for at, name in enumerate(PARTS)}
    wholes = {rule.left.replace("*", "0")}
    whole = apply([rule], named_tensors("", dict.fromkeys(wholes), []), named_tensors("", parts, []), {})
    known = {
        name: SimpleNamespace(name=name, shape=one.shape, dtype="float32", bits=one.bits)
        for name, one in whole.made.items()
    }
    known |= {name: parts[other] for name, other in whole.known_as.items()}
    back = apply(
        invert(rule), named_tensors("", dict.fromkeys(PARTS), []), named_tensors("", known, []), {}, strict=False
    )
    for name in {one.name for op in whole.made.values() for one in parts_in(op.node)}:
        assert np.array_equal(back.made[name].bits, parts[name].bits), name


PARTS = ["wq", "wk", "h", "e.0.w", "e.1.w", *(f"l.0.e.{at}.{name}" for at in range(2) for name in ("w1", "w3"))]


def parts_in(node):
    return [leaf for part in node.parts for leaf in parts_in(part)] if isinstance(node, Op) else [node]


def test_parts_whose_sizes_are_not_known_are_not_guessed():
    for text in ("all = cat(e.*.w)", "qkv = interleave(q, k, 0)", "x = slice(y, 0, 4)", "x.* = y"):
        assert invert(parse_rules(text, "my.map")[0]) == []


# Comparing


# Limits


@given(
    st.lists(
        st.sampled_from([*"()=,*?# \n0", "cat", "stack", "take", "w1", "none", "head_dim", "-1"]), max_size=24
    ).map("".join)
)
@cases(400)
def test_whatever_a_map_has_is_read_or_refused_in_one_line(text):
    refused = ""
    try:
        rules = parse_rules(text, "my.map")
        apply(rules, named_tensors("a", {"w1": tensor(W)}, []), named_tensors("b", {"w1": tensor(W)}, []), {})
    except ShardvizError as error:
        refused = error.message
    assert "\n" not in refused
    assert not refused or refused.startswith("my.map, line ")


def test_what_is_joined_is_compared_without_being_made(tmp_path):
    parts = {f"e.{at}": weight(256, 512, seed=at) for at in range(4)}
    other = save(tmp_path / "other", parts)
    one = save(tmp_path / "one", {"up": torch.stack([part.t() for part in parts.values()])})
    rules = "up = stack(transpose(e.*))"
    assert compared(one, other, rules) == {}
    tracemalloc.start()
    try:
        assert compared(one, other, rules) == {}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 4 * 256 * 512 * 4

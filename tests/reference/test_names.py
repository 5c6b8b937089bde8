"""Names of a model and of its reference: patterns with stars, and what is said where none fits."""

import pytest

from shardviz.errors import ShardvizError
from shardviz.reference.names import refuse_strangers, renamed

NAMES = ["layers.3.wq.weight", "layers.13.wq.weight", "layers.3.wq.bias", "norm.weight"]


def test_stars_stand_for_what_was_in_their_place():
    assert renamed(NAMES, {"layers.*.wq.*": "model.layers.*.self_attn.q_proj.*"}) == {
        "layers.3.wq.weight": "model.layers.3.self_attn.q_proj.weight",
        "layers.13.wq.weight": "model.layers.13.self_attn.q_proj.weight",
        "layers.3.wq.bias": "model.layers.3.self_attn.q_proj.bias",
        "norm.weight": "norm.weight",
    }


def test_the_first_pattern_that_fits_counts_and_dots_are_dots():
    assert renamed(["norm.weight", "normxweight"], {"norm.weight": "a", "*": "b.*"}) == {
        "norm.weight": "a",
        "normxweight": "b.normxweight",
    }


def test_fewer_stars_drop_the_last_of_the_pattern():
    assert renamed(["a.b"], {"*.*": "x.*"}) == {"a.b": "x.a"}


def test_a_pattern_that_fits_nothing_is_an_error_with_the_name_that_was_meant():
    with pytest.raises(ShardvizError, match=r"no tensor of the model fits 'norm\.wieght'") as caught:
        renamed(NAMES, {"norm.wieght": "x"})
    assert caught.value.hint == "did you mean norm.weight?"


def test_a_star_too_many_is_an_error():
    with pytest.raises(ShardvizError, match=r"'\*\.\*' has more \* than 'norm\.\*'"):
        renamed(NAMES, {"norm.*": "*.*"})


def test_strangers_are_listed_three_of_each_side():
    with pytest.raises(ShardvizError) as caught:
        refuse_strangers(["d", "a", "c", "b"], ["x"], "model.safetensors")
    assert caught.value.message == (
        "no tensor of the model is in model.safetensors by its name: the model has a, b, c, ..., "
        "model.safetensors has x"
    )

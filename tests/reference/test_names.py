"""Names of a model and of its reference: patterns with stars, and what is said where none fits."""

import pytest

from shardviz.errors import ShardvizError
from shardviz.reference.names import matched, read_map, refuse_strangers, renamed

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
        refuse_strangers(["d", "a", "c", "b"], ["x"], "model.safetensors", ())
    assert caught.value.message == (
        "no tensor of the model is in model.safetensors by its name: the model has a, b, c, ..., "
        "model.safetensors has x"
    )


# Names that only begin or are wrapped differently


def test_what_a_nested_state_dict_puts_before_all_names_is_found():
    others = [f"app.model.{name}" for name in NAMES]
    others += [f"app.optimizer.state.{name}.exp_avg" for name in NAMES] + ["app.optimizer.param_groups.0.lr", "step"]
    found = matched(NAMES, others)
    assert found.before == "app.model."
    assert found.names == {name: f"app.model.{name}" for name in NAMES}


def test_moments_that_end_in_a_models_names_are_not_taken_for_it():
    others = [f"{before}{name}" for before in ("optimizer.state.exp_avg.", "model.deep.") for name in NAMES]
    assert matched(NAMES, others).before == "model.deep."


def test_of_two_models_with_the_same_names_none_is_taken():
    found = matched(NAMES, [f"{which}.{name}" for which in ("actor", "critic") for name in NAMES])
    assert (found.names, found.open) == ({}, ("actor.", "critic."))


def test_the_beginning_that_fits_more_names_is_taken_and_the_rest_is_left_out():
    found = matched([*NAMES, "head.weight"], [*(f"a.{name}" for name in NAMES), "b.norm.weight"])
    assert found.before == "a."
    assert "head.weight" not in found.names


def test_no_beginning_chooses_a_layer():
    assert matched(["weight"], ["0.weight"]).names == {}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("base_model.model.q.base_layer.weight", "q.weight"),
        ("base_model.model.model.q.base_layer.weight", "model.q.weight"),
        ("module._orig_mod.q.weight", "q.weight"),
        ("h._checkpoint_wrapped_module.q.weight", "h.q.weight"),
        ("h.q.weight", "h._orig_mod.q.weight"),
        ("q.weight", "base_model.model.q.base_layer.weight"),
    ],
)
def test_what_libraries_wrap_is_the_same_tensor(name, other):
    assert matched([name], [other]).names == {name: other}


def test_an_adapter_is_in_no_reference():
    assert matched(["base_model.model.q.lora_A.default.weight"], ["q.weight"]).names == {}


def test_the_same_names_twice_say_which_to_name():
    with pytest.raises(ShardvizError, match=r"has the model's names 2 times: behind actor\., critic\.") as caught:
        refuse_strangers(["w"], ["actor.w", "critic.w"], "ckpt", ("actor.", "critic."))
    assert caught.value.hint == 'say which is meant: reference_names={"*": "actor.*"}'


# A file of patterns


def test_a_map_is_lines_of_patterns(tmp_path):
    path = tmp_path / "map"
    path.write_text("# q\n\nlayers.*.wq.* = model.layers.*.q.*   # fused no more\nnorm.weight=n.weight\n")
    assert read_map(path) == {"layers.*.wq.*": "model.layers.*.q.*", "norm.weight": "n.weight"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = b\nc\n", r"line 2: 'c' is not `pattern = pattern`"),
        ("a = b = c", r"line 1: 'a = b = c' is not"),
        ("= b", r"line 1: '= b' is not"),
        ("a b = c", r"line 1: 'a b = c' is not"),
        ("a = b\na = c", r"line 2: a comes twice"),
    ],
)
def test_a_line_of_a_map_that_cannot_be_read_is_named(tmp_path, text, told):
    path = tmp_path / "map"
    path.write_text(text)
    with pytest.raises(ShardvizError, match=told):
        read_map(path)


def test_a_map_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "map").write_bytes(b"\xff\xfe")
    for path in ("map", "none", "."):
        with pytest.raises(ShardvizError, match="cannot read"):
            read_map(tmp_path / path)

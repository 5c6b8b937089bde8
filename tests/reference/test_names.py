"""Names of a model and of its reference: wrappers, beginnings, and what is said where none fits."""

import pytest

from shardviz.errors import ShardvizError
from shardviz.reference.names import matched, refuse_strangers, wrapped_alone

NAMES = ["layers.3.wq.weight", "layers.13.wq.weight", "layers.3.wq.bias", "norm.weight"]


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
    assert caught.value.hint.startswith('say which is meant: reference_names={"*": "actor.*"}')
    assert caught.value.hint.endswith("--map: * = actor.*")


def test_a_module_around_the_model_puts_its_name_before_all_others():
    assert matched([f"policy.{name}" for name in NAMES], NAMES).names == {f"policy.{name}": name for name in NAMES}


def test_of_two_models_in_one_module_none_is_taken():
    assert not matched([f"{which}.{name}" for which in ("actor", "critic") for name in NAMES], NAMES).names


def test_a_wrappers_own_weights_are_not_the_wrapped_ones():
    shapes = {"wq.base.weight": 16, "wq.lora_a.weight": 4, "wk.weight": 16, "experts.0.weight": 16, "top.weight": 16}
    found = wrapped_alone(shapes, ["wq.weight", "experts.weight", "weight"], lambda name, other: shapes[name] == 16)
    assert found == {"wq.base.weight": "wq.weight"}


def test_of_two_weights_that_could_be_the_wrapped_one_none_is_taken():
    assert not wrapped_alone(["wq.base.weight", "wq.copy.weight"], ["wq.weight"], lambda name, other: True)

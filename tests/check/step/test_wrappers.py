"""What wraps a parameter: a tied one has several names, and a wrapper lists one of them."""

from types import SimpleNamespace

from shardviz.check.step.comparison import wrappers_of


def test_a_tied_weight_is_wrapped_by_what_wraps_another_of_its_names():
    ddp = SimpleNamespace(kind="ddp", names=("words.weight",))
    tied = ("words.weight", "head.weight")
    dump = SimpleNamespace(
        files=SimpleNamespace(ranks={0: SimpleNamespace(wrappers=(ddp,))}), ties=dict.fromkeys(tied, tied)
    )
    assert wrappers_of(dump, 0, "head.weight") == {"ddp": ddp}
    assert wrappers_of(dump, 0, "bias") == {}

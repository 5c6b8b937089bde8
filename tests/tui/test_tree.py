"""The tree of modules: alike layers are one line, one that differs stands whole, one that is sought stands alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from shardviz.tui.model.names import place_of
from shardviz.tui.model.tree import errors_first, layer_of, lines_of, tree_of, visible
from tests.lanes import nightly
from tests.tui.driving import walk, walk_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardviz.check.verdicts import Verdict
    from shardviz.tui.model.tree import Apart, Node, TreeLine


@dataclass(frozen=True)
class Entry:
    """A tensor, or identical layers of one."""

    names: tuple[str, ...]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    role: str = "param"
    short_layout: str = ""
    facts: str = ""

    @property
    def listed(self) -> bool:
        return self.role == "param"

    def verdict_of(self, name: str) -> Verdict:
        return self.verdicts.get(name, "good")


def layers(suffix: str, numbers: range | list[int], **verdicts: Verdict) -> Entry:
    names = {number: f"layers.{number}.{suffix}" for number in numbers}
    return Entry(tuple(names.values()), {names[int(number[1:])]: verdict for number, verdict in verdicts.items()})


def shown(
    entries: list[Entry], apart: Apart = frozenset(), order: Callable[[Sequence[Node]], float] | None = None
) -> list[TreeLine]:
    return lines_of(tree_of(entries), apart, order)


def paths(lines: list[TreeLine]) -> list[str]:
    return ["/".join(line.path) for line in lines]


def test_what_the_whole_model_is_given_and_gives_is_named() -> None:
    """A step's places are `module: output`, and the model itself has no name."""
    assert place_of(": output", "activation") == ((), ("the model: output (activation)", None))


def test_layers_that_are_alike_are_one_line_with_all_their_names() -> None:
    lines = shown([layers("wq.weight", range(4)), layers("norm", range(4))])
    assert paths(lines) == [
        "layers.[0-3]",
        "layers.[0-3]/wq",
        "layers.[0-3]/wq/weight",
        "layers.[0-3]/norm",
    ]
    assert lines[2].names == tuple(f"layers.{layer}.wq.weight" for layer in range(4))
    assert (lines[0].count, lines[0].verdict, lines[0].number) == (4, "good", 0)


def test_a_layer_whose_one_tensor_differs_stands_whole_beside_the_others_in_the_same_order() -> None:
    lines = shown([layers("wq", [0, 1, 3]), layers("wk", range(4)), layers("wq", [2])])
    assert paths(lines) == [
        "layers.[0-1,3]",
        "layers.[0-1,3]/wq",
        "layers.[0-1,3]/wk",
        "layers.2",
        "layers.2/wq",
        "layers.2/wk",
    ]
    assert [line.entry for line in lines[4:]] == [2, 1]
    assert lines[5].names == ("layers.2.wk",)


def test_a_layer_that_is_wrong_alone_stands_alone_though_its_records_are_like_the_others() -> None:
    lines = shown([layers("wq", range(4), n1="error")])
    assert [(line.path[0], line.verdict) for line in lines if line.entry is None] == [
        ("layers.[0,2-3]", "good"),
        ("layers.1", "error"),
    ]


def test_a_state_that_was_not_compared_leaves_its_module_as_its_weights_are() -> None:
    state = Entry(("up.weight.exp_avg",), {"up.weight.exp_avg": "unknown"}, "optim")
    output = Entry(("loss",), {"loss": "unknown"}, "output")
    verdicts = {"/".join(line.path): line.verdict for line in shown([Entry(("up.weight",)), state, output])}
    assert verdicts["up"] == "good"
    assert verdicts["up/weight.exp_avg (optim)"] == verdicts["loss (output)"] == "unknown"
    wrong = Entry(("up.weight.exp_avg",), {"up.weight.exp_avg": "error"}, "optim")
    assert shown([Entry(("up.weight",)), wrong])[0].verdict == "error"


def test_layers_stand_apart_when_asked_one_or_all_in_the_order_of_their_numbers() -> None:
    entries = [layers("wq", [0, 1, 3]), layers("wq", [2])]
    one = shown(entries, frozenset({(("layers",), 1)}))
    assert paths(one)[::2] == ["layers.[0,3]", "layers.1", "layers.2"]
    every = shown(entries, frozenset({(("layers",), None)}))
    assert paths(every)[::2] == [f"layers.{layer}" for layer in range(4)]


def test_experts_within_layers_fold_too() -> None:
    names = tuple(f"layers.{layer}.experts.{expert}.w1" for layer in range(2) for expert in range(3))
    assert paths(shown([Entry(names)])) == [
        "layers.[0-1]",
        "layers.[0-1]/experts.[0-2]",
        "layers.[0-1]/experts.[0-2]/w1",
    ]


def test_what_is_wrong_comes_first_when_asked_for_in_every_module() -> None:
    entries = [Entry(("a",)), Entry(("m.x",)), Entry(("m.y",), {"m.y": "error"}), Entry(("b",), {"b": "warning"})]
    assert paths(shown(entries)) == ["a", "m", "m/x", "m/y", "b"]
    assert paths(shown(entries, order=errors_first)) == ["m", "m/y", "m/x", "b", "a"]


def test_what_is_in_a_closed_module_is_not_visible() -> None:
    lines = shown([Entry(("a.b.x", "a.c", "d.e"))])
    assert paths(visible(lines, lambda line: line.path != ("a",))) == ["a", "d", "d/e"]
    assert paths(visible(lines, lambda line: line.path != ("a", "b"))) == ["a", "a/b", "a/c", "d", "d/e"]
    assert visible(lines, lambda _: True) == lines


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.b", (("a", None), ("b", None))),
        ("a.0.b", (("a", 0), ("b", None))),
        ("a.0.1", (("a", 0), ("", 1))),
        ("0", (("", 0),)),
        ("a.007", (("a", None), ("007", None))),
        ("a." + "9" * 40, (("a", None), ("9" * 40, None))),
        ("a.[x.y].b", (("a", None), ("[x.y]", None), ("b", None))),
        ("", (("(no name)", None),)),
        ("...", (("(no name)", None),)),
    ],
)
def test_names_are_split_at_dots_and_numbers_stay_with_their_module(
    name: str, parts: tuple[tuple[str, int | None], ...]
) -> None:
    assert place_of(name) == (parts[:-1], parts[-1])


def test_a_tensor_and_a_module_of_one_name_are_both_there() -> None:
    lines = shown([Entry(("a.b",)), Entry(("a",)), Entry(("a",))])
    assert [line.entry for line in lines] == [None, 0, 1, 2]


def test_a_states_name_stays_beside_its_parameter() -> None:
    assert place_of("m.weight.exp_avg", "optim") == ((("m", None),), ("weight.exp_avg (optim)", None))


def test_the_first_number_of_a_name_is_its_layer() -> None:
    assert layer_of("model.layers.17.experts.3.w1") == (("model", "layers"), 17)
    assert layer_of("embed.weight") is None


def tree(text: str) -> list[str]:
    """Return the lines of the tree on a screen of 120 columns."""
    return [line[2:42].rstrip() for line in text.splitlines()[2:29] if line.startswith("│") and line[2:42].strip()]


def modules(text: str) -> list[str]:
    """Return the modules in the tree."""
    return [line.split()[2] for line in tree(text) if line[0] in "▾▸"]


def test_search_finds_a_layer_opens_it_and_leaves_it_on_its_own(even_bug: Path) -> None:
    walks = {
        "found": ("slash", "type layers.1", "enter"),
        "all": ("escape",),
        "folded": ("u",),
        "each": ("u",),
    }
    shown = {name: modules(one.text) for name, one in walk_on(even_bug, walks).items()}
    assert shown == {
        "found": ["layers.1"],
        "all": ["layers.[0,2]", "layers.1"],
        "folded": ["layers.[0-2]"],
        "each": ["layers.0", "layers.1", "layers.2"],
    }


@nightly
def test_the_map_and_the_copied_name_are_those_of_the_layer(even_bug: Path) -> None:
    shown = walk(even_bug, "slash", "type layers.2", "enter", "y")
    assert shown.clipboard == "layers.2.weight"
    assert "layers.2.weight  float32[16/fsdp/tp, 8]" in shown.text


def test_errors_come_first_when_asked_for(even_bug: Path) -> None:
    walks = walk_on(even_bug, {"model": (), "errors": "o", "again": "o"})
    firsts = {name: tree(shown.text)[0].split()[-1 if name == "errors" else 1] for name, shown in walks.items()}
    assert firsts == {"model": "embedding", "errors": "layers.[0-2]", "again": "embedding"}


@nightly
def test_a_tensors_line_has_its_local_shape_and_bytes(healthy: Path) -> None:
    assert "weight  [24/tp/fsdp, 12]  [3, 12] 144 B" in walk(healthy, size=(200, 60)).text

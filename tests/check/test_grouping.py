"""One cause on many tensors is one finding, different causes stay apart, and what follows from another is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked, Report, grouped, ungrouped, unhidden
from shardviz.explain.kinds import KINDS
from shardviz.picture.machine import report_github, report_junit
from shardviz.picture.text.report import summary_line
from shardviz.picture.text.terminal import Terminal
from tests.findings import finding_of

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding, Kind

NAMES = ("up.weight", "up.bias", "down.weight")


def zeros(
    tensor: str, number: int = 8, cause: str = "Not written", fix: str = "write it", **changes: object
) -> Finding:
    found = finding_of("foreign", "error", tensor, (0, 1), f"{number} zeros", cause=cause, fix=fix)
    return replace(found, **changes)  # type: ignore[arg-type]


def scaled(tensor: str, times: int, cause: str = "Summed over dp") -> Finding:
    return finding_of("wrong-scale", "error", tensor, (0, 1), f"{times} times the other", cause=cause, fix="divide")


def test_a_tensor_of_a_group_that_is_held_in_no_known_order_is_said_to_be() -> None:
    (found,) = grouped([zeros("a", claimed="[4]", held="zeros"), zeros("b", claimed="[8]")])
    assert ("and", "b: claimed [8], held in no order that has a name") in found.layouts


def test_one_cause_on_three_tensors_is_one_finding_with_the_numbers_of_the_first() -> None:
    (found,) = grouped([zeros(name, 8 * at) for at, name in enumerate(NAMES, 1)])
    assert (found.tensor, found.tensors) == ("up.weight", NAMES)
    assert found.summary == "3 tensors, such as up.weight: 8 zeros"
    assert [one.sentence for one in ungrouped([found])] == ["8 zeros", "16 zeros", "24 zeros"]
    assert found.to_json()["tensors"] == NAMES


def test_a_name_that_is_a_word_of_the_cause_neither_splits_a_group_nor_is_replaced_in_it() -> None:
    cause, fix = "The weight was transposed before a split", "transpose a weight where it is loaded"
    for names in (("weight", "bias"), ("bias", "a"), ("a", "weight", "split")):
        (found,) = grouped([zeros(name, cause=cause, fix=fix) for name in names])
        assert (found.cause, found.fix, found.tensors) == (cause, fix, names)
        (found,) = grouped([scaled(name, 2, cause) for name in names])
        assert (found.cause, found.sentence) == (cause, f"{len(names)} tensors alike: 2 times the other")


def test_names_in_a_cause_are_those_of_all_tensors_of_a_group() -> None:
    (found,) = grouped([zeros(name, cause="Nothing wrote {tensor}", fix="write {tensor}") for name in ("w.a", "w.b")])
    assert (found.cause, found.fix) == ("Nothing wrote w.a, w.b", "write w.a, w.b")
    apart = [zeros(name, cause=f"Nothing wrote {other}") for name, other in (("w.a", "v"), ("w.b", "u"))]
    assert len(grouped(apart)) == 2


def test_what_is_reported_alike_of_all_has_no_example() -> None:
    (found,) = grouped([scaled(name, 4) for name in NAMES])
    assert found.summary == "3 tensors alike: 4 times the other"


def test_another_cause_fix_severity_or_set_of_ranks_is_another_finding() -> None:
    others = [
        zeros("b", cause="Padding"),
        zeros("c", fix="cut it"),
        zeros("d", severity="warning"),
        zeros("e", ranks=(1,)),
        zeros("f", kind="missing"),
    ]
    assert len(grouped([zeros("a"), *others])) == 6


def test_one_cause_of_a_step_is_one_finding_whichever_ranks_show_it() -> None:
    left_out = [zeros(name, kind="write-not-applied", ranks=(at,)) for at, name in enumerate(NAMES)]
    (found,) = grouped(left_out)
    assert (found.tensors, found.ranks) == (NAMES, (0, 1, 2))
    frozen = zeros(NAMES[2], cause="Frozen", kind="write-not-applied", ranks=(2,))
    assert len(grouped([*left_out[:2], frozen])) == 2


def test_another_factor_is_another_cause() -> None:
    found = grouped([scaled("a", 4), scaled("b", 2), scaled("c", 4)])
    assert [one.tensors for one in found] == [("a", "c"), ("b",)]


def test_without_a_cause_only_the_same_sentence_belongs_together() -> None:
    found = [zeros("a", 8, cause=""), zeros("b", 8, cause=""), zeros("c", 9, cause="")]
    assert [one.tensors for one in grouped(found)] == [("a", "b"), ("c",)]


def test_stages_that_are_wrong_on_all_of_their_ranks_belong_together() -> None:
    found = [zeros("layers.0.w", ranks=(0, 1)), zeros("layers.1.w", ranks=(2, 3)), zeros("layers.2.w", ranks=(2,))]
    ranks_of = {"layers.0.w": frozenset({0, 1}), "layers.1.w": frozenset({2, 3}), "layers.2.w": frozenset({2, 3})}
    first, alone = grouped(found, ranks_of)
    assert (first.tensors, first.ranks) == (("layers.0.w", "layers.1.w"), (0, 1, 2, 3))
    assert alone.tensors == ("layers.2.w",)


def test_findings_about_the_whole_dump_stay_apart() -> None:
    assert len(grouped([zeros("", 1), zeros("", 2)])) == 2


def test_two_findings_of_one_tensor_are_not_two_tensors() -> None:
    assert [len(one.tensors) for one in grouped([zeros("a", 1), zeros("a", 2), zeros("b", 1)])] == [2, 1]


def test_the_name_in_a_cause_becomes_the_names_of_all() -> None:
    found = grouped([zeros(name, cause="{tensor} was never loaded") for name in ("h.0.w", "h.1.w", "x")])
    assert [one.cause for one in found] == ["h.[0-1].w, x was never loaded"]


def test_every_format_counts_the_finding_once_and_names_every_tensor() -> None:
    report = Report(2, 4, tuple(grouped([zeros(name) for name in NAMES])))
    assert summary_line(report, Terminal()).plain.endswith("1 finding in 3 of 4 tensors on 2 ranks")
    assert report_github(report).count("::error") == 1
    assert "foreign up.weight%2C up.bias%2C down.weight" in report_github(report)
    assert report_junit(report, [*NAMES, "fine"]).count("<failure") == 3


def test_a_tied_name_has_the_findings_of_the_other_names_unless_it_has_some() -> None:
    head, embed = zeros("head"), zeros("embed", 4)
    ties = dict.fromkeys(("embed", "head"), ("embed", "head"))
    assert Report(2, 3, (head,), ties=ties).findings_of == {"embed": (head,), "head": (head,)}
    assert Report(2, 3, (head, embed), ties=ties).findings_of == {"embed": (embed,), "head": (head,)}
    of_three = dict.fromkeys(("embed", "head", "out"), ("embed", "head", "out"))
    assert Report(2, 3, (head, embed), ties=of_three).findings_of["out"] == (embed, head)


def found(kind: Kind, tensor: str = "w", *, generic: bool = False) -> Finding:
    return finding_of(kind, "error", tensor, (0,), "wrong", generic=generic)


def test_a_finding_follows_from_others_of_its_tensor_only() -> None:
    for kind, page in KINDS.items():
        for origin in page.follows_from:
            for cause in (found(origin), found(origin, generic=True)):
                assert unhidden([found(kind)], [cause]) == []
                assert unhidden([found(kind)], [replace(cause, tensor="other")]) == [found(kind)]
        for origin in set(KINDS) - page.follows_from:
            assert unhidden([found(kind)], [found(origin)]) == [found(kind)]


def test_only_a_finding_without_a_cause_follows_from_what_replaced_the_ids_or_from_other_results() -> None:
    for kind, page in KINDS.items():
        for origin in page.unexplained_from - page.follows_from:
            assert unhidden([found(kind, generic=True)], [found(origin)]) == []
            assert unhidden([found(kind)], [found(origin)]) == [found(kind)]


def test_a_check_that_could_not_run_is_not_missed_if_the_order_is_known_to_be_wrong() -> None:
    copies, order, ties = (NotChecked("w", "why", about) for about in ("values", "order", "ties"))
    assert unhidden([copies, order, ties], [found("misordered")]) == [order, ties]
    assert unhidden([copies, order, ties], [found("sequence-order")]) == [ties]
    assert unhidden([copies, order, ties], [copies]) == [copies, order, ties]


def test_what_has_a_cause_of_its_own_stays_beside_another_cause() -> None:
    explained = found("wrong-value")
    assert unhidden([explained], [found("wrong-scale")], anywhere=True) == [explained]
    assert unhidden([found("wrong-value", generic=True)], [found("wrong-scale", "v")], anywhere=True) == []

"""Templates fill in a finding's fields, and a page shows every wording that they have."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest

from shardviz.explain.templates import fields_of, fill, page_texts

SOURCE = SimpleNamespace(
    axes=("dp", "tp"),
    none=(),
    ranks=(0, 1, 2, 5),
    alone=(3,),
    shape=(4, 8),
    ratio=Fraction(1, 2),
    op="sum",
    trip="sync",
    cause=SimpleNamespace(why="FSDP averages", how="Ranks differ"),
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("over {axes}", "over dp and tp"),
        ("{op!r} {op:upper}", "'sum' SUM"),
        ("{ranks:ranks}, {alone:ranks}", "ranks 0-2, 5, rank 3"),
        ("{ranks:2} of {shape} or {shape:list}", "0, 1, ... of (4, 8) or [4, 8]"),
        ("{ratio:times} it", "1/2 of it"),
        ("summed{axes:? over {axes}} once{none:? over {none}}", "summed over dp and tp once"),
        ("{trip:sync?send it|save it}, {trip:load?read it|take it}", "send it, take it"),
        ("{ranks:1?reads|read}, {alone:1?reads|read}", "read, reads"),
        ("{axes:each and|sum over {each!r} by {op}}", "sum over 'dp' by sum and sum over 'tp' by sum"),
        ("{none:?{none[0]}|nothing}, {axes[0]}", "nothing, dp"),
        ("{cause.why:continued}, {cause.how:continued}", "FSDP averages, ranks differ"),
        ("{axes:?names={{...}}}", "names={...}"),
    ],
)
def test_a_template_is_filled_in(template: str, text: str) -> None:
    assert fill(template, SOURCE) == text


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("summed{axes:? over {axes}} once", ["summed over <axes> once"]),
        ("look at what {num_ranks} {ranks:1?reads|read}", ["look at what <num ranks> read"]),
        ("{trip:sync?send it on {axis}|write it to a file}", ["send it on <axis>", "write it to a file"]),
        (
            "{fault:a?one thing is wrong|{fault:b?another thing is wrong|all is wrong}}",
            ["one thing is wrong", "another thing is wrong", "all is wrong"],
        ),
        ("in {turn:?turn|chunks}", ["in turn"]),
        (
            "{turn:?the first wording|the second wording}, again {turn:?the first wording|the second wording}",
            ["the first wording, again the first wording", "the second wording, again the second wording"],
        ),
        ("it is wrong{rest:?. Even then: {rest.cause}}", ["it is wrong"]),
        ("pass it{rest:?; {rest.fix}|, or call from_local}", ["pass it, or call from_local"]),
        ("{rest.cause}. Compare first", ["<the rest's cause>. Compare first"]),
        ("{axes:each and|sum over {each!r}}", ["sum over <axes>"]),
    ],
)
def test_a_page_shows_every_wording_once(template: str, texts: list[str]) -> None:
    assert page_texts(template) == texts


def test_fields_are_those_of_all_words() -> None:
    template = "{axes:? over {axes}}{trip:sync?send {rest.cause}|{names[0]}} {axes:each and|{each} {op}}"
    assert set(fields_of(template)) == {"axes", "trip", "rest", "names", "op"}

"""JSON schemas of shardviz's output, made from the types that validate it when read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from shardviz.check.diff import Difference
from shardviz.check.report import NotChecked
from shardviz.check.step.departure import Departure, StepDifference
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import PlanRecord, RankRecord, RunRecord
from shardviz.explain.finding import FOR_MACHINES, Finding
from shardviz.plan.alternatives import Size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TITLES = {
    "run": f"run.json of a shardviz dump, version {SCHEMA}",
    "rank": f"rank_NNNNN.json of a shardviz dump, version {SCHEMA}",
    "plan": f"plan.json of a shardviz plan, version {SCHEMA}",
    "check": "what shardviz check --format json prints, version 1",
    "diff": "what shardviz diff --format json prints of two dumps, version 1",
}

PRINTED = {"Finding": Finding, "NotChecked": NotChecked, "Size": Size}
"""Types that a module names only for type checkers."""

COMPUTED = {
    "summary": str,
    "tensors": tuple[str, ...],
    "cause": str,
    "fix": str,
    "cause_id": str,
    "causes": list[dict[str, str]],
}
"""What a finding works out from its fields."""


def type_of(what: str) -> Any:
    """Return the type of one of the things that have a schema, which `TITLES` has."""
    files = {"run": RunRecord, "rank": RankRecord, "plan": PlanRecord}
    return files.get(what) or (_difference() if what == "diff" else _report())


def _finding() -> Any:
    hints = _hints(Finding) | COMPUTED
    return _struct("Finding", {name: hints[name] for name in FOR_MACHINES})


def _hints(of: type) -> dict[str, Any]:
    """Return the types of a class's fields; what isn't printed is any object, as is KW_ONLY, no type in Python 3.10."""
    unprinted = ("Cause", "RankPair", "Beside", "KW_ONLY")
    return get_type_hints(of, localns={**dict.fromkeys(unprinted, object), **PRINTED})


def _report() -> Any:
    numbers = dict.fromkeys(("schema", "num_ranks", "num_tensors"), int)
    return _struct("Report", {**numbers, "findings": _list_of(_finding()), "not_checked": list[NotChecked]})


def _difference() -> Any:
    departure = {**_hints(Departure), "cause_id": str}
    step = {**_hints(StepDifference), "departures": _list_of(_struct("Departure", departure, "explanation"))}
    pictures: list[Any] = [(name, list[dict[str, Any]], []) for name in ("calls", "heat")]
    fields = {"schema": int, **_hints(Difference), "step": _struct("Step", step, "sides", optional=pictures)}
    fields |= dict.fromkeys(("gained", "lost"), _list_of(_finding()))
    return _struct("Difference", fields, "num_compared", "unread")


def _struct(name: str, fields: Mapping[str, Any], *left_out: str, optional: Sequence[Any] = ()) -> Any:
    required = [(field, kind) for field, kind in fields.items() if field not in left_out]
    return msgspec.defstruct(name, [*required, *optional], forbid_unknown_fields=True)


def _list_of(item: Any) -> Any:
    """Return the type of a list of structs that are made here, which a type checker doesn't know."""
    return list[item]


def schema_text(what: str) -> str:
    """Return a schema as JSON."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLES[what]}
    return json.dumps(schema | msgspec.json.schema(type_of(what)), indent=1) + "\n"

"""JSON schemas of shardviz's output, made from the types that validate it when read."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import msgspec

from shardviz.check.report import NotChecked
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.plan import PlanRecord
from shardviz.explain.finding import FOR_MACHINES, Finding

TITLES = {
    "run": f"run.json of a shardviz dump, version {SCHEMA}",
    "rank": f"rank_NNNNN.json of a shardviz dump, version {SCHEMA}",
    "plan": f"plan.json of a shardviz plan, version {SCHEMA}",
    "check": "what shardviz check --format json prints, version 1",
}

COMPUTED = {"summary": str, "tensors": tuple[str, ...], "cause": str, "fix": str, "cause_id": str}
"""What a finding works out from its fields."""


def type_of(what: str) -> Any:
    """Return the type of one of the things that have a schema: `run`, `rank`, `plan` or `check`."""
    return {"run": RunRecord, "rank": RankRecord, "plan": PlanRecord}.get(what) or _answer()


def _answer() -> Any:
    hints = get_type_hints(Finding, localns={"Cause": object, "RankPair": object})
    fields = [(name, hints.get(name, COMPUTED.get(name))) for name in FOR_MACHINES]
    finding = msgspec.defstruct("Finding", fields, forbid_unknown_fields=True)
    answer = [
        ("schema", int),
        ("num_ranks", int),
        ("num_tensors", int),
        ("findings", list[finding]),  # type: ignore[valid-type]
        ("not_checked", list[NotChecked]),
    ]
    return msgspec.defstruct("Report", answer, forbid_unknown_fields=True)


def schema_text(what: str) -> str:
    """Return a schema as JSON."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLES[what]}
    return json.dumps(schema | msgspec.json.schema(type_of(what)), indent=1) + "\n"

"""In what the steps of two runs differ, as sentences for a person and fields for a machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shardviz.check.report import NotChecked
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

Kind = Literal["weights", "drawn", "batch", "unsharded", "sharded"]
"""In what the runs differ: the weights that they start from; those that were drawn after sharding; the batch; the
unsharded models' steps; or a sharded step beside its own unsharded model."""


@dataclass(frozen=True, slots=True)
class Departure:
    """One way in which the steps of two runs differ.

    Attributes:
        module: The first module, or the first weight.
        direction: Forward or backward; empty for weights and the batch.
        why: What that comes of, or what to look at.
        following: How many modules' calls differ after it, which is a consequence.
        explanation: The cause in the catalogue; None if none is known.
        line: The first wrong line, as `moe.py:83`; empty if it is not known.
        look: How to see the line, if that takes another run.
    """

    kind: Kind
    module: str
    direction: str
    sentence: str
    why: str
    following: int = 0
    explanation: Cause | None = None
    line: str = ""
    look: str = ""

    @property
    def place(self) -> str:
        """What to call the module."""
        return self.module or "the model itself"

    @property
    def is_expected(self) -> bool:
        """Whether it comes of the runs' meshes, and no step is at fault."""
        return self.kind == "drawn"

    def to_json(self) -> dict[str, Any]:
        """Return its fields, with the name of its cause in the catalogue as `cause_id`."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "explanation"}
        return {**values, "cause_id": self.explanation.name if self.explanation is not None else ""}


def departure_for(
    cause: Cause, kind: Kind, module: str, sentence: str, *, direction: str = "", following: int = 0
) -> Departure:
    """Return the departure that has a cause of the catalogue."""
    return Departure(kind, module, direction, sentence, cause.advice, following, cause)


@dataclass(frozen=True, slots=True)
class Beside:
    """A job's step beside another's, to be drawn.

    Attributes:
        evidence: What ranks have of the other's at every place.
        findings: What is wrong there, the first wrong module first.
        reference: What the other job is called.
    """

    evidence: Evidence
    findings: tuple[Finding, ...]
    reference: str


@dataclass(frozen=True, slots=True)
class StepDifference:
    """How the steps of two runs compare.

    Attributes:
        departures: In what they differ, causes first.
        num_compared: The weights and points at which the unsharded models were compared.
        farthest: How far they are apart at most where they agree, relative to the size of what is there.
        allowed: How far they may be apart there.
        precision: The dtypes of the runs' activations.
        agreement: Who agrees at the places that were compared.
        sides: One job's step beside the other's; None if probes' steps, or nothing, was compared.
        is_of_jobs: Whether the steps are two jobs', which may lay tensors out differently.
        has_update: Whether weights after the optimizer's step agree.
        num_later: In how many later steps the optimizers of two jobs had the same settings.
        num_with_rows: In how many of these the jobs were seen to be given the same rows.
        without_rows: The other later steps.
        num_with_outputs: In how many later steps the models make the same of the same rows.
        unjudged_buffers: Buffers that no rule judges after the step: they were not recorded, or they differ and may.
    """

    departures: tuple[Departure, ...] = ()
    num_compared: int = 0
    farthest: float = 0.0
    allowed: float = 0.0
    precision: tuple[str, ...] = ()
    not_compared: tuple[NotChecked, ...] = ()
    agreement: str = "the unsharded models agree"
    sides: Beside | None = field(default=None, compare=False, repr=False)
    is_of_jobs: bool = False
    has_update: bool = False
    num_later: int = 0
    num_with_rows: int = 0
    without_rows: tuple[int, ...] = ()
    num_with_outputs: int = 0
    unjudged_buffers: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(not departure.is_expected for departure in self.departures)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz diff --format json` prints of the steps."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "sides"}
        departures = [departure.to_json() for departure in self.departures]
        return values | {"departures": departures, "not_compared": [asdict(result) for result in self.not_compared]}

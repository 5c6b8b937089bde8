"""The first wrong module is named, with the right cause; right programs stay quiet. Nightly: minutes."""

from functools import cache

import pytest

from tests.bugs.pairs.running import reports_on
from tests.bugs.places.judging import verdict_on
from tests.bugs.places.later import table as later
from tests.bugs.places.table import FAULTS, LOST_IN_BFLOAT16, PROGRAMS
from tests.bugs.places.unseen import table as unseen
from tests.bugs.running import lines_of

pytestmark = pytest.mark.bugs

ALL = (*FAULTS, *later.FAULTS, *unseen.FAULTS)
LOST = LOST_IN_BFLOAT16 | later.LOST_IN_BFLOAT16 | unseen.LOST_IN_BFLOAT16
RIGHT = tuple(dict.fromkeys((*PROGRAMS, *later.PROGRAMS, *unseen.PROGRAMS)))


@cache
def reports(which, narrow):
    """Run all faults, or all right programs, of one precision: several in each world of ranks."""
    of = {"faults": [(one, one.program.mesh) for one in ALL], "right": [(one, one.mesh) for one in RIGHT]}[which]
    precision = "bfloat16" if narrow else "float64"
    names = [f"{one.name} {precision}" for one, _ in of]
    found = reports_on([(one.source(narrow=narrow), mesh) for one, mesh in of], names)
    return {of[number][0].name: report for number, report in found}


def text_of(report):
    return report if isinstance(report, str) else "\n".join(line for line in lines_of(report) if line)


@pytest.mark.parametrize(
    ("fault", "narrow"),
    [pytest.param(fault, False, id=f"{fault.name}, float64") for fault in ALL]
    + [pytest.param(fault, True, id=f"{fault.name}, bfloat16") for fault in ALL if fault.name not in LOST],
)
def test_the_first_wrong_module_is_the_faulty_one(fault, narrow):
    verdict = verdict_on(fault, reports("faults", narrow)[fault.name])
    said = text_of(verdict.report)
    assert verdict.is_found, said
    assert verdict.is_placed, f"{verdict.place} is named first, {fault.places[0]} is at fault\n{said}"
    assert verdict.is_explained, said


def test_few_faults_are_lost_in_bfloat16():
    assert len(ALL) >= 95
    assert len(LOST) * 6 <= len(ALL)


@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("program", RIGHT, ids=[program.name for program in RIGHT])
def test_right_programs_stay_quiet(program, narrow):
    report = reports("right", narrow)[program.name]
    assert not isinstance(report, str), report
    assert report.findings == (), text_of(report)

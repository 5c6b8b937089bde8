"""The first wrong module is named, with the right cause; right programs stay quiet. Nightly: minutes."""

import pytest

from tests.bugs.places.judging import verdict_on
from tests.bugs.places.table import FAULTS, LOST_IN_BFLOAT16, PROGRAMS
from tests.bugs.running import lines_of, report_of

pytestmark = pytest.mark.bugs


def text_of(report):
    return report if isinstance(report, str) else "\n".join(line for line in lines_of(report) if line)


def judged(fault, *, narrow):
    verdict = verdict_on(fault, narrow=narrow)
    said = text_of(verdict.report)
    assert verdict.is_found, said
    assert verdict.is_placed, f"{verdict.place} is named first, {fault.places[0]} is at fault\n{said}"
    assert verdict.is_explained, said


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_first_wrong_module_is_the_faulty_one(fault):
    judged(fault, narrow=False)


@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS if fault.name not in LOST_IN_BFLOAT16],
    ids=[fault.name for fault in FAULTS if fault.name not in LOST_IN_BFLOAT16],
)
def test_the_first_wrong_module_is_the_faulty_one_in_bfloat16(fault):
    judged(fault, narrow=True)


def test_few_faults_are_lost_in_bfloat16():
    assert len(FAULTS) >= 36
    assert len(LOST_IN_BFLOAT16) * 6 <= len(FAULTS)


@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_right_programs_stay_quiet(program, narrow, tmp_path):
    report = report_of(program.source(narrow=narrow), program.mesh, tmp_path)
    assert report.findings == (), text_of(report)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strangers.outcomes import Expected, Failures, Outcome, compare, load
from tests.strangers.vendors import VENDORS

CALL = Failures("no such call", "POST /v1/elsewhere", ("tests/elsewhere", "tests/test_chat.py::test_spoken"))
EXPECTED = Expected(num_tests=4, num_skipped=1, failures=(CALL,))
FAILED = (
    Outcome("tests/elsewhere/test_it.py::test_one[a]", "failed", "404"),
    Outcome("tests/test_chat.py::test_spoken[wav]", "failed", "400"),
)
PASSED = Outcome("tests/test_chat.py::test_whole", "passed", "")
SKIPPED = Outcome("tests/test_chat.py::test_seen", "skipped", "no images")


def test_a_run_as_expected_has_no_faults() -> None:
    compared = compare(EXPECTED, [*FAILED, PASSED, SKIPPED])
    assert compared.faults == []
    assert compared.counts == {"failed": 2, "passed": 1, "skipped": 1}
    assert compared.kinds == {"no such call": 2}


@pytest.mark.parametrize(
    ("outcomes", "fault"),
    [
        pytest.param(
            [Outcome("tests/test_chat.py::test_spoken_too", "failed", "boom\nmore"), *FAILED, SKIPPED],
            "tests/test_chat.py::test_spoken_too fails, and is not on the list: boom",
            id="a name that only starts like an entry",
        ),
        pytest.param(
            [FAILED[0], Outcome("tests/test_chat.py::test_spoken", "passed", ""), PASSED, SKIPPED],
            "tests/test_chat.py::test_spoken passes, but is on the list: POST /v1/elsewhere",
            id="a failure that was mended",
        ),
        pytest.param(
            [FAILED[0], PASSED, PASSED, SKIPPED],
            "tests/test_chat.py::test_spoken is on the list, but there is no such test",
            id="a test that is gone",
        ),
        pytest.param(
            [*FAILED, PASSED, PASSED], "0 tests skipped, but the list records 1", id="a test that is no longer skipped"
        ),
        pytest.param([*FAILED, SKIPPED], "3 tests ran, but the list records 4", id="a test that did not run"),
    ],
)
def test_a_difference_is_a_fault(outcomes: list[Outcome], fault: str) -> None:
    assert compare(EXPECTED, outcomes).faults == [fault]


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
def test_each_listed_failure_has_a_kind_and_a_reason(vendor: object) -> None:
    assert load(vendor.expected).num_tests > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "group",
    [
        'kind = "defect"\nreason = "a 500"\ntests = ["a"]',
        'kind = "tiny model"\nreason = " "\ntests = ["a"]',
        'kind = "tiny model"\nreason = "it cannot"\ntests = []',
        'kind = "tiny model"\nreason = "it cannot"\ntests = ["a", "a"]',
    ],
)
def test_a_wrong_list_is_refused(group: str, tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text(f"tests = 1\nskipped = 0\n[[failures]]\n{group}\n")
    with pytest.raises(ValueError, match=r"list\.toml"):
        load(path)

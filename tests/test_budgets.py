"""Every room has a budget, and a room over it is told."""

from collections import Counter
from pathlib import Path

import pytest
from budgets import BUDGETS, IDLE, over, pace, room_of

TESTS = Path(__file__).parent


def test_every_folder_of_tests_has_a_budget_and_every_budget_a_folder():
    folders = {p.parent.name for p in TESTS.glob("*/test_*.py")}
    assert folders == set(BUDGETS)


def test_a_room_over_its_budget_is_told():
    assert over(Counter({"lang": BUDGETS["lang"] + 1, "core": 1})) == [
        f"tests/lang took {BUDGETS['lang'] + 1} s, its budget is {BUDGETS['lang']} s"
    ]


def test_budgets_are_larger_where_everything_takes_longer():
    spent = Counter({"lang": BUDGETS["lang"] * 2 + 1})
    assert over(spent, pace([IDLE, 3 * IDLE])) == over(spent, 2.0) != []
    assert over(spent, pace([3 * IDLE])) == []
    assert pace([]) == pace([IDLE / 9]) == 1.0


def test_a_room_without_a_budget_is_told():
    assert over(Counter({"new": 1})) == ["tests/new has no budget: give it one in tests/budgets.py"]


@pytest.mark.parametrize(
    ("nodeid", "room"), [("tests/lang/test_a.py::test_b[x/y]", "lang"), ("tests/test_readme.py::test_c", "")]
)
def test_rooms_are_folders(nodeid, room):
    assert room_of(nodeid) == room

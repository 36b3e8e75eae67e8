"""`scripts/size.py` counts the characters of each room."""

from collections import Counter

from scripts.size import at, in_working_tree, sizes, table


def test_non_blank_characters_count_for_the_room_its_house_and_the_product():
    files = [
        ("client/runs/a.py", "a = 1\n\n"),
        ("client/b.py", "\tb"),
        ("tests/client/runs/c.py", "c c"),
    ]
    counts = {"client/runs": 3, "client": 4, "product": 4, "tests/client": 2, "tests": 2}
    assert sizes(files) == counts


def test_another_revision_is_compared_with_the_working_tree():
    assert at("HEAD").keys() >= {
        "client/saving",
        "writer_daemon/storage",
        "tests/project",
        "scripts/bench",
    }
    assert in_working_tree()["product"] > 10**6
    assert "| stager | 5 | 3 | -2 |" in table(Counter(stager=3), Counter(stager=5)).splitlines()

"""A save and a load pass few modules and climb back seldom; docs/walks.md shows them."""

import json
import subprocess
import sys

from scripts import rooms, walk

# Upper bounds: a change that makes a walk shorter lowers them.
HELD = {
    "save": {
        "path": {"stops": 18, "modules": 12, "climbs": 0, "returns": 6},
        "core": {"stops": 73, "modules": 26, "climbs": 1, "returns": 47},
        "core, caller's thread": {"stops": 48, "modules": 24, "climbs": 0, "returns": 24},
    },
    "load": {
        "path": {"stops": 22, "modules": 14, "climbs": 0, "returns": 8},
        "core": {"stops": 147, "modules": 34, "climbs": 0, "returns": 113},
        "core, caller's thread": {"stops": 139, "modules": 34, "climbs": 0, "returns": 105},
    },
}


def test_walks_have_no_more_stops_climbs_and_returns_than_held_and_the_page_shows_them():
    command = [sys.executable, "-m", "scripts.walk", *HELD, "--json"]
    printed = subprocess.run(
        command, cwd=rooms.ROOT, check=True, capture_output=True, text=True
    ).stdout
    counted = json.loads(printed)
    longer = [
        f"{kind}, {name}: {count} {what}, {held[what]} are held"
        for kind, walks in HELD.items()
        for name, held in walks.items()
        for what, count in counted[kind][name].items()
        if count > held[what]
    ]
    assert not longer, longer
    page = walk.PAGE.read_text()
    for kind in HELD:
        row = f"| {kind}, path | " + " | ".join(map(str, counted[kind]["path"].values())) + " |"
        assert row in page, "run: python -m scripts.walk --write"

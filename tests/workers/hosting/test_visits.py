"""Visits are read from a log that Caddy writes, rolls and may be in the middle of."""

import json
from pathlib import Path

from workers.hosting.visits import VisitLog


def line(host: str, ts: float) -> str:
    return json.dumps({"level": "info", "ts": ts, "request": {"host": host}, "status": 200}) + "\n"


def test_each_visit_is_read_once(tmp_path: Path) -> None:
    visits, path = VisitLog(tmp_path), tmp_path / "caddy/previews.log"
    assert visits.read() == {}
    path.parent.mkdir()
    path.write_text(line("a.test", 1.5) + line("b.test:8080", 2) + line("A.Test.", 3))
    assert visits.read() == {"a.test": 3, "b.test": 2}
    assert visits.read() == {}
    written = line("c.test", 4)
    with path.open("a") as log:
        log.write("no JSON\n{}\n" + written[:20])
    assert visits.read() == {}
    with path.open("a") as log:
        log.write(written[20:])
    assert visits.read() == {"c.test": 4}
    path.rename(path.with_name("previews-rolled.log"))
    path.write_text(line("d.test", 5) * 200)
    assert visits.read() == {"d.test": 5}

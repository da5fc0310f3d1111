"""The daemon's log: lines that people read, and lines that programs read."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from datetime import datetime

import pytest

from kvtcd import logs


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("kvtcd.x").makeRecord(
        "kvtcd.x", logging.WARNING, __file__, 1, message, args, None, extra=extra
    )


def test_a_line_of_json_has_time_level_logger_message_and_what_else_was_given() -> None:
    made = record("a %s\nof two lines", '"text"', tenant="uid:1", namespace="n", peer=("::1", 7))
    line = logs.Json().format(made)
    read = json.loads(line)
    assert "\n" not in line
    assert datetime.fromisoformat(read.pop("time")).timestamp() == pytest.approx(made.created, abs=0.001)
    assert read == {
        "level": "warning", "logger": "kvtcd.x", "message": 'a "text"\nof two lines',
        "tenant": "uid:1", "namespace": "n", "peer": ["::1", 7],
    }  # fmt: skip


def test_a_line_of_json_has_the_traceback_and_no_field_takes_the_place_of_its_own() -> None:
    made = record("said", level="mine", time="never")
    try:
        int("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    read = json.loads(logs.Json().format(made))
    assert (read["level"], read["message"]) == ("warning", "said")
    assert read["exception"].endswith("'why'")


def test_text_has_the_time_unless_the_journal_has_it(tmp_path) -> None:
    with (tmp_path / "log").open("w") as stream:
        status = os.fstat(stream.fileno())
        own = f"{status.st_dev}:{status.st_ino}"
        assert logs.is_journal({"JOURNAL_STREAM": own}, stream)
        assert not logs.is_journal({"JOURNAL_STREAM": own + "0"}, stream)
        assert not logs.is_journal({}, stream)
    plain = logs.formatter("text", dated=False).format(record("said"))
    assert plain == "WARNING kvtcd.x: said"


@pytest.mark.parametrize(("zone", "offset"), [("UTC", "+00:00"), ("Asia/Kathmandu", "+05:45")])
def test_the_time_of_text_is_local_and_says_its_offset(monkeypatch, zone, offset) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    made = record("said")
    line = logs.formatter("text", dated=True).format(made)
    monkeypatch.undo()
    time.tzset()
    said, rest = line.split(" ", 1)
    assert rest == "WARNING kvtcd.x: said"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", said)
    assert said.endswith(offset)
    assert datetime.fromisoformat(said).timestamp() == pytest.approx(made.created, abs=0.001)

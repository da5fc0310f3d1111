"""The daemon's log: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

Form = Literal["text", "json"]
_LINE = "%(levelname)s %(name)s: %(message)s"
_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
"""Attributes that every record has; all others were given to it as fields."""


class Text(logging.Formatter):
    """Writes a record as a line for people; its time, if it has one, is ISO 8601, local, with its offset."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 - the name and signature of logging
        """Return the time of a record."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class Json(logging.Formatter):
    """Writes a record as a JSON object: time (UTC), level, logger, message, fields, a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**fields, **line}, ensure_ascii=False, default=str)


def formatter(form: Form, *, dated: bool) -> logging.Formatter:
    """Return what writes lines; those of text begin with their time if they are to be `dated`."""
    if form == "json":
        return Json()
    return Text(f"%(asctime)s {_LINE}" if dated else _LINE)


def is_journal(environment: Mapping[str, str], stream: TextIO) -> bool:
    """Tell whether a stream goes to systemd's journal, which has a time for each line (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:  # it is no file, and so not the journal
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def begin(level: str, form: Form, environment: Mapping[str, str], stream: TextIO) -> None:
    """Log to a stream from now on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(form, dated=not is_journal(environment, stream)))
    logging.basicConfig(level=level.upper(), handlers=[handler])

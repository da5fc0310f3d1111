"""What was looked at in a daemon, and how it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and where it is not well, what to do."""

    what: str
    state: State
    said: str

"""Work that goes on after its request was answered, as daemon and clients see it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, cast, get_args

from kvtcd.core.fields import Fields
from kvtcd.core.messages import BlockResult, results_from_json, results_to_json

OperationState = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation at one moment.

    Attributes:
        id: to ask for it by.
        state: what became of it.
        total: blocks that it is about.
        done: those of them that it has dealt with.
        results: one for each block, once it is done.
        detail: why it failed.
    """

    id: str
    state: OperationState
    total: int = 0
    done: int = 0
    results: tuple[BlockResult, ...] = ()
    detail: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "id": self.id,
            "state": self.state,
            "total": self.total,
            "done": self.done,
            "detail": self.detail,
            **results_to_json(self.results),
        }

    @classmethod
    def from_json(cls, body: object) -> Operation:
        """Build from the form that `to_json` writes."""
        given = Fields(body, "operation")
        return cls(
            id=given.text("id"),
            state=cast("OperationState", given.choice("state", get_args(OperationState))),
            total=given.integer("total", 0, sys.maxsize),
            done=given.integer("done", 0, sys.maxsize),
            results=results_from_json(body),
            detail=given.optional_text("detail"),
        )

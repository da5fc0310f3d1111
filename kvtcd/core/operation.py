"""Work that goes on after its request was answered, as daemon and clients see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtcd.core.message import Answer
from kvtcd.core.messages import BlockResult, Count

OperationState = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Operation(Answer):
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
    total: Count = 0
    done: Count = 0
    results: tuple[BlockResult, ...] = ()
    detail: str | None = None

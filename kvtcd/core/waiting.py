"""Tickets that wait for several blocks at once."""

from __future__ import annotations

from collections.abc import Iterable

from kvtcd.core.keys import RecordKey


class Gathering:
    """Each ticket waits until every one of its keys is done, or the first one fails."""

    def __init__(self) -> None:
        self._pending: dict[int, set[RecordKey]] = {}
        self._tickets: dict[RecordKey, set[int]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._tickets

    def add(self, ticket: int, keys: Iterable[RecordKey]) -> bool:
        """Let a ticket wait for `keys`; return False when there is nothing to wait for."""
        pending = set(keys)
        if not pending:
            return False
        self._pending[ticket] = pending
        for key in pending:
            self._tickets.setdefault(key, set()).add(ticket)
        return True

    def done(self, key: RecordKey) -> list[int]:
        """Note that a key is done; return the tickets that thereby have all of theirs."""
        complete = []
        for ticket in sorted(self._tickets.pop(key, ())):
            pending = self._pending[ticket]
            pending.discard(key)
            if not pending:
                del self._pending[ticket]
                complete.append(ticket)
        return complete

    def fail(self, key: RecordKey) -> list[int]:
        """Note that a key will never be done; return the tickets that waited for it."""
        failed = sorted(self._tickets.get(key, ()))
        for ticket in failed:
            self.cancel(ticket)
        return failed

    def cancel(self, ticket: int) -> None:
        """Forget a ticket; one that does not wait is ignored."""
        for key in self._pending.pop(ticket, ()):
            waiting = self._tickets[key]
            waiting.discard(ticket)
            if not waiting:
                del self._tickets[key]

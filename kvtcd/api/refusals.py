"""Who was turned away, in the log: our own words alone, and nothing that he sent; of many, a few."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvtcd.api.listeners import shown

SHOWN, WINDOW_S = 10, 60.0
"""So many of one status are logged in that time; the others are counted, and said when it is over."""
Later = Callable[[float, Callable[[], None]], object]
"""Has something called once these seconds have passed."""
_log = logging.getLogger(__name__)


class Refusals:
    """Logs requests that are refused; whoever asks without an end fills no disk with that.

    Args:
        later: as `asyncio.AbstractEventLoop.call_later`.
    """

    def __init__(self, later: Later) -> None:
        self._later = later
        self._seen: Counter[int] = Counter()

    def say(self, peer: object, status: int, reason: str, tenant: str | None = None) -> None:
        """Log one of them, or count it.

        Args:
            peer: address of the other end; empty for a Unix socket.
            status: what it was answered.
            reason: why, in our words.
            tenant: who it was, if that is known.
        """
        if not self._seen:
            self._later(WINDOW_S, self._end)
        self._seen[status] += 1
        if self._seen[status] > SHOWN:
            return
        where = shown(peer) if peer else "the Unix socket"
        fields = {"peer": where, "tenant": tenant, "status": status, "reason": reason}
        who = f"{where} (tenant {tenant})" if tenant else where
        _log.info("refused %s, %d: %s", who, status, reason, extra=fields)

    def _end(self) -> None:
        seen, self._seen = self._seen, Counter()
        for status, count in seen.items():
            if count > SHOWN:
                _log.info(
                    "%d more requests were refused within %.0f s, %d",
                    count - SHOWN, WINDOW_S, status, extra={"status": status, "left_out": count - SHOWN},
                )  # fmt: skip

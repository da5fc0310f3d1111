"""The remote tier at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvtcd.core.message import Answer
from kvtcd.core.messages import Count
from kvtcd.core.remote.backlog import Offer
from kvtcd.core.remote.breaker import Breaker
from kvtcd.engine.metrics import REFUSALS
from kvtcd.engine.remote import figures as fig
from kvtcd.engine.remote.figures import Figures, count


@dataclass(frozen=True, slots=True)
class RemoteStats(Answer):
    """The remote tier.

    Attributes:
        breaker: ``closed`` where the store is asked, ``open`` where it is left alone for a while.
        queue_blocks: blocks that wait to be written.
        queue_bytes: of these.
        written: blocks that were written.
        there: blocks that another had written.
        dropped: blocks that were not written: the queue was full, or the store failed.
        hits: blocks that came from it.
        misses: blocks that it did not have.
        refused: objects that were no record, profile or generation of ours.
        failed: blocks that it may have had, but could not be asked for.
        answered: calls that it answered.
        failing: calls in a row, up to the last one, that it did not.
        refusing: calls that were to write blocks and did not, in a row up to the last one; 0 when none waits.
        pending: purges and deletes that it still has to do.
        refused_profiles: of what was refused, objects under names of profiles or of their parts.
        parts_out: parts of the profile that is being written which it still lacks.
        parts_in: parts of profiles that are being fetched which are still to come.
    """

    breaker: str
    queue_blocks: Count
    queue_bytes: Count
    written: Count
    there: Count
    dropped: Count
    hits: Count
    misses: Count
    refused: Count
    failed: Count
    answered: Count
    failing: Count
    refusing: Count
    pending: Count
    refused_profiles: Count
    parts_out: Count
    parts_in: Count

    @classmethod
    def of(
        cls, figures: Figures, breaker: Breaker, writes: Breaker, waiting: tuple[int, int], pending: int, *,
        parts: tuple[int, int],
    ) -> RemoteStats:  # fmt: skip
        """Return what was counted."""
        refused = sum(count(figures.refused, error) for error in REFUSALS)
        return cls(
            str(breaker.state), *waiting, count(figures.puts, fig.STORED), count(figures.puts, fig.THERE),
            count(figures.puts, fig.FAILED) + count(figures.offers, Offer.FULL), count(figures.gets, fig.HIT),
            count(figures.gets, fig.MISS), refused, count(figures.gets, fig.FAILED),
            breaker.answered, breaker.failing, writes.failing if waiting[0] else 0,
            pending, count(figures.profiles, fig.REFUSED), *parts,
        )  # fmt: skip

"""Requests of a trace through the catalog of the daemon, in virtual time."""

from __future__ import annotations

import itertools
from dataclasses import replace

from kvtcd.core import events as ev
from kvtcd.core.catalog import Catalog
from kvtcd.core.events import Event
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Tier
from kvtcd.core.policy import FADING, HostTier, Policy, Share
from kvtcd.core.reason import Reason
from kvtcd.core.shelf import Marks, Shelf
from kvtcd.core.sightings import Sightings
from kvtcd.lab.trace import Request


class Replay:
    """One tier with room for so many blocks, each of size one; of the policy, `admit` and `evict` act.

    Every request does what a client does: it matches, reads what is there, and offers the rest in one batch.

    Args:
        policy: what is to be tried.
        capacity: blocks.

    Attributes:
        hits: blocks found as part of a leading prefix, so far.
        stored: blocks that were stored.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        sightings = Sightings(FADING * policy.evict.half_life)
        tier = Shelf(Tier.HOST, capacity, Marks(), sightings)
        self._now = 0.0
        self._catalog = Catalog({Tier.HOST: tier}, lambda _: 1, sightings, clock=lambda: self._now)
        rules = replace(policy, host=HostTier("raw", high=1.0, low=1.0), share=Share())
        self._catalog.handle(ev.Govern(1, "trace", rules, on_disk=False))
        self._admit = policy.admit
        self._tickets = itertools.count(1)
        self.hits = self.stored = 0

    def found(self, request: Request) -> int:
        """Return how many leading blocks of a request are here, as it would find them."""
        blocks = request.blocks
        return next((n for n, key in enumerate(blocks) if not self._catalog.tiers(key)), len(blocks))

    def request(self, request: Request) -> None:
        """Serve one request."""
        self._now = request.at
        blocks, found = request.blocks, self.found(request)
        self.hits += found
        for key in blocks[:found]:
            self._tell(ev.Get(next(self._tickets), key))
            self._tell(ev.Release(key))
        held = list(blocks[:found])
        filling: list[RecordKey] = []
        for number in range(found, len(blocks)):
            key = blocks[number]
            answers = self._tell(self._offer(request, number))
            if not answers:  # no room but what this very request holds
                answers, filling = self._publish(filling), []
            (answer,) = answers
            if answer is None:
                filling.append(key)
            if answer in {None, Reason.DUPLICATE}:
                held.append(key)
        if request.tokens < self._admit.min_tokens:
            for key in filling:
                self._tell(ev.Abandoned(key))
            filling = []
        self._publish(filling)
        self._tell(ev.Touch(tuple(held)))

    def _offer(self, request: Request, number: int) -> ev.Put:
        first = number * request.block_tokens
        return ev.Put(
            next(self._tickets), request.blocks[number], namespace=1, nbytes=1,
            tokens=max(1, min(request.block_tokens, request.tokens - first)), position=first,
            parent=request.blocks[number - 1] if number else None, patient=True,
        )  # fmt: skip

    def _publish(self, keys: list[RecordKey]) -> list[Reason | None]:
        self.stored += len(keys)
        return [answer for key in keys for answer in self._tell(ev.Filled(key))]

    def _tell(self, event: Event) -> list[Reason | None]:
        """Tell the catalog an event, and drop at once what it drops; return the answers, None for a grant."""
        answers: list[Reason | None] = []
        pending: list[Event] = [event]
        for told in pending:
            for action in self._catalog.handle(told):
                match action:
                    case ev.Grant():
                        answers.append(None)
                    case ev.Deny(_, reason):
                        answers.append(reason)
                    case ev.Drop(key, place):
                        pending.append(ev.Dropped(key, place))
                    case ev.Lost():
                        pass
                    case ev.Move():  # pragma: no cover - there is one tier
                        raise AssertionError(action)
        return answers

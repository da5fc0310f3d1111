"""The daemon as an engine's threads see it: there, away for a while, or not to be used.

Every call blocks, so only threads of our own make them. `up` and `away` are for every thread: while it is
away nothing is asked, lookups are misses at once, and `connect` is tried from time to time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvtcd.client import Client
from kvtcd.core.errors import (
    BadRequest,
    BlockMismatch,
    Busy,
    IdentityConflict,
    KvtcdError,
    ServerError,
    Stopping,
    StoreFailed,
    TooLarge,
    Unavailable,
    UnknownNamespace,
)
from kvtcd.core.identity import Identity
from kvtcd.integrations.namespaces import register

T = TypeVar("T")
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before each further try to reach a daemon that is away; the last one again and again."""
REFUSED_S = 60.0
"""The same where the daemon refuses what we are: only an operator changes that."""
QUIET_S = 10.0
"""Seconds between two lines of the log that say what a daemon did not do."""


@dataclass(frozen=True, slots=True)
class State:
    """What is known of the daemon at one time.

    Attributes:
        names: namespace of each identity that was registered with the daemon that is there.
        there: whether it is, as far as is known.
        boot: boot id of the daemon that was there last.
        tries: how often it was not there since.
        again: time from which it is worth a try.
        stopped: why it is never asked again, if so.
    """

    names: Mapping[Identity, str] = field(default_factory=dict)
    there: bool = False
    boot: str = ""
    tries: int = 0
    again: float = 0.0
    stopped: str = ""

    @property
    def up(self) -> bool:
        """Whether the daemon is there, as far as is known."""
        return self.there and not self.stopped

    @property
    def away(self) -> bool:
        """Whether it was looked for and is not there; not so before the first try has ended."""
        return self.tries > 0 or bool(self.stopped)

    def found(self, names: Mapping[Identity, str], boot: str) -> State:
        """Return the state after a daemon answered."""
        return State(names, there=True, boot=boot, stopped=self.stopped)

    def lost(self, now: float, *, refused: bool) -> State:
        """Return the state after a call that failed."""
        pause = REFUSED_S if refused else PAUSES_S[min(self.tries, len(PAUSES_S) - 1)]
        return State({}, boot=self.boot, tries=self.tries + 1, again=now + pause, stopped=self.stopped)

    def pause(self, now: float) -> float | None:
        """Return seconds until the next try; None where there is nothing to try."""
        return None if self.up or self.stopped else max(0.0, self.again - now)


class Link:
    """The way to one daemon, and the names of an engine's identities there.

    Args:
        client: of the daemon.
        log: of the engine.
        identities: those that are registered as soon as the daemon is reached.
        seconds: for each call.
        valid: returns why the identities do not hold any more, or nothing; asked before each call.
        on_lost: called when the daemon is found to be away.
    """

    def __init__(
        self,
        client: Client,
        log: logging.Logger,
        identities: Iterable[Identity] = (),
        *,
        seconds: float,
        valid: Callable[[], str] = str,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.client, self._log = client, log
        self._identities = tuple(identities)
        self._seconds, self._valid, self._on_lost = seconds, valid, on_lost
        self._state = State()
        self._quiet_until = 0.0
        self._lock = threading.Lock()
        self._reaching = threading.Lock()

    @property
    def up(self) -> bool:
        """Whether the daemon can be used now."""
        return self._state.up

    @property
    def away(self) -> bool:
        """Whether there is no use in waiting for it."""
        return self._state.away

    @property
    def boot(self) -> str:
        """Boot id of the daemon that was there last."""
        return self._state.boot

    def pause(self) -> float | None:
        """Return seconds until `connect` is worth a try; None where it is not."""
        return self._state.pause(time.monotonic())

    def connect(self) -> bool:
        """Try to reach the daemon and register; tell whether another one than last time answered."""
        if self._stop_if_invalid():
            return False
        try:
            boot = self.client.info().boot_id
            names = {identity: self._register(identity) for identity in self._identities}
        except KvtcdError as error:
            self._lost(error)
            return False
        with self._lock:
            before, self._state = self._state, self._state.found(names, boot)
        if before.boot != boot or before.tries:
            self._log.info("kvtcd: stores and loads through %s", self.client.address)
        return bool(before.boot) and before.boot != boot

    def reach(self) -> None:
        """Try to reach the daemon if it is away and that is worth a try; one thread at a time."""
        if self.pause() == 0.0:
            with self._reaching:
                if self.pause() == 0.0:
                    self.connect()

    def name(self, identity: Identity) -> str:
        """Return the namespace of an identity, which is registered where it is not yet.

        Raises:
            Unavailable: the daemon is away.
            KvtcdError: it refuses the identity.
        """
        if self._stop_if_invalid() or not (state := self._state).up:
            raise Unavailable("the daemon is away")
        if name := state.names.get(identity):
            return name
        name = self._register(identity)
        with self._lock:
            if self._state.up and self._state.boot == state.boot:
                self._state = replace(self._state, names={**self._state.names, identity: name})
        return name

    def named(self, identity: Identity, call: Callable[[str], T]) -> T:
        """Return what a call says, given the namespace; one that was purged meanwhile begins anew.

        Raises:
            Unavailable: the daemon is away.
            KvtcdError: by the call, or the daemon refuses the identity.
        """
        name, boot = self.name(identity), self.boot
        try:
            return call(name)
        except UnknownNamespace:
            if self.client.info().boot_id != boot:  # not purged: it is another daemon, which has to be noted
                raise
        self._log.warning("kvtcd: namespace %s was purged; it begins anew", name)
        with self._lock:
            names = {one: known for one, known in self._state.names.items() if known != name}
            self._state = replace(self._state, names=names)
        return call(self.name(identity))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """End what the daemon did not do as a miss; note when it is away."""
        try:
            yield
        except KvtcdError as error:
            overloaded = isinstance(error, Busy | StoreFailed | ServerError) and not isinstance(
                error, Stopping
            )
            if overloaded:
                self._passed_over(error)
            elif self.up:
                self._lost(error)

    def close(self) -> None:
        """Close connections."""
        self.client.close()

    def _register(self, identity: Identity) -> str:
        name = register(self.client, identity, deadline=self._seconds)
        self._log.info("kvtcd: blocks of %s are in namespace %s", identity.model, name)
        return name

    def _stop_if_invalid(self) -> bool:
        if not self._state.stopped and (why := self._valid()):
            self._log.error("kvtcd: %s; nothing is stored or loaded until the engine is started again", why)
            with self._lock:
                self._state = State(stopped=why)
        return bool(self._state.stopped)

    def _passed_over(self, error: KvtcdError) -> None:
        """Say why a call was a miss though the daemon is there, now and then: it happens in swarms."""
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            self._log.warning("kvtcd: the daemon did not do what it was asked for, as for a miss: %s", error)

    def _lost(self, error: KvtcdError) -> None:
        refused = isinstance(error, BadRequest | IdentityConflict | BlockMismatch | TooLarge)
        with self._lock:
            before, self._state = self._state, self._state.lost(time.monotonic(), refused=refused)
        if before.up or not before.tries:
            self._log.warning("kvtcd: all lookups are misses until the daemon can be used again: %s", error)
        self._on_lost()

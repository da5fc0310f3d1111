"""The daemon as a program's own caches see it: asked while it answers, done without while it does not.

Everything runs in the thread of its caller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from kvtcd.client import Client
from kvtcd.core.errors import (
    Busy,
    DeadlineExceeded,
    KvtcdError,
    ServerError,
    StoreFailed,
    Unavailable,
    UnknownNamespace,
)
from kvtcd.core.identity import Identity
from kvtcd.integrations.link import State
from kvtcd.integrations.namespaces import register

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_FAILED = (Busy, DeadlineExceeded, ServerError, StoreFailed, Unavailable, UnknownNamespace)
"""Errors of the daemon, not of its caller: who can do without it goes on."""


class Daemon:
    """One daemon, and the namespace of one identity there.

    A daemon that is away when this is made may come later. One that cannot be reached is left alone for a
    while, some seconds at most.

    Args:
        client: of the daemon.
        identity: of the caches.
        deadline: seconds for the daemon to register the namespace.

    Attributes:
        failure: what the last call failed with, None if it was answered.
        failures: calls that were not answered, so far.

    Raises:
        KvtcdError: the daemon is there and refuses the identity, or the deadline is none.
    """

    def __init__(self, client: Client, identity: Identity, *, deadline: float | None) -> None:
        self.client, self._identity, self._deadline = client, identity, deadline
        self._name: str | None = None
        self._state = State()
        self.failure: KvtcdError | None = None
        self.failures = 0
        try:
            self.name()
        except _FAILED as error:
            self._failed(error)

    def name(self) -> str:
        """Return the namespace, which is registered where it is not yet.

        Raises:
            Unavailable: the daemon is away.
            KvtcdError: it refuses the identity.
        """
        if self._name is None:
            self._name = register(self.client, self._identity, deadline=self._deadline)
        return self._name

    def ask(self, call: Callable[[str], T]) -> T | KvtcdError:
        """Return what a call says, given the namespace, or what the daemon failed with.

        Raises:
            KvtcdError: what is asked is wrong, and would be of any daemon.
        """
        if self.failure and self._state.away and (self._state.pause(time.monotonic()) or 0.0) > 0:
            self.failures += 1
            return self.failure
        try:
            answer = self._named(call)
        except _FAILED as error:
            return self._failed(error)
        if self.failure:
            _LOG.info("the daemon on %s answers again", self.client.address)
        self.failure, self._state = None, State()
        return answer

    def _named(self, call: Callable[[str], T]) -> T:
        """Return what a call says; one that was purged, or lost with the state, begins anew."""
        name = self.name()
        try:
            return call(name)
        except UnknownNamespace:
            _LOG.warning("namespace %s was purged, or is lost; it begins anew", name)
            self._name = None
            return call(self.name())

    def _failed(self, error: KvtcdError) -> KvtcdError:
        if self.failure is None:
            _LOG.warning("nothing is found or stored until the daemon answers: %s", error)
        self.failure, self.failures = error, self.failures + 1
        if isinstance(error, Unavailable):
            self._state = self._state.lost(time.monotonic(), refused=False)
        elif isinstance(error, UnknownNamespace):  # it has lost its state, or that was purged
            self._name = None
        return error

"""Turns changes into notices for their tenant: blocks under the keys that their engine gave them."""

from __future__ import annotations

from collections.abc import Sequence

from kvtcd.core import record as records
from kvtcd.core.errors import KvtcdError
from kvtcd.core.keys import EngineKey
from kvtcd.core.notices import Notice, What
from kvtcd.core.place import Place, Tier
from kvtcd.core.reason import Reason
from kvtcd.core.record import Envelope
from kvtcd.engine.changes import Change, Left, Moved, Stored
from kvtcd.engine.driver import Driver
from kvtcd.engine.errands import Errands
from kvtcd.engine.feed import Feeds
from kvtcd.engine.namespaces import Namespace, Registry
from kvtcd.engine.remote.writing import Parcel
from kvtcd.engine.steps import Origin


class Reporter:
    """Tells each tenant's feed what became of his blocks.

    The key of a block with host bytes is known. That of a block which lies on disk alone is not: keeping a
    million of them would cost more memory than all else that is known of a block. Such a block can only be
    dropped, and its key is read from its record just before that goes, on the thread that removes it.

    Args:
        driver: knows blocks with host bytes.
        registry: knows namespaces.
        feeds: told.
        errands: reads the keys that are on disk alone.
    """

    def __init__(self, driver: Driver, registry: Registry, feeds: Feeds, errands: Errands) -> None:
        self._driver, self._registry, self._feeds, self._errands = driver, registry, feeds, errands

    def report(self, changes: Sequence[Change]) -> None:
        """Report changes; called before anything that they speak of is carried out."""
        for change in changes:
            namespace = self._registry.numbered(change.entry.namespace)
            if namespace is None or namespace.trial or not self._feeds.watched(namespace.tenant):
                continue
            if not self._registry.admits(namespace):
                continue  # one notice of the purge stands for all its blocks
            if _within_a_tier(change):
                continue  # what form a copy has is nobody's business
            if origin := self._driver.origins.get(change.entry.key):
                self._publish(namespace, change, origin)
            else:
                # Begun before the drop is, so it comes first on the thread of the writer.
                _ = self._errands.start("report", self._read(namespace, change))

    def shared(self, parcel: Parcel) -> None:
        """Report that the remote tier has a block, too."""
        namespace = parcel.namespace
        if self._feeds.watched(namespace.tenant) and self._registry.admits(namespace):
            sealed = records.parse(parcel.record.envelope)
            notice = Notice(
                What.MOVED, None, namespace.name, sealed.engine_key, sealed.salt, Tier.REMOTE, Tier.HOST,
                tokens=sealed.tokens,
            )  # fmt: skip
            self._feeds.publish(namespace.tenant, notice)

    def unshared(self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes) -> None:
        """Report that blocks were deleted which the remote tier had."""
        if self._feeds.watched(namespace.tenant) and self._registry.admits(namespace):
            for key in keys:
                notice = Notice(
                    What.DROPPED, None, namespace.name, key, salt, Tier.REMOTE, reason=Reason.DELETED
                )
                self._feeds.publish(namespace.tenant, notice)

    def purged(self, namespace: Namespace) -> None:
        """Report that a namespace is gone."""
        if not namespace.trial:
            self._feeds.publish(namespace.tenant, Notice(What.PURGED, namespace=namespace.name))

    def _publish(self, namespace: Namespace, change: Change, named: Origin | Envelope | None) -> None:
        self._feeds.publish(namespace.tenant, self._notice(namespace.name, change, named))

    def _notice(self, name: str, change: Change, named: Origin | Envelope | None) -> Notice:
        key, salt = (named.engine_key, named.salt) if named else (None, b"")
        match change:
            case Stored(entry, place):
                parent = self._driver.origins.get(entry.parent) if entry.parent else None
                return Notice(
                    What.STORED, None, name, key, salt, place.tier, tokens=entry.tokens,
                    first_token=named.first_token if named else None,
                    parent=parent.engine_key if parent else None,
                )  # fmt: skip
            case Moved(entry, source, target):
                return Notice(
                    What.MOVED, None, name, key, salt, target.tier, source.tier, tokens=entry.tokens
                )
            case Left(entry, place, reason, places):
                left = tuple(dict.fromkeys(p.tier for p in places))
                return Notice(
                    What.DROPPED,
                    None,
                    name,
                    key,
                    salt,
                    place.tier,
                    tokens=entry.tokens,
                    reason=reason,
                    left=left,
                )

    async def _read(self, namespace: Namespace, change: Change) -> None:
        tenant, key = self._registry.tenants[namespace.tenant], change.entry.key
        assert tenant.writer is not None, "a block without host bytes lies in an environment"
        try:
            sealed = await tenant.writer.exclusive(lambda environment: environment.envelope(key))
            self._publish(namespace, change, records.open_envelope(tenant.keys, key, sealed or b""))
        except KvtcdError:
            self._publish(namespace, change, None)


def _within_a_tier(change: Change) -> bool:
    """Tell whether the tier of a copy that came or went has another one of the block."""
    match change:
        case Moved(entry, _, target):
            return any(entry.ready(p) for p in Place if p.tier is target.tier and p is not target)
        case Left(_, place, _, left):
            return any(other.tier is place.tier for other in left)
        case Stored():
            return False

"""What the environment of a tenant holds, counted by namespace, and checked as far as its key allows."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.progress import Progress

from kvtcd.core import blob as blobs
from kvtcd.core import record as records
from kvtcd.core.errors import Corrupt
from kvtcd.core.keys import RecordKey, TenantKeys, log_name
from kvtcd.engine.namespaces import TENANT_NAME, restored
from kvtcd.engine.warmup import WARM_NAME
from kvtcd.tiers.disk import Resting, at_rest

_UNKNOWN = "(of no namespace)"
ENCRYPTED = "encrypted"
"""Instead of the codec of a blob that cannot be read without the master key."""


@dataclass(slots=True)
class Held:
    """Blocks of one namespace.

    Attributes:
        model: whose cache; None for a namespace that is not known.
        blocks, tokens: so many.
        raw_bytes: of them unpacked.
        blob_bytes: of them packed.
        disk_bytes: that they take, envelopes and rounding to pages included.
        expired: blocks whose time is over.
        oldest, newest: when they were stored, Unix milliseconds.
        codecs: blocks by codec, where blobs were read.
        damaged: faults by kind.
    """

    model: str | None = None
    blocks: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    blob_bytes: int = 0
    disk_bytes: int = 0
    expired: int = 0
    oldest: int = 0
    newest: int = 0
    codecs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    damaged: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def take(self, envelope: records.Envelope, disk_bytes: int, now: int) -> None:
        """Count a block."""
        self.blocks += 1
        self.tokens += envelope.tokens
        self.raw_bytes += envelope.raw_bytes
        self.blob_bytes += envelope.blob_bytes
        self.disk_bytes += disk_bytes
        self.expired += envelope.expires is not None and envelope.expires <= now
        self.oldest = min(self.oldest or envelope.created, envelope.created)
        self.newest = max(self.newest, envelope.created)


@dataclass(frozen=True, slots=True)
class Store:
    """The environment of one tenant.

    Attributes:
        tenant: its name, or that of its directory where that is all there is.
        directory: the name of that.
        condition, fault, file_bytes, set_aside: see `Resting`.
        unreadable: headers of records that cannot be read.
        authentic: whether MACs were compared: the master key was there.
        misfit: whether the key that was there is not this tenant's.
        namespaces: by name.
        records: the first few.
    """

    tenant: str
    directory: str
    condition: str
    fault: str | None
    file_bytes: int
    set_aside: tuple[str, ...]
    unreadable: int
    authentic: bool
    misfit: bool
    namespaces: dict[str, Held]
    records: list[dict[str, object]]

    @property
    def damaged(self) -> int:
        """Records that a daemon would not serve."""
        return self.unreadable + sum(sum(held.damaged.values()) for held in self.namespaces.values())


def look(environment: Path, master: bytes | None, shown: int, progress: Progress, *, verify: bool) -> Store:
    """Read the environment of a tenant; see `Store`.

    Args:
        environment: that no process has open.
        master: the master key; without it, MACs are not compared.
        shown: records to list.
        progress: shows how many records were read.
        verify: read blobs too.
    """
    with at_rest(environment) as resting:
        values = resting.namespaces()
        values.pop(WARM_NAME, None)
        name = values.pop(TENANT_NAME, b"").decode(errors="replace")
        keys = TenantKeys.derive(master, name) if master and name else None
        misfit = keys is not None and keys.tag.hex() != environment.name
        keys = None if misfit else keys
        names, held = dict[bytes, str](), dict[str, Held]()
        for namespace, value in values.items():
            try:
                identity, _ = restored(namespace, value)
                names[identity.digest], held[namespace] = namespace, Held(identity.model)
            except Corrupt as fault:
                held[namespace] = Held(damaged={type(fault).__name__: 1})
        bar, unreadable, now = progress.add_task(name or environment.name, total=None), 0, _now()
        listed = list[dict[str, object]]()
        for page in resting.pages():
            unreadable += page.unreadable
            rows = zip(page.keys, page.envelopes, page.footprints.tolist(), strict=True)
            for key, sealed, nbytes in rows:
                one = _Record(RecordKey(key), sealed, nbytes, keys)
                whose = one.of(names)
                one.count(held.setdefault(whose, Held()), now, resting if verify else None)
                if len(listed) < shown and one.envelope:
                    listed.append(one.row(whose))
            progress.advance(bar, len(page.keys))
        return Store(
            name or environment.name, environment.name, resting.condition.value, resting.fault,
            resting.file_bytes, resting.set_aside, unreadable, keys is not None, misfit, held, listed,
        )  # fmt: skip


class _Record:
    """One record on disk, read as far as it can be."""

    def __init__(self, key: RecordKey, sealed: bytes, nbytes: int, keys: TenantKeys | None) -> None:
        self._key, self._nbytes, self._keys = key, nbytes, keys
        self.envelope: records.Envelope | None = None
        self._fault: Corrupt | None = None
        try:
            self.envelope = records.open_envelope(keys, key, sealed) if keys else records.parse(sealed)
        except Corrupt as fault:
            self._fault = fault

    def of(self, names: dict[bytes, str]) -> str:
        """Return the namespace that it names."""
        return names.get(self.envelope.namespace, _UNKNOWN) if self.envelope else _UNKNOWN

    def count(self, held: Held, now: int, resting: Resting | None) -> None:
        """Count it; with `resting`, read its blob and compare that too."""
        if self.envelope is not None:
            held.take(self.envelope, self._nbytes, now)
        if self.envelope is not None and resting is not None:
            try:
                held.codecs[self._codec(resting, self.envelope)] += 1
            except Corrupt as fault:
                self._fault = fault
        if self._fault is not None:
            held.damaged[type(self._fault).__name__] += 1

    def _codec(self, resting: Resting, envelope: records.Envelope) -> str:
        found = resting.read(self._key)
        data = memoryview(found[1].data if found else b"")
        if self._keys:
            records.check_blob(self._keys, envelope, data)
            data = records.content(self._keys, envelope, data, records.fresh)
        elif envelope.nonce:
            return ENCRYPTED
        parsed = blobs.parse(data)
        for section in parsed.sections:
            parsed.payload(section)
        return parsed.header.codec.name.lower().replace("_", "-")

    def row(self, namespace: str) -> dict[str, object]:
        """Return what a list says of it."""
        envelope = self.envelope
        assert envelope is not None, "the caller looked"
        return {
            "record": log_name(self._key),
            "namespace": namespace,
            "first_token": envelope.first_token,
            "tokens": envelope.tokens,
            "raw_bytes": envelope.raw_bytes,
            "blob_bytes": envelope.blob_bytes,
            "created": date(envelope.created),
            "expires": date(envelope.expires) if envelope.expires else None,
        }


def _now() -> int:
    return time.time_ns() // 1_000_000


def date(milliseconds: int) -> str:
    """Write Unix milliseconds as a date and time, UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")

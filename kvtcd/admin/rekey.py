"""`kvtcd rekey`: put all that is stored under another master key.

Names, MACs and ciphertexts of records follow from the master key, so every record is written anew, into
environments beside the old ones. Only when all of them are complete does the new key take the place of the
old one; then the old environments go. Killed before that, all is as it was, beside what was begun; killed
after it, all is under the new key, beside what is left of the old environments. A start leaves such folders
where they are and names them, as tenants of another key; whoever knows under which key the store is whole
removes them.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from kvtcd import custody, terminal
from kvtcd.admin.key_files import read_key
from kvtcd.core import cipher
from kvtcd.core import record as records
from kvtcd.core.errors import ConfigError, Corrupt, StoreFailed
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.engine.namespaces import TENANT_NAME
from kvtcd.engine.warmup import WARM_NAME
from kvtcd.tiers.disk import UNBOUNDED, Environment, Put, fresh
from kvtcd.tiers.state import MASTER_KEY_BYTES, StateDirectory

_BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class Rekeyed:
    """What became of the records.

    Attributes:
        tenants: so many.
        moved: records that are under the new key now.
        damaged: records that were not what had been stored; they are left behind.
    """

    tenants: int = 0
    moved: int = 0
    damaged: int = 0


def command(path: Path, *, old: Path | None, new: Path | None) -> bool:
    """Put a state directory under another master key; tell whether every record is under it now.

    Args:
        path: the state directory; no daemon may use it.
        old: file of the key that it is under; None: its own.
        new: file of the key that it is to be under; None: a key that is made up, and kept in its own file.

    Raises:
        AlreadyRunning: a daemon uses it.
        ConfigError: it is no state directory, a key cannot be used, or something that is stored is not under
            the old one; nothing has changed.
        StoreFailed, StoreFull: a tenant cannot be read, or there is no room for a second copy; nothing has
            changed.
    """
    console = terminal.console()
    with closing(StateDirectory.existing(path)) as state:
        kept = (path / "master.key").exists()
        if not kept and new is None:
            why = "it keeps no master key of its own; say with --new-key which one the daemon will be handed"
            raise ConfigError(path, "", why)
        before = state.master_key() if old is None else read_key(old)
        after = secrets.token_bytes(MASTER_KEY_BYTES) if new is None else read_key(new)
        if before == after:
            raise ConfigError(new or path, "", "is the key that it is under already")
        if old is not None and kept and not hmac.compare_digest(before, state.master_key()):
            raise ConfigError(old, "", f"differs from {path / 'master.key'}, the key that it is under")
        _require_all(state, before)
        with terminal.progress(console, transient=True) as progress:
            done = rekey(state, before, after, progress)
    console.print(
        f"{done.moved:,} records of {done.tenants:,} tenants are under the new key"
        + (f"; {done.damaged:,} were damaged and are gone" if done.damaged else "")
        + ("" if kept else "; hand it to the daemon as the credential kvtcd.master-key")
    )
    return not done.damaged


def _require_all(state: StateDirectory, before: bytes) -> None:
    """Refuse to begin where something would be left behind: under the new key nothing of it would be served.

    Raises:
        ConfigError: a tenant is under another key than the old one.
        StoreFailed: one cannot be read as it is.
    """
    found = custody.survey(state, before)
    if found.foreign:
        where = ", ".join(custody.described(state, tag) for tag in found.foreign)
        why = (
            f"holds tenants that are under another key than the old one: {where}. Is it the right key? If "
            "what is there may go, move it away. Nothing was changed"
        )
        raise ConfigError(state.path, "", why)
    for tag, why in (found.unreadable | found.damaged).items():
        raise StoreFailed(
            "rekey", f"{state.tenant(tag)}: {why}; mend it, or move it away. Nothing was changed"
        )


def rekey(state: StateDirectory, before: bytes, after: bytes, progress: Progress) -> Rekeyed:
    """Put all tenants of one master key under another; those of any other key stay as they are.

    Raises:
        StoreFailed, StoreFull: see `command`.
    """
    done, made = Rekeyed(), dict[str, str]()
    try:
        for tag in list(state.tenants()):
            if new := _rewrite(state, tag, before, after, done=done, progress=progress):
                made[tag] = new
    except BaseException:
        for new in made.values():
            state.remove_tenant(new)
        raise
    state.replace_master_key(after)
    for tag in made:
        state.remove_tenant(tag)
    done.tenants = len(made)
    return done


def _rewrite(
    state: StateDirectory, tag: str, before: bytes, after: bytes, *, done: Rekeyed, progress: Progress
) -> str | None:
    """Write one tenant's environment anew; return its new tag, None if it is not of this master key."""
    with closing(Environment(state.tenant(tag), quota=UNBOUNDED)) as source:
        values = source.namespaces()
        values.pop(WARM_NAME, None)
        name = values.get(TENANT_NAME, b"").decode(errors="replace")
        old, new = TenantKeys.derive(before, name), TenantKeys.derive(after, name)
        if not name or old.tag.hex() != tag:
            return None
        bar = progress.add_task(name, total=None)
        try:
            with closing(Environment(state.tenant(new.tag.hex()), quota=UNBOUNDED)) as target:
                for namespace, value in values.items():
                    target.put_namespace(namespace, value)
                for batch in _Rewriting(source, old, new, done).batches():
                    target.write(batch, [])
                    progress.advance(bar, len(batch))
        except BaseException:
            with suppress(OSError):
                state.remove_tenant(new.tag.hex())
            raise
        return new.tag.hex()


class _Rewriting:
    """The records of one environment, from one set of keys to another."""

    def __init__(self, source: Environment, old: TenantKeys, new: TenantKeys, done: Rekeyed) -> None:
        self._source, self._old, self._new, self._done = source, old, new, done
        self._names = dict(self._named())

    def _named(self) -> Iterator[tuple[RecordKey, RecordKey]]:
        """Yield the key of each record with its new one."""
        for page in self._source.scan():
            self._done.damaged += page.unreadable
            for key, sealed in zip(page.keys, page.envelopes, strict=True):
                try:
                    envelope = records.open_envelope(self._old, RecordKey(key), sealed)
                except Corrupt:
                    self._done.damaged += 1
                    continue
                salted = envelope.namespace, envelope.salt
                yield RecordKey(key), self._new.record_key(*salted, envelope.engine_key)

    def batches(self) -> Iterator[list[Put]]:
        """Yield the records under their new keys, 32 MiB at a time; damaged ones are left out."""
        batch, nbytes = list[Put](), 0
        for key in self._names:
            try:
                batch.append(self._anew(key))
            except Corrupt:
                self._done.damaged += 1
                continue
            self._done.moved += 1
            nbytes += batch[-1].footprint
            if nbytes >= _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
        yield batch

    def _anew(self, key: RecordKey) -> Put:
        """Check a record in full, and seal it under its new key."""
        sealed, stored = self._source.read(key) or (b"", fresh(0))
        envelope, blob = records.open_envelope(self._old, key, sealed), memoryview(stored.data)
        records.check_blob(self._old, envelope, blob)
        name, nonce = self._names[key], envelope.nonce
        if nonce:
            plain, nonce = records.content(self._old, envelope, blob, records.fresh), cipher.new_nonce()
            blob = memoryview(cipher.encrypt(self._new, name, nonce, plain))
        renamed = replace(
            envelope, key=name, tenant_tag=self._new.tag, key_id=self._new.key_id,
            parent=self._names.get(envelope.parent) if envelope.parent else None,
            blob_mac=records.blob_mac(self._new, blob), nonce=nonce,
        )  # fmt: skip
        return Put(name, records.seal(self._new, renamed), blob)

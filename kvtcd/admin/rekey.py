"""`kvtcd rekey`: put all that is stored under another master key.

Names, MACs and ciphertexts of records follow from the master key, so every record is written anew, into
environments beside the old ones. Only when all of them are complete does the new key take the place of the
old one; then the old environments go. Before each step the state directory says so (`tiers.rekeying`), and
whatever ends it, the next run undoes what was begun and begins anew, or goes on.

Names in a shared store follow from the key, too: purges that it has not heard of go on under the old ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from kvtcd import custody, shared_store, terminal
from kvtcd.admin.key_files import read_key
from kvtcd.admin.room import require_room, used
from kvtcd.core import cipher
from kvtcd.core import record as records
from kvtcd.core.errors import ConfigError, Corrupt, StoreFailed, StoreFull
from kvtcd.core.keys import RecordKey, TenantKeys, key_id
from kvtcd.engine.warmup import WARM_NAME
from kvtcd.tiers.disk import UNBOUNDED, Environment, Put, fresh
from kvtcd.tiers.disk.faults import translated
from kvtcd.tiers.rekeying import Phase, Rekeying
from kvtcd.tiers.state import MASTER_KEY_BYTES, StateDirectory

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, repr=False)
class _Keys:
    """The keys at hand: of `master.key`, where there is one, and of the options. Never shown."""

    own: bytes | None
    old: bytes | None
    new: bytes | None

    def holding(self, begun: Rekeying) -> str | None:
        """Return the name of the one that all is whole under, None if it is not there."""
        names = (key_id(each).hex() for each in ((self.own,) if self.own else (self.old, self.new)) if each)
        return next(filter(begun.whole_under, names), None)


def command(path: Path, *, old: Path | None, new: Path | None) -> bool:
    """Put a state directory under another master key; tell whether every record is under it now.

    A rekey that was ended before its time is undone and begun anew, or gone on with.

    Args:
        path: the state directory; no daemon may use it.
        old: file of the key that it is under; None: its own.
        new: file of the key that it is to be under; None: a key that is made up, and kept in its own file.

    Raises:
        AlreadyRunning: a daemon uses it.
        ConfigError: it is no state directory, a key cannot be used, or something that is stored is not under
            the old one, or was set aside as damaged; nothing has changed.
        StoreFailed, StoreFull: a tenant cannot be read, or there is no room for a second copy; nothing has
            changed, or it says which key holds.
    """
    console, file = terminal.console(), path / "master.key"
    with closing(StateDirectory.existing(path)) as state, _told_which_holds(state):
        keys = _Keys(
            state.known_key() if file.exists() else None,
            None if old is None else read_key(old), None if new is None else read_key(new, new=True),
        )  # fmt: skip
        if keys.own is None and keys.new is None:
            why = "it keeps no master key of its own; say with --new-key which one the daemon will be handed"
            raise ConfigError(path, "", why)
        if begun := state.rekeying():
            console.print(f"{begun.said}.", soft_wrap=True)
            begun = _resumed(state, begun, keys)
        if begun is None:
            before, after = _chosen(state, keys), keys.new or secrets.token_bytes(MASTER_KEY_BYTES)
            if before == after:
                raise ConfigError(new or path, "", "is the key that it is under already")
            tenants = _require_all(state, before, old or file)
            require_room("rekey", path, used(map(state.tenant, tenants)))
            with terminal.progress(console, transient=True) as progress:
                begun = rekey(state, before, after, tenants, progress)
        finish(state, begun)
    console.print(
        f"{begun.moved:,} records of {len(begun.tenants):,} tenants are under the new key"
        + (f"; {begun.damaged:,} were damaged and are gone" if begun.damaged else "")
        + ("" if keys.own else "; hand it to the daemon as the credential kvtcd.master-key")
    )
    return not begun.damaged


@contextmanager
def _told_which_holds(state: StateDirectory) -> Iterator[None]:
    """Say of a full device what became of what was begun, which key holds, and what to do."""
    try:
        with translated("rekey", state.path):
            yield
    except StoreFull as error:
        begun = state.rekeying()
        holds = begun.said if begun else "Nothing was changed, and the old key holds"
        why = error.code if str(state.path) in error.code else f"the device of {state.path} is full"
        raise StoreFull("rekey", f"{why}. {holds}; make room, and run it again") from error


def _resumed(state: StateDirectory, begun: Rekeying, keys: _Keys) -> Rekeying | None:
    """Return what is to be finished, None where what was begun is undone.

    Raises:
        ConfigError: the key that all is whole under is not there, or the new key is a third one.
    """
    holding = keys.holding(begun)
    if holding is None:
        which = "its file master.key" if keys.own else "neither of --old-key and --new-key"
        why = f"{begun.said}. {which[0].upper()}{which[1:]} is{' not' if keys.own else ''} that key; "
        why += "put it there" if keys.own else "name its file as it was named then"
        raise ConfigError(state.path, "", f"{why}. Nothing was changed")
    if holding == begun.old:
        undo(state, begun)
        return None
    if keys.new and key_id(keys.new).hex() != begun.new:
        why = f"{begun.said}. --new-key is a third key: let that rekey end first, with its own new key"
        raise ConfigError(state.path, "", f"{why}. Nothing was changed")
    return begun


def _chosen(state: StateDirectory, keys: _Keys) -> bytes:
    """Return the key to put all from.

    Raises:
        ConfigError: there is none, or there are two.
    """
    file = state.path / "master.key"
    if keys.own is None and keys.old is None:
        raise ConfigError(state.path, "", f"has no {file.name}; say with --old-key which key it is under")
    if keys.own is None or keys.old is None or keys.own == keys.old:
        return keys.own or keys.old or b""
    if custody.survey(state, keys.old).fitting:
        why = "is another key than --old-key, which all is under; put that one in its place first"
        raise ConfigError(file, "", f"{why} (mode 0600), and leave --old-key out. Nothing was changed")
    why = f"differs from {file}, the key that it is under; leave it out. Nothing was changed"
    raise ConfigError("--old-key", "", why)


def _require_all(state: StateDirectory, before: bytes, named: Path) -> dict[str, str]:
    """Return all tenants; refuse to begin where one would be left behind, and served no more.

    Raises:
        ConfigError: a tenant is under another key than the old one, or something was set aside as damaged.
        StoreFailed: one cannot be read as it is.
    """
    found = custody.survey(state, before)
    unchanged = "Nothing was changed"
    if found.foreign:
        where = ", ".join(found.where(state, found.foreign))
        if not found.fitting:
            own = named == state.path / "master.key"
            todo = "put that one in its place" if own else "name that one with --old-key"
            why = f"is not the key that {state.path} is under: all there is under another: {where}; {todo}"
            raise ConfigError(named, "", f"{why}. {unchanged}")
        why = f"holds tenants that are under another key than {named}, which the others are under: {where}"
        raise ConfigError(state.path, "", f"{why}. If what is there may go, move it away. {unchanged}")
    for tag, fault in (found.unreadable | found.damaged).items():
        raise StoreFailed("rekey", f"{state.tenant(tag)}: {fault}; mend it, or move it away. {unchanged}")
    for tag, names in found.set_aside.items():
        where = ", ".join(str(state.tenant(tag) / name) for name in names)
        why = f"{where} was damaged and set aside, and nothing could be read of it under another key"
        raise ConfigError(state.path, "", f"{why}; have it purged, or move it away. {unchanged}")
    return found.fitting


def rekey(
    state: StateDirectory, before: bytes, after: bytes, tenants: dict[str, str], progress: Progress
) -> Rekeying:
    """Copy tenants from one master key to another, and let that be the one that holds; `finish` comes next.

    Args:
        state: of the tenants.
        before: the key that all is under.
        after: the one that all is to be under.
        tenants: names by their directories.
        progress: shows how far it is.

    Raises:
        ConfigError, StoreFailed, StoreFull: see `command`.
    """
    ledger = shared_store.ledger(state)
    tags = {tag: TenantKeys.derive(after, name).tag.hex() for tag, name in tenants.items()}
    begun = Rekeying(Phase.COPYING, key_id(before).hex(), key_id(after).hex(), tags)
    try:
        state.note_rekeying(begun)
        done = [_rewrite(state, TenantKeys.derive(before, name), TenantKeys.derive(after, name), progress)
                for name in tenants.values()]  # fmt: skip
        moved, damaged = (sum(counts) for counts in zip(*done, strict=True)) if done else (0, 0)
        if ledger.purges():
            ledger.rekeyed(lambda tenant: TenantKeys.derive(before, tenant))
            state.note_remote(ledger.to_bytes())
        begun = replace(begun, phase=Phase.COPIED, moved=moved, damaged=damaged)
        state.note_rekeying(begun)
    except BaseException:
        undo(state, begun)
        raise
    state.replace_master_key(after)
    return begun


def undo(state: StateDirectory, begun: Rekeying) -> None:
    """Remove what was written under the new key: the old one holds."""
    if begun.phase is not Phase.COPYING:
        state.note_rekeying(replace(begun, phase=Phase.COPYING))
    for tag in begun.tenants.values():
        state.remove_tenant(tag)
    state.note_rekeying(None)


def finish(state: StateDirectory, begun: Rekeying) -> None:
    """Remove what is still there under the old key: the new one holds."""
    state.note_rekeying(replace(begun, phase=Phase.REMOVING))
    for tag in begun.tenants:
        state.remove_tenant(tag)
    state.note_rekeying(None)


def _rewrite(state: StateDirectory, old: TenantKeys, new: TenantKeys, progress: Progress) -> tuple[int, int]:
    """Write one tenant's environment anew; return how many records are there, and how many were damaged."""
    with (
        closing(Environment(state.tenant(old.tag.hex()), quota=UNBOUNDED)) as source,
        closing(Environment(state.tenant(new.tag.hex()), quota=UNBOUNDED)) as target,
    ):
        for namespace, value in source.namespaces().items():
            if namespace != WARM_NAME:
                target.put_namespace(namespace, value)
        bar, rewriting = progress.add_task(old.tenant, total=None), _Rewriting(source, old, new)
        for batch in rewriting.batches():
            target.write(batch, [])
            progress.advance(bar, len(batch))
    return rewriting.moved, rewriting.damaged


class _Rewriting:
    """The records of one environment, from one set of keys to another.

    Attributes:
        moved: so many were written anew.
        damaged: so many were not what had been stored; they are left behind.
    """

    def __init__(self, source: Environment, old: TenantKeys, new: TenantKeys) -> None:
        self.moved = self.damaged = 0
        self._source, self._old, self._new = source, old, new
        self._names = dict(self._named())

    def _named(self) -> Iterator[tuple[RecordKey, RecordKey]]:
        """Yield the key of each record with its new one."""
        for page in self._source.scan():
            self.damaged += page.unreadable
            for key, sealed in zip(page.keys, page.envelopes, strict=True):
                try:
                    envelope = records.open_envelope(self._old, RecordKey(key), sealed)
                except Corrupt:
                    self.damaged += 1
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
                self.damaged += 1
                continue
            self.moved += 1
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

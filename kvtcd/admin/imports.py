"""`kvtcd import`: a namespace that `kvtcd export` wrote, into a stopped store.

The file is read twice: first all of it is checked, and only then is anything stored, each block checked once
more. Killed in between, the store has some of the blocks; the next import of the file goes on behind them.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtcd import custody, terminal
from kvtcd.admin.export_file import messages, survey
from kvtcd.admin.key_files import read_key
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.config import Config, show_bytes, tenant_name
from kvtcd.core import archive, cipher
from kvtcd.core import record as records
from kvtcd.core.archive_messages import Block, Namespace, ProfileHead
from kvtcd.core.errors import AlreadyRunning, ConfigError, Corrupt, IdentityConflict, StoreFailed, StoreFull
from kvtcd.core.identity import NAMESPACE_NAME, differing
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.engine.namespaces import TENANT_NAME, persisted, restored
from kvtcd.tiers import durable
from kvtcd.tiers.disk import Environment, Put, at_rest
from kvtcd.tiers.state import StateDirectory
from kvtcd.tiers.state_files import StateFiles

_BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class Imported:
    """What became of the blocks: stored, there already, or expired meanwhile."""

    stored: int = 0
    present: int = 0
    expired: int = 0


def command(
    file: Path, config: Config, *, key: Path, tenant: str | None, name: str | None, master: Path | None
) -> None:
    """Store what a file holds.

    Args:
        file: that `kvtcd export` wrote.
        config: that of the daemon, which must not run; its state directory is made as it would.
        key: file of the key that it was written with.
        tenant: whose blocks they become; None: of the same name as before.
        name: of the namespace; None: as before.
        master: file of the daemon's master key; None: its own.

    Raises:
        AlreadyRunning: the daemon runs.
        ConfigError: a key, name, file or state directory that cannot be used, or a master key that nothing
            which is stored is under.
        Corrupt: the file is not what was written; nothing was stored.
        IdentityConflict: the tenant has another namespace of this name, or this one under another.
        StoreFailed, StoreFull: the store cannot take it.
    """
    console, secret = terminal.console(), read_key(key)
    if not config.disk.capacity:
        raise config.fault("disk.capacity", "is 0: there is no disk tier to import into")
    if StateFiles(config.daemon.state).examine():  # before so much is read
        raise AlreadyRunning(config.daemon.state)
    with terminal.progress(console, transient=True) as progress:
        found = survey(file, secret, progress, "checking")
        owner, called = _named(tenant or found.namespace.tenant, name or found.namespace.name)
        with closing(StateDirectory(config.daemon.state)) as state:
            root = state.master_key(None if master is None else read_key(master))
            custody.examine(state, root)
            custody.settle(state, root)
            _require_room(state, config, found.nbytes)
            keys = TenantKeys.derive(root, owner)
            path = state.tenant(keys.tag.hex())
            with closing(Environment(path, quota=config.disk.capacity)) as environment:
                target = _Target(environment, keys, called, encrypt=config.disk.encrypt)
                target.register(found.namespace)
                said = messages(file, secret, progress, "storing")
                for message in said:
                    if isinstance(message, Block):
                        target.put(message)
                    elif isinstance(message, ProfileHead):
                        _keep(message, archive.parts(message, said), config.codec.profiles)
                target.flush()
    done = target.done
    console.print(
        f"{done.stored:,} blocks are in namespace {target.name} of {owner}"
        + (f"; {done.present:,} were there already" if done.present else "")
        + (f"; {done.expired:,} had expired" if done.expired else "")
    )


def _named(tenant: str, name: str) -> tuple[str, str]:
    if not re.fullmatch(NAMESPACE_NAME, name):
        raise ConfigError("--name", "", f"{name!r} is no name of a namespace; it must match {NAMESPACE_NAME}")
    try:
        return tenant_name(tenant), name
    except ValueError as error:
        raise ConfigError("--tenant", "", str(error)) from None


def _require_room(state: StateDirectory, config: Config, need: int) -> None:
    """Refuse what the daemon would evict at its next start, or the device cannot hold."""
    used = 0
    for tag in state.tenants():
        # one that cannot be read is left out by the daemon, too
        with suppress(StoreFailed), at_rest(state.tenant(tag)) as resting:
            used += resting.used
    free = shutil.disk_usage(config.daemon.state).free
    if used + need > config.disk.capacity:
        raise StoreFull(
            "import",
            f"{need / 1e6:,.0f} MB come to {used / 1e6:,.0f} MB that are there; [disk] capacity is "
            f"{show_bytes(config.disk.capacity)}",
        )
    if need > free:
        raise StoreFull("import", f"{need / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} are free")


def _keep(head: ProfileHead, parts: Iterator[bytes], folder: Path) -> None:
    """Put a profile into the folder, unless it is there."""
    path = ProfileFolder(folder).located(head.digest)
    if path.is_file():
        deque(parts, maxlen=0)
        return
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with durable.new_file(path) as file:
            file.writelines(parts)
    except OSError as error:
        raise ConfigError(path, "", f"cannot be written: {error.strerror}") from error


class _Target:
    """The namespace of a store that blocks are put into."""

    def __init__(self, environment: Environment, keys: TenantKeys, name: str, *, encrypt: bool) -> None:
        self.name, self.done = name, Imported()
        self._environment, self._keys, self._encrypt = environment, keys, encrypt
        self._digest, self._generation = b"", 0
        self._batch, self._nbytes = list[Put](), 0
        self._now = time.time_ns() // 1_000_000

    def register(self, namespace: Namespace) -> None:
        """Make sure that there is a namespace of this identity, as a client does that registers it.

        Raises:
            IdentityConflict: name or identity are taken.
            Corrupt: what the store knows of its namespaces cannot be read.
        """
        identity, values = namespace.identity, self._environment.namespaces()
        self._digest = identity.digest
        for name, value in values.items():
            if name.startswith("@"):
                continue
            known, generation = restored(name, value)
            if name == self.name and known == identity:
                self._generation = generation
                return
            if name == self.name:
                raise IdentityConflict(name, differs=differing(known, identity))
            if known == identity:
                raise IdentityConflict(self.name, registered_as=name)
        self._generation = self._now
        self._environment.put_namespace(TENANT_NAME, self._keys.tenant.encode())
        self._environment.put_namespace(self.name, persisted(identity, self._generation))

    def put(self, block: Block) -> None:
        """Store a block under the keys of this store, unless it is there or its time is over.

        Raises:
            StoreFailed, StoreFull: the store cannot take it.
        """
        key = self._keys.record_key(self._digest, block.salt, block.key)
        if block.expires is not None and block.expires <= self._now:
            self.done.expired += 1
        elif self._has(key):
            self.done.present += 1
        else:
            self._batch.append(self._sealed(key, block))
            self._nbytes += self._batch[-1].footprint
            self.done.stored += 1
            if self._nbytes >= _BATCH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Have all that was put on disk, durably.

        Raises:
            StoreFailed, StoreFull: the store cannot take it.
        """
        self._environment.write(self._batch, [])
        self._environment.sync()
        self._batch, self._nbytes = [], 0

    def _has(self, key: RecordKey) -> bool:
        """Tell whether a block is there; one that is damaged or of a purged namespace is replaced."""
        try:
            sealed = self._environment.envelope(key)
            if sealed is None:
                return False
            return records.open_envelope(self._keys, key, sealed).generation == self._generation
        except Corrupt:
            return False

    def _sealed(self, key: RecordKey, block: Block) -> Put:
        stored: bytearray | memoryview = block.blob
        nonce = cipher.new_nonce() if self._encrypt else b""
        if nonce:
            stored = cipher.encrypt(self._keys, key, nonce, block.blob)
        salted = self._digest, block.salt
        envelope = records.Envelope(
            key=key, tenant_tag=self._keys.tag, key_id=self._keys.key_id, namespace=self._digest,
            generation=self._generation, engine_key=block.key, salt=block.salt,
            parent=self._keys.record_key(*salted, block.parent) if block.parent else None,
            first_token=block.first_token, tokens=block.tokens, raw_bytes=block.raw_bytes,
            blob_bytes=len(stored), created=block.created, expires=block.expires,
            blob_mac=records.blob_mac(self._keys, stored), nonce=nonce,
        )  # fmt: skip
        return Put(key, records.seal(self._keys, envelope), stored)

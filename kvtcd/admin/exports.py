"""`kvtcd export`: a namespace of a stopped store in a file that another store can take in.

It reads what lies on disk, which is what a restart would find: what is packed moves as it is, and nothing is
encoded again. A running daemon gives and takes raw blocks alone, since it believes no packed byte of others.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from kvtcd import custody, terminal
from kvtcd.admin.key_files import read_key
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.config import Config
from kvtcd.core import archive
from kvtcd.core import record as records
from kvtcd.core.archive_messages import Block, Message, Namespace, ProfileHead
from kvtcd.core.errors import ConfigError, Corrupt, StoreFailed, UnknownProfile
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey, RecordKey, TenantKeys
from kvtcd.engine.namespaces import TENANT_NAME, restored
from kvtcd.engine.steps import formed
from kvtcd.engine.warmup import WARM_NAME
from kvtcd.tiers import durable
from kvtcd.tiers.disk import Page, Resting, at_rest
from kvtcd.tiers.state import at_rest as state_at_rest
from kvtcd.tiers.state_files import StateFiles


@dataclass(slots=True)
class Exported:
    """What became of the blocks.

    Attributes:
        blocks: that are in the file.
        damaged: that were not what had been stored; they are left out.
        expired: whose time is over; they are left out.
        profiles: that the blocks were packed with, by digest; they are in the file too.
    """

    blocks: int = 0
    damaged: int = 0
    expired: int = 0
    profiles: dict[bytes, Path] = field(default_factory=dict)


def command(
    name: str, config: Config, *, tenant: str | None, out: Path, key: Path, master: Path | None
) -> bool:
    """Write a namespace into a file; tell whether all of its blocks that have not expired are in it.

    Args:
        name: of the namespace.
        config: that of the daemon, which must not run.
        tenant: whose namespace it is; None: of the only one who has it.
        out: the file; it appears when it is complete.
        key: file of the key that the file is encrypted and authenticated with.
        master: file of the daemon's master key; None: its own.

    Raises:
        AlreadyRunning: the daemon runs.
        ConfigError: no state directory, a key that cannot be used, the file cannot be written, or nobody, or
            not this tenant, has such a namespace.
        StoreFailed: the store cannot be read, or has to be mended first.
        UnknownProfile: blocks were packed with a profile that is not in its folder.
    """
    console, secret = terminal.console(), read_key(key, new=True)
    if out.exists():
        raise ConfigError(out, "", "is there already; remove it, or choose another name")
    with ExitStack() as stack:
        stack.enter_context(state_at_rest(config.daemon.state))
        state, root = StateFiles(config.daemon.state), _master(config.daemon.state, master)
        custody.unended(state, root)
        environment, owner = _owned(state, root, name, tenant)
        keys, resting = TenantKeys.derive(root, owner), stack.enter_context(at_rest(environment))
        progress = stack.enter_context(terminal.progress(console, transient=True))
        export = _Export(resting, keys, name, ProfileFolder(config.codec.profiles), progress)
        try:
            with durable.new_file(out) as file:
                writer = archive.Writer(secret, secrets.token_bytes(archive.SALT_BYTES), file.write)
                for message in export.messages():
                    writer.put(message)
                writer.end()
                nbytes = file.tell()
        except OSError as error:
            raise ConfigError(out, "", f"cannot be written: {error.strerror}") from error
    done = export.done
    console.print(
        f"{out}: {done.blocks:,} blocks of {name} and {len(done.profiles)} profiles, {nbytes / 1e6:,.1f} MB"
        + (f"; {done.expired:,} had expired" if done.expired else "")
        + (f"; {done.damaged:,} were damaged and are left out" if done.damaged else "")
    )
    return not done.damaged


def _master(state: Path, named: Path | None) -> bytes:
    """Return the daemon's master key.

    Raises:
        ConfigError: it cannot be read, or is a credential, and not named.
    """
    own = state / "master.key"
    if named is None and not own.exists():
        raise ConfigError(
            own, "", "is not there; where the key is a credential, name its file with --master-key"
        )
    return read_key(named or own)


def _owned(state: StateFiles, root: bytes, name: str, tenant: str | None) -> tuple[Path, str]:
    """Return the environment that has a namespace, and its tenant.

    Raises:
        ConfigError: nobody has it, several have, or its tenant is under another master key.
        StoreFailed: what the tenant has cannot be read as it is.
    """
    owners, foreign, there, wrong = dict[str, Path](), list[str](), list[str](), dict[str, str]()
    for tag in custody.in_use(state, root):
        environment = state.tenant(tag)
        try:
            with at_rest(environment) as resting:
                names, fault, aside = resting.namespaces(), resting.fault, resting.set_aside
        except StoreFailed as error:
            wrong[tag] = f"{environment} cannot be read: {error.code}"
            continue
        owner = names.pop(TENANT_NAME, b"").decode(errors="replace")
        names.pop(WARM_NAME, None)
        if fault:
            wrong[tag] = (
                f"{environment} is damaged: {fault}; start the daemon once, which mends it or sets it aside"
            )
        elif aside and name not in names:
            wrong[tag] = f"{environment} was damaged: what it held is set aside ({', '.join(aside)})"
        fits = TenantKeys.derive(root, owner).tag.hex() == tag
        if owner:
            under = "" if fits else ", under another master key"
            there.append(f"{owner} ({', '.join(sorted(names)) or 'none'}{under})")
        if name in names and tenant in {None, owner}:
            if fits:
                owners[owner] = environment
            else:
                foreign.append(owner)
    if len(owners) > 1:
        raise ConfigError("--tenant", "", f"several have a namespace {name}: {', '.join(sorted(owners))}")
    for owner, environment in owners.items():
        return environment, owner
    if tenant and (why := wrong.get(TenantKeys.derive(root, tenant).tag.hex())):
        raise StoreFailed("export", f"nothing of {name} of {tenant}: {why}")
    if foreign:
        why = f"{' and '.join(foreign)} with a namespace {name} is under another master key than this one"
        raise ConfigError(state.path, "", why)
    whose = f"tenant {tenant} has" if tenant else "there is"
    known = f"tenants and their namespaces are {', '.join(there)}" if there else "nothing is stored"
    why = "; ".join((f"{whose} no namespace {name} here; {known}", *wrong.values()))
    raise ConfigError(state.path, "", why)


class _Export:
    """One namespace of an environment, as messages."""

    def __init__(
        self, resting: Resting, keys: TenantKeys, name: str, profiles: ProfileFolder, progress: Progress
    ) -> None:
        self.done = Exported()
        self._resting, self._keys, self._name = resting, keys, name
        self._profiles, self._progress = profiles, progress
        self._now = time.time_ns() // 1_000_000

    def messages(self) -> Iterator[Message]:
        """Yield all that the file says."""
        identity, generation = restored(self._name, self._resting.namespaces()[self._name])
        bar = self._progress.add_task(self._name, total=self._resting.used)
        yield Namespace(self._name, self._keys.tenant, identity)
        for page in self._resting.pages():
            yield from self._blocks(page, identity, generation)
            self._progress.advance(bar, int(page.footprints.sum()))
        for digest, path in sorted(self.done.profiles.items()):
            yield ProfileHead(digest, path.stat().st_size)
            with path.open("rb") as file:
                yield from iter(lambda: file.read(archive.PART_BYTES), b"")

    def _blocks(self, page: Page, identity: Identity, generation: int) -> Iterator[Block]:
        self.done.damaged += page.unreadable
        digest = identity.digest
        for key, sealed in zip(page.keys, page.envelopes, strict=True):
            try:
                claimed = records.parse(sealed)
                if claimed.namespace != digest or claimed.generation != generation:
                    continue
                block = self._block(RecordKey(key), identity)
            except Corrupt:
                self.done.damaged += 1
                continue
            if block is None:
                self.done.expired += 1
                continue
            self.done.blocks += 1
            yield block

    def _block(self, key: RecordKey, identity: Identity) -> Block | None:
        """Check a record in full; None if it has expired.

        Raises:
            Corrupt: it is not what was stored.
            UnknownProfile: its profile is not there.
        """
        found = self._resting.read(key)
        sealed, stored = (found[0], found[1].data) if found else (b"", records.fresh(0))
        envelope = records.open_envelope(self._keys, key, sealed)
        if envelope.expires is not None and envelope.expires <= self._now:
            return None
        records.check_blob(self._keys, envelope, stored)
        content = records.content(self._keys, envelope, stored, records.fresh)
        blob = formed(content, envelope.tokens, envelope.raw_bytes, identity.layout)
        if any(blob.header.profile):
            self._need(blob.header.profile)
        return Block(
            envelope.engine_key, envelope.salt, self._parent(envelope), envelope.first_token,
            envelope.tokens, envelope.raw_bytes, envelope.created, envelope.expires, content,
        )  # fmt: skip

    def _parent(self, envelope: records.Envelope) -> EngineKey | None:
        """Return the engine key of the block before, if that is there: the record knows but its hash."""
        if envelope.parent is None:
            return None
        try:
            sealed = self._resting.envelope(envelope.parent) or b""
            return records.open_envelope(self._keys, envelope.parent, sealed).engine_key
        except Corrupt:
            return None

    def _need(self, digest: bytes) -> None:
        if digest not in self.done.profiles:
            path = self._profiles.located(digest)
            if not path.is_file():
                raise UnknownProfile(digest)
            self.done.profiles[digest] = path

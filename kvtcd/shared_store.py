"""What a configuration says of the store that daemons share: a client of it, and what is left to do there."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvtcd.config import Config, Credentials, RedisAt
from kvtcd.core.errors import ConfigError, Corrupt
from kvtcd.core.remote.ledger import Ledger
from kvtcd.engine.ports import RemoteStore
from kvtcd.tiers.state_files import StateFiles

_OF_REDIS, _OF_S3 = {"username", "password"}, {"key_id", "secret", "session"}


def ledger(state: StateFiles) -> Ledger:
    """Return what a shared store still has to do.

    Raises:
        ConfigError: what was kept of that cannot be read.
    """
    try:
        return Ledger.from_bytes(state.remote() or Ledger().to_bytes())
    except Corrupt as error:
        why = f"{error}; remove it, and purge once more what was purged while the store was away"
        raise ConfigError(state.path / "remote", "", why) from None


def client(config: Config, entry: Credentials) -> RemoteStore:
    """Return a client of the store; which library that needs is an extra, loaded where it is asked for.

    Raises:
        ConfigError: the library is not installed, the authority of its certificate cannot be read, or it is
            entered by other things than those that were given.
    """
    said, where = config.remote, config.remote.where
    if said.authority:
        _require_authority(Path(said.authority))
    _require_entry(config, entry)
    try:
        if isinstance(where, RedisAt):
            from kvtcd.tiers.remote.redis_store import RedisStore  # noqa: PLC0415 - as above

            return RedisStore(
                where.hosts, cluster=where.cluster, database=where.database, tls=where.tls,
                timeout=said.timeout, authority=said.authority or None, username=entry.username or None,
                password=entry.password or None,
            )  # fmt: skip
        from kvtcd.tiers.remote.s3_store import S3Store  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        extra = "redis" if isinstance(where, RedisAt) else "s3"
        why = f"needs {error.name}, which is not installed: pip install 'kvtcd[{extra}]'"
        raise config.fault("remote.url", why) from None
    assert where is not None, "only a configured store is made"
    return S3Store(
        where.bucket, prefix=where.prefix, timeout=said.timeout, endpoint=said.endpoint or None,
        region=said.region, key_id=entry.key_id or None, secret=entry.secret or None,
        session=entry.session or None,
    )  # fmt: skip


def _require_entry(config: Config, entry: Credentials) -> None:
    """Refuse what another kind of store is entered by, and one half of an access key; none of it is shown."""
    given = {name for name in Credentials.model_fields if getattr(entry, name)}
    redis = isinstance(config.remote.where, RedisAt)
    if foreign := given - (_OF_REDIS if redis else _OF_S3):
        kind, names = "Redis" if redis else "S3", ", ".join(sorted(foreign))
        raise config.fault("remote.credentials", f"has {names}, by which no {kind} is entered; leave it out")
    if given and not redis and not given >= {"key_id", "secret"}:
        raise config.fault("remote.credentials", "has a part of an access key alone: say key_id and secret")


def _require_authority(file: Path) -> None:
    """Refuse a file that could not vouch for anybody: a store behind it would seem to be away."""
    try:
        ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(file, "", f"is no certificate in PEM, or cannot be read: {error}") from None

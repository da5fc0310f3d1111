"""A file that `kvtcd export` wrote, read from its first to its last byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from kvtcd.core import archive, cipher
from kvtcd.core import record as records
from kvtcd.core.archive_messages import Block, Message, Namespace, ProfileHead
from kvtcd.core.errors import ConfigError, Corrupt
from kvtcd.engine.steps import formed
from kvtcd.tiers.disk import footprint


@dataclass(slots=True)
class Survey:
    """What a file holds that is intact to its end.

    Attributes:
        namespace: whose blocks these are.
        blocks: so many.
        tokens: of these.
        raw_bytes: of these, before they were packed.
        blob_bytes: of these, packed.
        nbytes: that they will take on disk.
        codecs: how many were packed by each.
        profiles: SHA-256 of those that come along.
        oldest, newest: when blocks were stored first and last, Unix milliseconds; 0 without blocks.
    """

    namespace: Namespace
    blocks: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    blob_bytes: int = 0
    nbytes: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    profiles: list[bytes] = field(default_factory=list)
    oldest: int = 0
    newest: int = 0


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Have errors of what is read meanwhile say in which file that is.

    Raises:
        ConfigError: it cannot be read.
        Corrupt: it is not what it should be.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error
    except Corrupt as error:
        raise type(error)(f"{error.what} {file}", error.why) from error


def messages(file: Path, secret: bytes, progress: Progress, what: str) -> Iterator[Message]:
    """Yield what a file says.

    Raises:
        ConfigError, Corrupt: see `named`.
    """
    with named(file), progress.open(file, "rb", description=what) as opened:
        yield from archive.read(secret, opened.read)


def survey(file: Path, secret: bytes, progress: Progress, what: str) -> Survey:
    """Look at all that a file says, the form and the checksums of every blob included.

    Raises:
        ConfigError, Corrupt: see `named`; a blob is not what was said of it.
    """
    said = messages(file, secret, progress, what)
    first = next(said)
    assert isinstance(first, Namespace), "`read` yields it first"
    found, layout = Survey(first), first.identity.layout
    for message in said:  # which names the file itself
        if isinstance(message, ProfileHead):
            found.profiles.append(message.digest)
        elif isinstance(message, Block):
            with named(file):
                blob = formed(message.blob, message.tokens, message.raw_bytes, layout)
                for section in blob.sections:
                    blob.payload(section)
            _count(found, message, blob.header.codec.name.lower().replace("_", "-"))
    return found


def _count(found: Survey, block: Block, codec: str) -> None:
    found.blocks += 1
    found.tokens += block.tokens
    found.raw_bytes += block.raw_bytes
    found.blob_bytes += len(block.blob)
    found.nbytes += footprint(records.MAX_ENVELOPE_BYTES, len(block.blob) + cipher.TAG_BYTES)
    found.codecs[codec] += 1
    found.oldest = min(found.oldest or block.created, block.created)
    found.newest = max(found.newest, block.created)

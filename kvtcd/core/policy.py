"""What an operator decides for the blocks of a namespace, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

CodecName = Literal["kvtc", "lossless"]


@dataclass(frozen=True, slots=True)
class Match:
    """Globs that a namespace must fit, all of them."""

    namespace: str = "*"
    engine: str = "*"
    model: str = "*"

    def fits(self, *, namespace: str, engine: str, model: str) -> bool:
        """Tell whether a namespace fits."""
        return (
            fnmatchcase(namespace, self.namespace)
            and fnmatchcase(engine, self.engine)
            and fnmatchcase(model, self.model)
        )

    @property
    def everything(self) -> bool:
        """Whether every namespace fits."""
        return self == Match()


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """How blocks are packed. `ratio`, `sinks` and `window` (tokens) mean nothing to `lossless`."""

    name: CodecName = "kvtc"
    ratio: int = 16
    sinks: int = 4
    window: int = 128


@dataclass(frozen=True, slots=True)
class HostTier:
    """Marks of the host tier, as shares of its capacity."""

    high: float = 0.95
    low: float = 0.85


@dataclass(frozen=True, slots=True)
class DiskTier:
    """`write`: copy a block to disk ``behind`` its put, or only when the host must ``evict`` it."""

    write: Literal["behind", "evict"] = "behind"
    high: float = 0.98
    low: float = 0.92


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy file."""

    name: str
    match: Match = Match()
    codec: CodecChoice = CodecChoice()
    host: HostTier = HostTier()
    disk: DiskTier = DiskTier()
    flush: Literal["none", "host"] = "host"
    """What a stopping daemon writes to disk first."""


def governing(policies: tuple[Policy, ...], *, namespace: str, engine: str, model: str) -> Policy:
    """Return the first policy whose `match` fits; the last one fits everything."""
    return next(p for p in policies if p.match.fits(namespace=namespace, engine=engine, model=model))

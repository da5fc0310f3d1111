"""What an operator decides for the blocks of a namespace, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from kvtcd.core.devices import GPU, DeviceName, GpuName
from kvtcd.core.dials import DIALS, CodecName
from kvtcd.core.drift import OnDrift
from kvtcd.core.forms import Pattern
from kvtcd.core.identity import Identity, is_trial

EvictName = Literal["lru", "lfu", "arc", "s3fifo", "gdsf"]


@dataclass(frozen=True, slots=True)
class Match:
    """Globs that a namespace must fit, all of them.

    `parallel`: which part of its model it has, as `core.split` names ranks.
    """

    namespace: str = "*"
    engine: str = "*"
    model: str = "*"
    parallel: str = "*"

    def fits(self, namespace: str, identity: Identity) -> bool:
        """Tell whether a namespace fits."""
        return (
            fnmatchcase(namespace, self.namespace)
            and fnmatchcase(identity.engine, self.engine)
            and fnmatchcase(identity.model, self.model)
            and fnmatchcase(identity.parallel, self.parallel)
        )

    @property
    def everything(self) -> bool:
        """Whether every namespace fits."""
        return self == Match()


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """How blocks are packed; `core.dials` has what each codec can be asked for.

    `ratio`: wanted; for `kvtc` one of 8, 16, 32 and 64, before entropy coding. `max_kl`: for `kvtc2`, the
    divergence allowed, nats per token. `sinks`, `window`: tokens at both ends of a sequence that stay exact,
    or for `kvtc2`'s window finer; to `lossless` they mean nothing. `bits`: of a value, before what goes with
    them. `level`: of CacheGen. `on_drift`: what becomes of blocks that are unlike what the profile was made
    from. `device`: where blocks are packed and unpacked; None: where config.toml says.
    """

    name: CodecName = "kvtc2"
    ratio: float | None = 16
    sinks: int = 4
    window: int = 128
    max_kl: float | None = None
    bits: int | None = None
    level: int | None = None
    options: tuple[str, ...] = ()
    on_drift: OnDrift = "warn"
    device: DeviceName | None = None

    def __post_init__(self) -> None:
        dial = DIALS[self.name]
        asked = {"ratio": self.ratio, "max_kl": self.max_kl, "bits": self.bits, "level": self.level}
        fault = dial.fault(self.name, asked) if dial.names else None
        why = fault[1] if fault else dial.strange(self.name, self.options)
        if why:
            raise ValueError(why)

    @property
    def dial(self) -> str:
        """What was asked for, for people."""
        asked = (
            f"{self.bits} bits" if self.bits else
            f"level {self.level}" if self.level else
            f"KL {self.max_kl:g}" if self.max_kl else
            f"{self.ratio:g}" if self.ratio and DIALS[self.name].names else ""
        )  # fmt: skip
        return " ".join(filter(None, (asked, *self.options)))


@dataclass(frozen=True, slots=True)
class HostTier:
    """The host tier of a namespace.

    `form`: blocks stay ``raw``, or are packed in place when the tier is above its high mark. `raw`: the share
    that stays raw all the same; packed copies go first below it. `high` and `low`: marks, as shares.
    """

    form: Literal["raw", "raw-then-packed"] = "raw-then-packed"
    raw: float = 0.5
    high: float = 0.95
    low: float = 0.85


@dataclass(frozen=True, slots=True)
class DiskTier:
    """`write`: copy a block to disk ``behind`` its put, or only when the host must ``evict`` it.

    `ttl`: seconds after which a block is forgotten in all tiers; None: never.
    """

    write: Literal["behind", "evict"] = "behind"
    high: float = 0.98
    low: float = 0.92
    ttl: int | None = None


@dataclass(frozen=True, slots=True)
class Remote:
    """The store that several daemons share, below the disk, where there is one.

    `write`: full blocks are copied there ``behind`` their packing, or none is. `read`: what is not here is
    looked for there.
    """

    write: Literal["behind", "none"] = "behind"
    read: bool = True


@dataclass(frozen=True, slots=True)
class Admit:
    """What is stored at all.

    `min_tokens`: nothing of a sequence of fewer tokens. `on_sight`: a block that is asked for or offered for
    the n-th time.
    """

    min_tokens: int = 0
    on_sight: int = 1


@dataclass(frozen=True, slots=True)
class Evict:
    """Who goes first.

    `leaves_first`: no block before those that continue it. `half_life`: idle seconds that halve the worth of
    a block, for ``lfu``; counts of uses fade by half in `FADING` times as long.
    """

    policy: EvictName = "lfu"
    leaves_first: bool = True
    half_life: int = 300


FADING = 3
LIFT = Pattern(f"host|gpu|{GPU.regex}", f'"host", "gpu", or {GPU.shown}')

Amount = float | int
"""A share of a capacity (a float), or bytes (an int)."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one namespace, or one tenant, may have of each tier."""

    host: Amount = 1.0
    disk: Amount = 1.0


@dataclass(frozen=True, slots=True)
class Promote:
    """Where a block goes when it is asked for, and from which time on it stays there.

    `to`: the host, or a GPU too: the one of config.toml, or one that is named, which is then the home of all
    copies on GPUs. `on_hit`: 2 lets a block that is asked for the first time leave again once it has been
    read.
    """

    to: Annotated[str, LIFT] = "host"
    on_hit: int = 1

    @property
    def lifts(self) -> bool:
        """Whether a block that is asked for is copied to a GPU."""
        return self.to != "host"

    @property
    def device(self) -> GpuName | None:
        """The GPU that is named; None: that of config.toml."""
        return None if self.to in {"host", "gpu"} else self.to


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy file."""

    name: str
    match: Match = Match()
    codec: CodecChoice = CodecChoice()
    host: HostTier = HostTier()
    disk: DiskTier = DiskTier()
    remote: Remote = Remote()
    admit: Admit = Admit()
    evict: Evict = Evict()
    share: Share = Share()
    promote: Promote = Promote()
    packer_behind: Literal["drop", "lossless"] = "drop"
    """What becomes of the coldest when newcomers need room faster than blocks are packed."""
    flush: Literal["none", "host"] = "host"
    """What a stopping daemon writes to disk first."""


_TRIAL = Policy(
    name="trial", codec=CodecChoice("lossless"), host=HostTier(form="raw"), remote=Remote(write="none"),
    flush="none",
)  # fmt: skip


def governing(policies: tuple[Policy, ...], namespace: str, identity: Identity) -> Policy:
    """Return the first policy whose `match` fits; the last one fits everything but trials."""
    if is_trial(namespace):
        return _TRIAL
    return next(policy for policy in policies if policy.match.fits(namespace, identity))

"""What `kvtcd top` shows, as values: read off what a daemon answers to any client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtcd.client import Client
from kvtcd.core.errors import ServerError
from kvtcd.core.messages import Info, NamespaceInfo

WINDOW_S = 60.0
"""Over which rates are means."""
PREFIXES = 5


@dataclass(frozen=True, slots=True)
class Answers:
    """What a daemon said at one moment; `tenants` None: the caller may not see them."""

    info: Info
    stats: Mapping[str, Any]
    history: Mapping[str, Any]
    namespaces: Sequence[NamespaceInfo]
    prefixes: Sequence[Mapping[str, Any]]
    tenants: Sequence[Mapping[str, Any]] | None

    @classmethod
    def of(cls, client: Client) -> Answers:
        """Ask a daemon.

        Raises:
            KvtcdError: it is not there, or refuses.
        """
        try:
            tenants = client.tenants()
        except ServerError as refused:
            if refused.status != 403:
                raise
            tenants = None
        return cls(
            client.info(), client.stats(), client.history(), client.namespaces(), client.prefixes(), tenants
        )


@dataclass(frozen=True, slots=True)
class Read:
    """Blocks that were read over a while, and how many of them were there."""

    seconds: float
    blocks: int
    hits: int

    @property
    def hit_ratio(self) -> float | None:
        """Share of them that were there, None if nothing was read."""
        return self.hits / self.blocks if self.blocks else None


@dataclass(frozen=True, slots=True)
class Held:
    """Copies in one tier, one namespace or of one tenant, and what was read of them since the start.

    A block that is raw and packed, or in two tiers, has two copies.
    """

    name: str
    copies: int
    bytes: int
    packed_bytes: int
    ratio: float | None
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The daemon at one moment.

    Attributes:
        recent: of the last minute.
        hour: hit ratio of each span between two samples of the last hour, the oldest first.
        tiers: by the speed of the tier.
        namespaces: the caller's, those with most bytes first.
        tenants: of all, None if the caller may not see them.
    """

    recent: Read
    hour: list[float | None]
    tiers: list[Held]
    namespaces: list[Held]
    tenants: list[Held] | None


def figures(answers: Answers) -> Figures:
    """Work out what is shown."""
    stats = answers.stats
    now = _sample(stats)
    past = [each for each in answers.history["samples"] if each["uptime_s"] < stats["uptime_s"]]
    samples = [*past, now]
    older = [each for each in past if now["uptime_s"] - each["uptime_s"] >= WINDOW_S]
    own = [_held(name, each["tiers"].values(), each) for name, each in stats["own"].items()]
    tenants = answers.tenants
    return Figures(
        recent=_read(older[-1] if older else samples[0], now),
        hour=[_read(*pair).hit_ratio for pair in pairwise(samples)],
        tiers=[_held(name, [tier], {"misses": 0, "fetched": 0}) for name, tier in stats["tiers"].items()],
        namespaces=sorted(own, key=lambda held: (-held.bytes, held.name)),
        tenants=None
        if tenants is None
        else [_held(each["tenant"], each["tiers"].values(), each) for each in tenants],
    )


def _sample(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return this moment as the history has others."""
    tiers = {
        name: {"hits": sum(form["hits"] for form in _forms([tier]))} for name, tier in stats["tiers"].items()
    }
    return {name: stats[name] for name in ("uptime_s", "misses", "fetched")} | {"tiers": tiers}


def _read(since: Mapping[str, Any], now: Mapping[str, Any]) -> Read:
    before, after = (
        each["fetched"] + sum(tier["hits"] for tier in each["tiers"].values()) for each in (since, now)
    )
    hits = after - before
    return Read(now["uptime_s"] - since["uptime_s"], hits + now["misses"] - since["misses"], hits)


def _forms(tiers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [tier[form] for tier in tiers for form in ("raw", "packed") if form in tier]


def _held(name: str, tiers: Iterable[Mapping[str, Any]], reads: Mapping[str, Any]) -> Held:
    tiers = list(tiers)
    forms, packed = _forms(tiers), [tier["packed"] for tier in tiers if "packed" in tier]
    nbytes, raw = (sum(form[what] for form in packed) for what in ("bytes", "raw_bytes"))
    hits = reads["fetched"] + sum(form["hits"] for form in forms)
    return Held(
        name, sum(form["blocks"] for form in forms), sum(form["bytes"] for form in forms), nbytes,
        raw / nbytes if nbytes else None, hits, reads["misses"],
    )  # fmt: skip

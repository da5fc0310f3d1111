"""Ranks of a tensor-parallel model: namespaces whose identities differ in the rank alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvtcd.core.errors import BadRequest
from kvtcd.core.matches import BlockMatch
from kvtcd.core.place import Tier
from kvtcd.engine.namespaces import Namespace

_RANK = re.compile(r"tp([1-9][0-9]{0,3})-rank(0|[1-9][0-9]{0,3})")
_SPEED = {tier: number for number, tier in enumerate(Tier)}


def ranks(namespace: Namespace, others: Iterable[Namespace]) -> list[Namespace] | None:
    """Return the namespaces of all ranks of a model, this one's among them; None while one is missing.

    Args:
        namespace: of one rank, ``tp<n>-rank<r>``; one that is ``canonical`` is the only rank.
        others: all namespaces of its tenant.

    Raises:
        BadRequest: `parallel` of its identity does not say which rank it is.
    """
    identity = namespace.identity
    if identity.parallel == "canonical":
        return [namespace]
    found = _RANK.fullmatch(identity.parallel)
    if found is None or int(found[2]) >= int(found[1]):
        raise BadRequest("ranks", f"parallel is {identity.parallel!r}, not for instance tp2-rank0")
    wanted = [replace(identity, parallel=f"tp{found[1]}-rank{rank}") for rank in range(int(found[1]))]
    by_identity = {other.identity: other for other in others}
    members = [by_identity[one] for one in wanted if one in by_identity]
    return members if len(members) == len(wanted) else None


def held_by_all(found: Sequence[Sequence[BlockMatch]]) -> list[BlockMatch]:
    """Return what all ranks have, named as the first one does; the tier is the slowest."""
    if len(found) == 1:
        return list(found[0])
    blocks: list[BlockMatch] = []
    for same in zip(*found, strict=False):
        tiers = [block.tier for block in same if block.tier is not None]
        if len(tiers) == len(same) and len({block.tokens for block in same}) == 1:
            blocks.append(same[0]._replace(tier=max(tiers, key=_SPEED.__getitem__)))
        else:
            blocks.append(BlockMatch(same[0].key, 0, None))
    return blocks

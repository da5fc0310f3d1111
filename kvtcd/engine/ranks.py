"""Ranks of a model that is split: namespaces whose identities differ in the rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvtcd.core.errors import BadRequest
from kvtcd.core.identity import Identity
from kvtcd.core.matches import BlockMatch
from kvtcd.core.place import Tier
from kvtcd.core.split import all_ranks, splits
from kvtcd.engine.namespaces import Namespace

_SPEED = {tier: number for number, tier in enumerate(Tier)}


def ranks(namespace: Namespace, others: Iterable[Namespace]) -> list[Namespace] | None:
    """Return the namespaces of all ranks of a model, this one first; None while one is missing.

    Args:
        namespace: of one rank (`core.split`); one that is ``canonical`` is the only rank.
        others: all namespaces of its tenant.

    Raises:
        BadRequest: `parallel` of its identity does not say which rank it is, or there are two namespaces of
            another rank, as there are once layers have been dealt out to pipeline stages in another way.
    """
    identity = namespace.identity
    try:
        missing = {name: list[Namespace]() for name in all_ranks(identity.parallel)}
    except ValueError as error:
        raise BadRequest("ranks", f"parallel: {error}") from None
    del missing[identity.parallel]
    model = _model(identity)
    for other in others:
        if other.identity.parallel in missing and _model(other.identity) == model:
            missing[other.identity.parallel].append(other)
    for parallel, found in missing.items():
        if len(found) > 1:
            names = " and ".join(other.name for other in found)
            raise BadRequest("ranks", f"{names} are both {parallel} of this model; purge what is not in use")
    members = [found[0] for found in missing.values() if found]
    return [namespace, *members] if len(members) == len(missing) else None


def _model(identity: Identity) -> Identity:
    """Return what the identities of all ranks have in common; pipeline stages may differ in layers."""
    staged = any(split.kind == "pp" for split in splits(identity.parallel))
    layout = replace(identity.layout, layers=1) if staged else identity.layout
    return replace(identity, parallel="canonical", layout=layout)


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

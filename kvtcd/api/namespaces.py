"""Routes of namespaces: register, describe, purge, match, and what was matched most."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from aiohttp import web

from kvtcd.api.bodies import json_response, media_type, read_bytes, read_json
from kvtcd.api.parameters import (
    BLOCKS,
    DEADLINE,
    IN_NAMESPACE,
    NS,
    OF_TENANT,
    Deadline,
    Target,
    name_of,
    refuse_if_stopping,
)
from kvtcd.api.route import JSON, TOKENS, Parameter, reply, route
from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.access import Scope
from kvtcd.core.errors import Busy, DeadlineExceeded, IdentityConflict, UnknownNamespace
from kvtcd.core.forms import Range, choice, number
from kvtcd.core.identity import Identity
from kvtcd.core.keys import tokens_from_bytes
from kvtcd.core.matches import Matches
from kvtcd.core.messages import MAX_LEASE_S, Keys, NamespaceInfo, Namespaces, Removed
from kvtcd.core.popularity import Prefixes
from kvtcd.engine.namespaces import Namespace

SHOWN = 20
"""Prefixes of an answer."""
RANKS = Parameter(
    "ranks", "query", choice({"one": False, "all": True}),
    "`all` counts only what every rank of a model that is split has, in the slowest tier of them.",
)  # fmt: skip
LEASE = Parameter(
    "lease", "query", number(Range(0.001, MAX_LEASE_S)), "Seconds to keep the prefix that is found."
)  # fmt: skip


def _info(namespace: Namespace) -> NamespaceInfo:
    codec = namespace.codec
    return NamespaceInfo(
        namespace.name,
        namespace.digest,
        codec.name,
        codec.reason,
        codec.profile,
        codec.expected_kl,
        namespace.identity,
        codec.drift,
    )


@route("GET", "/v1/namespaces", replies={200: reply("All of them.", Namespaces)})
async def listing(request: web.Request) -> web.Response:
    """List the caller's namespaces."""
    namespaces = request.app[SERVICE].namespaces(request[TENANT])
    return json_response(Namespaces(tuple(map(_info, namespaces))))


@route(
    "PUT", "/v1/namespaces/{ns}", NS, DEADLINE, body=Identity,
    replies={200: reply("It is registered.", NamespaceInfo)}, raises=(IdentityConflict, DeadlineExceeded),
)  # fmt: skip
async def register(request: web.Request) -> web.Response:
    """Register a namespace; once more with the same identity changes nothing."""
    refuse_if_stopping(request)
    identity = await read_json(request, Identity)
    async with Deadline.of(request).bound("the registration"):
        namespace = await request.app[SERVICE].register(request[TENANT], name_of(request), identity)
    return json_response(_info(namespace))


@route(
    "GET", "/v1/namespaces/{ns}", NS,
    replies={200: reply("It is registered.", NamespaceInfo)}, raises=(UnknownNamespace,),
)  # fmt: skip
async def describe(request: web.Request) -> web.Response:
    """Describe a namespace."""
    return json_response(_info(request.app[SERVICE].namespace(request[TENANT], name_of(request))))


@route(
    "DELETE", "/v1/namespaces/{ns}", NS, DEADLINE,
    replies={200: reply("Nothing of it is left.", Removed)}, raises=(UnknownNamespace, DeadlineExceeded),
)  # fmt: skip
async def purge(request: web.Request) -> web.Response:
    """Remove a namespace and its blocks, durably before the answer; past the deadline it goes on."""
    async with Deadline.of(request).bound("the purge", goes_on=True):
        removed = await request.app[SERVICE].purge(request[TENANT], name_of(request))
    return json_response(removed)


@route(
    "DELETE", "/v1/tenants/{tenant}/namespaces/{ns}", OF_TENANT, NS, DEADLINE, scope=Scope.ADMIN,
    replies={200: reply("Nothing of it is left.", Removed)}, raises=(UnknownNamespace, DeadlineExceeded),
)  # fmt: skip
async def purge_of(request: web.Request) -> web.Response:
    """Remove a namespace of any tenant, as the tenant himself would."""
    tenant = OF_TENANT.of(request)
    assert tenant is not None, "it is in the path"
    async with Deadline.of(request).bound("the purge", goes_on=True):
        removed = await request.app[SERVICE].purge(tenant, name_of(request))
    return json_response(removed)


@route(
    "POST", "/v1/namespaces/{ns}/match", *BLOCKS, RANKS, LEASE, body=(Keys, TOKENS),
    replies={200: reply("What is there.", Matches)}, raises=(UnknownNamespace, DeadlineExceeded),
)  # fmt: skip
async def match(request: web.Request) -> web.Response:
    """Say how much of a prefix is here; with tokens, the longest one under our own key chain.

    A lease keeps what of it lies in tiers of this daemon; the answer has none where that is nothing or no
    more may be held. What only a shared store has is found while that answers within a moment.
    """
    target, service = Target.of(request), request.app[SERVICE]
    all_ranks, seconds = RANKS.of(request) or False, LEASE.of(request)
    async with Deadline(target.deadline).bound("the match"):
        tokens: Sequence[int] | None = None
        if media_type(request) == JSON:
            keys = (await read_json(request, Keys)).keys
            await service.prefixes.look(target.namespace, target.salt, keys=keys, all_ranks=all_ranks)
            found = service.prefixes.match(target.namespace, keys, target.salt, all_ranks=all_ranks)
        else:
            body = await read_bytes(request, "token ids", request.app[LIMITS].token_bytes)
            tokens = tokens_from_bytes(body)
            await service.prefixes.look(target.namespace, target.salt, tokens=tokens, all_ranks=all_ranks)
            found = service.prefixes.match_tokens(target.namespace, tokens, target.salt, all_ranks=all_ranks)
        if seconds is not None and found.here:  # in the same turn of the loop: what was found is still there
            record_keys = service.prefixes.prefix_keys(
                target.namespace, Matches.of(found.here), target.salt, tokens, all_ranks=all_ranks
            )
            with suppress(Busy):  # no lease is no reason to tell nothing
                lease = await service.leases.take(target.tenant, record_keys, seconds, target.deadline)
                found = replace(found, lease=lease)
    return json_response(found)


@route(
    "GET", "/v1/prefixes", IN_NAMESPACE,
    replies={200: reply("The most often matched, first.", Prefixes)}, raises=(UnknownNamespace,),
)  # fmt: skip
async def prefixes(request: web.Request) -> web.Response:
    """Show which prefixes the caller's matches found most often, by their first block."""
    service, tenant = request.app[SERVICE], request[TENANT]
    name = IN_NAMESPACE.of(request)
    asked = service.namespaces(tenant) if name is None else [service.namespace(tenant, name)]
    found = [(each, ns.name) for ns in asked for each in service.prefixes.most_matched(ns, SHOWN)]
    found.sort(key=lambda row: -row[0].matches)
    return json_response(Prefixes(tuple(each.info(ns) for each, ns in found[:SHOWN])))

"""Routes of namespaces: register, describe, purge, match, and what was matched most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from aiohttp import web

from kvtcd.api.bodies import JSON, OCTETS, json_response, read_bytes, read_json, require_type
from kvtcd.api.parameters import Deadline, Target, only, refuse_if_stopping
from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.errors import BadRequest, Busy
from kvtcd.core.identity import Identity
from kvtcd.core.keys import tokens_from_bytes
from kvtcd.core.messages import NamespaceInfo, keys_from_json
from kvtcd.engine.namespaces import Namespace

SHOWN = 20
"""Prefixes of an answer."""
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")


def _info(namespace: Namespace) -> dict[str, object]:
    codec = namespace.codec
    return NamespaceInfo(
        namespace.name,
        namespace.digest,
        codec.name,
        codec.reason,
        codec.profile,
        codec.expected_kl,
        namespace.identity,
    ).to_json()


async def listing(request: web.Request) -> web.Response:
    """``GET /v1/namespaces``: the caller's own."""
    namespaces = request.app[SERVICE].namespaces(request[TENANT])
    return json_response({"namespaces": [_info(namespace) for namespace in namespaces]})


async def register(request: web.Request) -> web.Response:
    """``PUT /v1/namespaces/{ns}``: once more with the same identity changes nothing."""
    refuse_if_stopping(request)
    identity = Identity.from_json(await read_json(request))
    async with Deadline.of(request).bound("the registration"):
        namespace = await request.app[SERVICE].register(request[TENANT], request.match_info["ns"], identity)
    return json_response(_info(namespace))


async def describe(request: web.Request) -> web.Response:
    """``GET /v1/namespaces/{ns}``."""
    return json_response(_info(request.app[SERVICE].namespace(request[TENANT], request.match_info["ns"])))


async def purge(request: web.Request) -> web.Response:
    """``DELETE /v1/namespaces/{ns}``: durable before the answer; past the deadline it goes on."""
    async with Deadline.of(request).bound("the purge", goes_on=True):
        removed = await request.app[SERVICE].purge(request[TENANT], request.match_info["ns"])
    return json_response({"removed": removed})


async def match(request: web.Request) -> web.Response:
    """``POST /v1/namespaces/{ns}/match``: how much of a prefix is here; `lease` seconds keep it so."""
    target, service = Target.of(request), request.app[SERVICE]
    query = only(request, "ranks", "lease")
    ranks = query.get("ranks", "one")
    if ranks not in {"one", "all"}:
        raise BadRequest("ranks", "is neither one nor all")
    seconds = _seconds(query["lease"], request.app[LIMITS].lease_s) if "lease" in query else None
    async with Deadline(target.deadline).bound("the match"):
        tokens: Sequence[int] | None = None
        if require_type(request, JSON, OCTETS) == JSON:
            keys = keys_from_json(await read_json(request))
            found = service.prefixes.match(target.namespace, keys, target.salt, all_ranks=ranks == "all")
        else:
            body = await read_bytes(request, "token ids", request.app[LIMITS].token_bytes)
            tokens = tokens_from_bytes(body)
            found = service.prefixes.match_tokens(
                target.namespace, tokens, target.salt, all_ranks=ranks == "all"
            )
        if (
            seconds is not None and found.prefix
        ):  # in the same turn of the loop: what was found is still there
            record_keys = service.prefixes.prefix_keys(
                target.namespace, found, target.salt, tokens, all_ranks=ranks == "all"
            )
            with suppress(Busy):  # no lease is no reason to tell nothing
                lease = await service.leases.take(target.tenant, record_keys, seconds, target.deadline)
                found = replace(found, lease=lease)
    return json_response(found.to_json())


async def prefixes(request: web.Request) -> web.Response:
    """``GET /v1/prefixes``: of the caller's matches those that found something, by what they begin with."""
    service, tenant = request.app[SERVICE], request[TENANT]
    name = only(request, "namespace").get("namespace")
    asked = service.namespaces(tenant) if name is None else [service.namespace(tenant, name)]
    found = [(each, ns.name) for ns in asked for each in service.prefixes.most_matched(ns, SHOWN)]
    found.sort(key=lambda row: -row[0].matches)
    return json_response({"prefixes": [{"namespace": ns} | each.to_json() for each, ns in found[:SHOWN]]})


def _seconds(text: str, longest: float) -> float:
    if not _NUMBER.fullmatch(text) or not 0 < float(text) <= longest:
        raise BadRequest("lease", f"is not a number of seconds up to {longest:g}")
    return float(text)

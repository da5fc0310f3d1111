"""Every request of the API. `sync.Client` and `aio.AsyncClient` carry them out, and have no other parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from kvtcd.client.arguments import (
    block_head,
    engine_key,
    engine_keys,
    issued_id,
    namespace_name,
    seconds,
    whole_identity,
)
from kvtcd.client.call import Buffer, Call, Options, flat
from kvtcd.core import wire
from kvtcd.core.fields import Fields
from kvtcd.core.identity import Identity
from kvtcd.core.keys import token_array, tokens_to_bytes
from kvtcd.core.matches import LeaseInfo, Matches
from kvtcd.core.messages import (
    BlockHead,
    BlockResult,
    Everything,
    Info,
    Keys,
    NamespaceInfo,
    Namespaces,
    Removed,
    Results,
)
from kvtcd.core.notices import HEARTBEAT_S, LAST_ID_HEADER
from kvtcd.core.operation import Operation
from kvtcd.core.place import Tier
from kvtcd.core.regions import AllLanded, Landed, Placed, RegionGet, RegionPut

T = TypeVar("T")
OCTETS, JSON = "application/octet-stream", "application/json"
MAX_FRAME = 1 << 40
"""Bytes of one block that a daemon may send: a bound on what is allocated for a claim."""


def info() -> Call[Info]:
    """Ask for versions and boot id."""
    return Call("GET", "/v1", Info.from_json)


def ready() -> Call[bool]:
    """Ask whether blocks are served and taken."""
    return Call("GET", "/readyz", lambda _: True)


def stats() -> Call[dict[str, Any]]:
    """Ask for the state of the daemon."""
    return Call("GET", "/v1/stats", lambda body: body)


def history() -> Call[dict[str, Any]]:
    """Ask for the sums of the last hour."""
    return Call("GET", "/v1/history", lambda body: body)


def tenants() -> Call[list[dict[str, Any]]]:
    """Ask for what each tenant has."""
    return Call("GET", "/v1/tenants", lambda body: _rows(body, "tenants"))


def prefixes(namespace: str | None) -> Call[list[dict[str, Any]]]:
    """Ask for the prefixes that were matched most."""
    path = "/v1/prefixes" if namespace is None else f"/v1/prefixes?namespace={namespace_name(namespace)}"
    return Call("GET", path, lambda body: _rows(body, "prefixes"))


def policies() -> Call[list[dict[str, Any]]]:
    """Ask for the policies in effect."""
    return Call("GET", "/v1/policies", lambda body: _rows(body, "policies"))


def reload_policies(options: Options) -> Call[list[dict[str, Any]]]:
    """Have the policy files read anew."""
    return Call(
        "POST", "/v1/policies:reload", lambda body: _rows(body, "policies"),
        (), options.headers(), options.deadline,
    )  # fmt: skip


def _rows(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in Fields(body, "answer").items(name) if isinstance(row, dict)]


def events(namespace: str | None, after: str | None) -> Call[None]:
    """Listen; the answer is a stream of notices."""
    path = "/v1/events" if namespace is None else f"/v1/events?namespace={namespace_name(namespace)}"
    headers = {} if after is None else {LAST_ID_HEADER: after}
    return Call("GET", path, _nothing, (), headers, HEARTBEAT_S)  # of silence, at most


def register(name: str, identity: Identity, options: Options) -> Call[NamespaceInfo]:
    """Register a namespace."""
    return _json(
        "PUT", _namespace(name), whole_identity(identity).to_json(), NamespaceInfo.from_json, options
    )


def namespace(name: str) -> Call[NamespaceInfo]:
    """Describe a namespace."""
    return Call("GET", _namespace(name), NamespaceInfo.from_json)


def namespaces() -> Call[tuple[NamespaceInfo, ...]]:
    """List the caller's namespaces."""
    return Call("GET", "/v1/namespaces", lambda body: Namespaces.from_json(body).namespaces)


def purge(name: str, tenant: str | None, options: Options) -> Call[Removed]:
    """Remove a namespace and its blocks; of another tenant, for callers who have the scope `admin`."""
    path = _namespace(name)
    if tenant is not None:
        path = f"/v1/tenants/{quote(tenant, safe=':')}{path.removeprefix('/v1')}"
    return Call("DELETE", path, Removed.from_json, (), options.headers(), options.deadline)


def match(
    name: str, keys: Iterable[bytes], options: Options, *, all_ranks: bool, lease: float | None
) -> Call[Matches]:
    """Ask which of these blocks are there."""
    path = _match(name, all_ranks=all_ranks, lease=lease)
    return _json("POST", path, _keys(keys), Matches.from_json, options)


def match_tokens(
    name: str, tokens: Sequence[int], options: Options, *, all_ranks: bool, lease: float | None
) -> Call[Matches]:
    """Ask for the longest stored prefix of a token sequence."""
    ids = tokens_to_bytes(token_array(tokens))
    headers = options.headers() | {"Content-Type": OCTETS}
    return Call(
        "POST", _match(name, all_ranks=all_ranks, lease=lease), Matches.from_json,
        (memoryview(ids),), headers, options.deadline,
    )  # fmt: skip


def _match(name: str, *, all_ranks: bool, lease: float | None) -> str:
    query = {"ranks": "all"} if all_ranks else {}
    if lease is not None:
        query["lease"] = f"{seconds('lease', lease):.3f}"
    return f"{_namespace(name)}/match" + (f"?{urlencode(query)}" if query else "")


def pin(name: str, keys: Iterable[bytes], lease: float, options: Options) -> Call[LeaseInfo]:
    """Take a lease."""
    body = _keys(keys) | {"seconds": seconds("seconds", lease)}
    call = _json("POST", f"{_namespace(name)}/pin", body, LeaseInfo.from_json, options)
    return replace(call, repeatable=False)


def give_back(lease_id: str) -> Call[None]:
    """End a lease."""
    return Call("DELETE", f"/v1/leases/{issued_id('lease', lease_id)}", _nothing)


def put(
    name: str, block: BlockHead, data: Buffer | Placed, options: Options, *, durable: bool
) -> Call[BlockResult]:
    """Store one block, whose bytes are given, or lie in a region."""
    query, body = block_head(block).to_query(), memoryview(b"")
    if isinstance(data, Placed):
        query |= data.to_query()
    else:
        body = flat(data)
    return Call(
        "PUT", f"{_block(name, block.key)}?{urlencode(query)}", BlockResult.from_json, (body,),
        _put_headers(OCTETS, options, durable=durable), options.deadline,
    )  # fmt: skip


def put_group(
    name: str, blocks: Sequence[tuple[BlockHead, Buffer]], options: Options, *, durable: bool
) -> Call[tuple[BlockResult, ...]]:
    """Store the blocks of one group."""
    body: list[Buffer] = []
    for block, data in blocks:
        view = flat(data)
        body += (wire.head(block_head(block).to_json(), view.nbytes), view)
    return Call(
        "POST", f"{_namespace(name)}/blocks:put", _results, tuple(body),
        _put_headers(wire.MEDIA_TYPE, options, durable=durable), options.deadline,
    )  # fmt: skip


def put_many_placed(
    name: str, asked: RegionPut, options: Options, *, durable: bool
) -> Call[tuple[BlockResult, ...]]:
    """Store blocks that lie in a region."""
    headers = _put_headers(JSON, options, durable=durable)
    body = (json.dumps(asked.to_json()).encode(),)
    return Call("POST", f"{_namespace(name)}/blocks:put", _results, body, headers, options.deadline)


def get(name: str, key: bytes, options: Options) -> Call[None]:
    """Read one block; the answer is its bytes."""
    return Call("GET", _block(name, key), _nothing, (), options.headers(), options.deadline)


def get_placed(name: str, key: bytes, placed: Placed, options: Options) -> Call[Landed]:
    """Read one block into a region."""
    path = f"{_block(name, key)}?{urlencode(placed.to_query())}"
    return Call("GET", path, Landed.from_json, (), options.headers(), options.deadline)


def get_many(name: str, keys: Iterable[bytes], options: Options) -> Call[None]:
    """Read blocks; the answer is a run of frames."""
    return _json("POST", f"{_namespace(name)}/blocks:get", _keys(keys), _nothing, options)


def get_many_placed(name: str, asked: RegionGet, options: Options) -> Call[tuple[Landed, ...]]:
    """Read blocks into a region."""
    return _json(
        "POST",
        f"{_namespace(name)}/blocks:get",
        asked.to_json(),
        lambda body: AllLanded.from_json(body).blocks,
        options,
    )


def delete(name: str, key: bytes, options: Options) -> Call[None]:
    """Remove one block."""
    return Call("DELETE", _block(name, key), _nothing, (), options.headers(), options.deadline)


def flush(name: str, keys: Iterable[bytes] | None, options: Options) -> Call[tuple[BlockResult, ...]]:
    """Make blocks durable."""
    body = Everything().to_json() if keys is None else _keys(keys)
    return _json("POST", f"{_namespace(name)}/blocks:flush", body, _results, options)


def demote(name: str, keys: Iterable[bytes], options: Options) -> Call[Operation]:
    """Begin to move blocks to disk."""
    return _operation(f"{_namespace(name)}/demote", keys, options)


def prefetch(name: str, keys: Iterable[bytes], options: Options, *, to: Tier) -> Call[Operation]:
    """Begin to bring blocks up to a tier of memory."""
    return _operation(f"{_namespace(name)}/prefetch?to={to}", keys, options)


def _operation(path: str, keys: Iterable[bytes], options: Options) -> Call[Operation]:
    return replace(_json("POST", path, _keys(keys), Operation.from_json, options), repeatable=False)


def operation(operation_id: str) -> Call[Operation]:
    """Look at an operation."""
    return Call("GET", f"/v1/operations/{issued_id('operation', operation_id)}", Operation.from_json)


def cancel(operation_id: str) -> Call[Operation]:
    """End an operation."""
    return Call("DELETE", f"/v1/operations/{issued_id('operation', operation_id)}", Operation.from_json)


def _namespace(name: str) -> str:
    return f"/v1/namespaces/{namespace_name(name)}"


def _block(name: str, key: bytes) -> str:
    return f"{_namespace(name)}/blocks/{engine_key(key).hex()}"


def _keys(keys: Iterable[bytes]) -> dict[str, object]:
    return Keys(tuple(engine_keys(keys))).to_json()


def _results(body: dict[str, Any]) -> tuple[BlockResult, ...]:
    return Results.from_json(body).results


def _json(
    method: str,
    path: str,
    body: Mapping[str, object],
    read: Callable[[dict[str, Any]], T],
    options: Options,
) -> Call[T]:
    headers = options.headers() | {"Content-Type": JSON}
    return Call(method, path, read, (json.dumps(body).encode(),), headers, options.deadline)


def _put_headers(content_type: str, options: Options, *, durable: bool) -> dict[str, str]:
    headers = options.headers() | {"Content-Type": content_type}
    return headers | {"Prefer": "durable"} if durable else headers


def _nothing(_body: dict[str, Any]) -> None:
    """Read an answer that says all by its status."""

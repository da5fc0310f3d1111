"""Namespaces over HTTP: register, describe, purge, match; names belong to one tenant."""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace

import pytest
from support.http import NS, TENANT_HEADER, running, unhurried
from support.toy import BLOCK_TOKENS, IDENTITY, block

from kvtcd.core import wire
from kvtcd.core.keys import chain
from kvtcd.core.messages import BlockHead, NamespaceInfo

pytestmark = pytest.mark.asyncio
OTHER = {TENANT_HEADER: "uid:2"}
CHANGED = replace(IDENTITY, weights="cd" * 32)


async def test_registering_is_idempotent_and_describes_itself():
    async with running() as daemon:
        for method in ("PUT", "PUT", "GET"):
            body = IDENTITY.to_json() if method == "PUT" else None
            async with daemon.request(method, NS, json=body) as answer:
                assert answer.status == 200
                info = NamespaceInfo.from_json(await answer.json())
                assert info == NamespaceInfo("demo", IDENTITY.digest, "toy", None, None, None, IDENTITY)
        assert len(daemon.toy.service.namespaces("uid:1")) == 1


async def test_another_identity_under_the_same_name_is_a_conflict_that_names_the_field():
    async with running() as daemon:
        await daemon.register()
        async with daemon.request("PUT", NS, json=CHANGED.to_json()) as answer:
            assert answer.status == 409
            problem = await answer.json()
            assert (problem["name"], problem["differs"]) == ("demo", ["weights"])
        assert daemon.toy.service.namespace("uid:1", "demo").identity == IDENTITY


async def test_a_name_belongs_to_one_tenant_and_is_not_seen_by_others():
    async with running() as daemon:
        await daemon.register()
        async with daemon.request("GET", NS, headers=OTHER) as answer:
            assert answer.status == 404
        async with daemon.request("DELETE", NS, headers=OTHER) as answer:
            assert answer.status == 404
        async with daemon.request("PUT", NS, json=CHANGED.to_json(), headers=OTHER) as answer:
            assert answer.status == 200
        for headers, identity in (({}, IDENTITY), (OTHER, CHANGED)):
            async with daemon.request("GET", "/v1/namespaces", headers=headers) as answer:
                (listed,) = (await answer.json())["namespaces"]
                assert NamespaceInfo.from_json(listed).identity == identity


async def test_purge_removes_the_callers_own_blocks_and_the_name():
    async with running() as daemon:
        body = wire.head(BlockHead(b"k", BLOCK_TOKENS, 0).to_json(), len(block(1))) + block(1)
        for headers in ({}, OTHER):
            await daemon.register(**headers)
            async with daemon.request(
                "POST", f"{NS}/blocks:put", data=body, headers=headers | {"Content-Type": wire.MEDIA_TYPE}
            ) as answer:
                assert answer.status == 200
        async with daemon.request("DELETE", NS) as answer:
            assert (answer.status, await answer.json()) == (200, {"removed": 1, "set_aside": False})
        async with daemon.request("GET", NS) as answer:
            assert answer.status == 404
            assert (await answer.json())["type"] == "urn:kvtcd:error:unknown-namespace"
        async with daemon.request("GET", f"{NS}/blocks/{b'k'.hex()}", headers=OTHER) as answer:
            assert await answer.read() == block(1)
        assert daemon.blocks() == 1


@pytest.mark.parametrize(
    "name", ["Demo", "a b", ".demo", "-demo", "a" * 65, "a%2fb", "..%2f..%2fetc", "é", "a:b"]
)
async def test_names_that_are_none_are_not_found(name):
    async with running() as daemon:
        async with daemon.request("PUT", f"/v1/namespaces/{name}", json=IDENTITY.to_json()) as answer:
            assert answer.status == 404
        assert daemon.toy.service.namespaces("uid:1") == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": "xyz"}, "weights"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"tenant": "uid:0"}, "tenant"),
        ({"rope": {"kind": "dynamic", "theta": "1.0", "rotary_dim": 2}}, "rope.kind"),
    ],
)
async def test_a_bad_identity_is_refused_by_field(change, field):
    async with running() as daemon:
        async with daemon.request("PUT", NS, json=IDENTITY.to_json() | change) as answer:
            assert answer.status == 400
            assert (await answer.json())["field"] == field
        assert daemon.toy.service.namespaces("uid:1") == []


def little_endian(tokens: list[int]) -> bytes:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


async def test_match_by_keys_and_by_tokens_finds_the_stored_prefix():
    tokens = list(range(100, 100 + 3 * BLOCK_TOKENS + 5))
    async with running() as daemon:
        await daemon.register()
        links = list(chain(IDENTITY.digest, tokens, BLOCK_TOKENS))
        body = b""
        for link in (links[0], links[1], links[3]):
            head = BlockHead(link.key, link.tokens, link.first, link.parent)
            data = block(link.first, link.tokens)
            body += wire.head(head.to_json(), len(data)) + data
        headers = {"Content-Type": wire.MEDIA_TYPE}
        async with daemon.request("POST", f"{NS}/blocks:put", data=body, headers=headers) as answer:
            assert answer.status == 200

        async with daemon.request(
            "POST", f"{NS}/match", json={"keys": [ln.key.hex() for ln in links]}
        ) as answer:
            found = await answer.json()
        assert (found["prefix_blocks"], found["prefix_tokens"]) == (2, 2 * BLOCK_TOKENS)
        assert found["bitmap"] == "1101"
        assert found["tiers"] == ["host", "host", None, "host"]

        headers = {"Content-Type": "application/octet-stream"}
        for wanted in (tokens, tokens[: 2 * BLOCK_TOKENS]):
            async with daemon.request(
                "POST", f"{NS}/match", data=little_endian(wanted), headers=headers
            ) as answer:
                found = await answer.json()
            assert found["keys"] == [links[0].key.hex(), links[1].key.hex()]
            assert found["prefix_tokens"] == 2 * BLOCK_TOKENS
        async with daemon.request(
            "POST", f"{NS}/match", data=little_endian([1] * 40), headers=headers
        ) as answer:
            assert (await answer.json())["keys"] == []


@pytest.mark.parametrize("nbytes", [1, 2, 3, 5])
async def test_half_a_token_is_a_bad_request(nbytes):
    async with running() as daemon:
        await daemon.register()
        headers = {"Content-Type": "application/octet-stream"}
        async with daemon.request("POST", f"{NS}/match", data=bytes(nbytes), headers=headers) as answer:
            assert answer.status == 400


async def test_bodies_over_their_limits_are_refused():
    async with running(unhurried(json_bytes=2000, token_bytes=16)) as daemon:
        await daemon.register()
        headers = {"Content-Type": "application/octet-stream"}
        async with daemon.request("POST", f"{NS}/match", data=bytes(20), headers=headers) as answer:
            assert answer.status == 413
        async with daemon.request("POST", f"{NS}/match", json={"keys": ["ab" * 32] * 50}) as answer:
            assert answer.status == 413

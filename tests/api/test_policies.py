"""Policies: shown to each tenant with what is his, and read anew without losing a block."""

from __future__ import annotations

import pytest
from support.http import NS, TENANT_HEADER, running
from support.toy import BLOCK_TOKENS, IDENTITY, ToyCodec, block

from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import Admit, CodecChoice, DiskTier, Match, Policy

pytestmark = pytest.mark.asyncio
ROOT = {TENANT_HEADER: "uid:0"}


def shown(body) -> list[tuple[str, list[str]]]:
    return [(policy["name"], policy["namespaces"]) for policy in body["policies"]]


async def put(daemon, number: int, **headers: str) -> str:
    path = f"{NS}/blocks/{bytes([number] * 32).hex()}?tokens={BLOCK_TOKENS}&first_token=0"
    kind = {"Content-Type": "application/octet-stream"}
    async with daemon.request("PUT", path, data=block(number), headers=kind | headers) as answer:
        return (await answer.json())["outcome"]


async def get(daemon, number: int, **headers: str) -> bytes:
    path = f"{NS}/blocks/{bytes([number] * 32).hex()}"
    async with daemon.request("GET", path, headers=headers) as answer:
        assert answer.status == 200
        return await answer.read()


async def test_each_tenant_sees_the_policies_with_his_own_namespaces():
    policies = (
        Policy("demos", Match(namespace="demo*"), codec=CodecChoice("lossless")),
        Policy("rest", admit=Admit(on_sight=2)),
    )
    async with running(load=lambda: policies) as daemon:
        await daemon.register(**ROOT)
        other = IDENTITY.to_json() | {"weights": "cd" * 32}
        async with daemon.request("PUT", "/v1/namespaces/other", json=other, headers=ROOT) as answer:
            assert answer.status == 200
        async with daemon.request("GET", "/v1/policies", headers=ROOT) as answer:
            assert shown(await answer.json()) == [("toy", ["demo", "other"])]
        async with daemon.request("POST", "/v1/policies:reload", headers=ROOT) as answer:
            body = await answer.json()
        assert shown(body) == [("demos", ["demo"]), ("rest", ["other"])]
        assert body["policies"][0]["match"]["namespace"] == "demo*"
        assert body["policies"][1]["admit"] == {"min_tokens": 0, "on_sight": 2}
        async with daemon.request("GET", "/v1/policies") as answer:
            assert shown(await answer.json()) == [("demos", []), ("rest", [])]
        await daemon.register()
        async with daemon.request("GET", "/v1/policies") as answer:
            assert shown(await answer.json()) == [("demos", ["demo"]), ("rest", [])], "for new ones too"


async def test_ranks_of_a_model_may_have_policies_of_their_own():
    policies = (*(Policy(f"rank{n}", Match(parallel=f"tp2-rank{n}")) for n in range(2)), Policy("rest"))
    async with running(load=lambda: policies) as daemon:
        for name, part in (("whole", "canonical"), ("left", "tp2-rank0"), ("right", "tp2-rank1")):
            identity = IDENTITY.to_json() | {"parallel": part}
            async with daemon.request("PUT", f"/v1/namespaces/{name}", json=identity, headers=ROOT) as answer:
                assert answer.status == 200
        async with daemon.request("POST", "/v1/policies:reload", headers=ROOT) as answer:
            body = await answer.json()
    assert shown(body) == [("rank0", ["left"]), ("rank1", ["right"]), ("rest", ["whole"])]
    assert body["policies"][1]["match"]["parallel"] == "tp2-rank1"


async def test_a_reload_loses_nothing_and_holds_for_blocks_packed_from_then_on():
    before = Policy("before", disk=DiskTier(write="evict"))
    after = Policy("after", codec=CodecChoice("kvtc", 32), admit=Admit(on_sight=2))
    async with running(policy=before, load=lambda: (after,)) as daemon:
        await daemon.register(**ROOT)
        for number in (1, 2):
            assert await put(daemon, number, **ROOT) == "stored"
        keys = [bytes([number] * 32).hex() for number in (1, 2)]
        async with daemon.request("POST", f"{NS}/blocks:flush", json={"keys": keys[:1]}, headers=ROOT):
            pass
        async with daemon.request("POST", "/v1/policies:reload", headers=ROOT) as answer:
            assert answer.status == 200
        async with daemon.request("POST", f"{NS}/blocks:flush", json={}, headers=ROOT):
            pass
        first, second = daemon.toy.codecs
        assert (block(1) in first.afters, block(2) in first.afters) == (True, False)
        assert (block(1) in second.afters, block(2) in second.afters) == (False, True)
        assert await put(daemon, 3, **ROOT) == "dropped", "two sights are needed now"
        async with daemon.request("POST", f"{NS}/demote", json={"keys": keys}, headers=ROOT):
            pass
        assert [await get(daemon, number, **ROOT) for number in (1, 2)] == [block(1), block(2)]


async def test_the_same_codec_stays_in_use_and_another_profile_counts_from_a_reload_on():
    profile = ["11" * 32]

    def codec(identity, choice) -> ToyCodec:
        made.append(ToyCodec(identity, name=choice.name, profile=profile[0]))
        return made[-1]

    made: list[ToyCodec] = []
    policy = Policy("same", codec=CodecChoice("kvtc", 16))
    async with running(policy=policy, load=lambda: (policy,), codec=codec) as daemon:
        await daemon.register(**ROOT)
        (namespace,) = daemon.toy.service._registry.all()
        first = namespace.codec
        async with daemon.request("POST", "/v1/policies:reload", headers=ROOT):
            pass
        assert namespace.codec is first
        profile[0] = "22" * 32
        async with daemon.request("POST", "/v1/policies:reload", headers=ROOT):
            pass
        assert namespace.codec is made[-1]
        assert namespace.codec.profile == "22" * 32


async def test_a_wrong_file_changes_nothing_and_is_named_to_the_field():
    def wrong() -> tuple[Policy, ...]:
        raise ConfigError("/etc/kvtcd/a.toml", "codec.ratio", "is not one of 8, 16, 32, 64")

    async with running(load=wrong) as daemon:
        async with daemon.request("POST", "/v1/policies:reload", headers=ROOT) as answer:
            problem = await answer.json()
            assert (answer.status, answer.content_type) == (422, "application/problem+json")
        assert (problem["path"], problem["field"]) == ("/etc/kvtcd/a.toml", "codec.ratio")
        assert problem["why"] == "is not one of 8, 16, 32, 64"
        async with daemon.request("GET", "/v1/policies") as answer:
            assert shown(await answer.json()) == [("toy", [])]


async def test_only_those_with_the_scope_may_reload():
    async with running(load=lambda: (Policy("next"),)) as daemon:
        for tenant, status in (("uid:1", 403), ("uid:0", 200)):
            headers = {TENANT_HEADER: tenant}
            async with daemon.request("POST", "/v1/policies:reload", headers=headers) as answer:
                assert answer.status == status


async def test_a_time_to_live_that_comes_with_a_reload_is_kept():
    policies = (Policy("short", disk=DiskTier(ttl=60)),)
    async with running(load=lambda: policies) as daemon:
        service = daemon.toy.service
        assert service._ticking is None
        async with daemon.request("POST", "/v1/policies:reload", headers=ROOT) as answer:
            assert answer.status == 200
        assert service._ticking is not None

"""What a daemon does where a codec says that blocks are unlike calibration."""

import dataclasses
import logging

import pytest
from support.toy import BLOCK_TOKENS, IDENTITY, block, soon, toy_service

from kvtcd.core.drift import Drift, Reading
from kvtcd.core.errors import Drifted
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.engine import drift
from kvtcd.engine.metrics import Metrics

pytestmark = pytest.mark.asyncio
USUAL = Drift("usual", 8, {"k": Reading(1.0, 1.25, 3.0)})
UNLIKE = Drift("drifting", 16, {"k": Reading(1.0, 4.0, 3.0)})
DIGEST = IDENTITY.digest.hex()[:12]


async def store(service, ns, number: int) -> str:
    async with service.blocks.batch(ns, b"", soon(), durable=True) as batch:
        slot = await batch.reserve(BlockHead(EngineKey(bytes([number] * 32)), BLOCK_TOKENS), len(block(1)))
        slot.write(memoryview(block(number)))
        (result,) = await batch.commit()
    return result.reason or result.outcome


async def test_it_is_told_once_each_way_and_shown(tmp_path, caplog):
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register("uid:1", "chat", IDENTITY)
        assert b"kvtcd_namespace_drifting{" not in toy.service.metrics_text()
        with caplog.at_level(logging.INFO, logger="kvtcd"):
            for number, said in enumerate((USUAL, UNLIKE, UNLIKE, UNLIKE, USUAL)):
                toy.codecs[0].drift = said
                assert await store(toy.service, ns, number) == "stored"
                text = toy.service.metrics_text().decode()
                labels = f'{{namespace="{DIGEST}"}}'
                assert f"kvtcd_namespace_drifting{labels} {float(said is UNLIKE)}" in text
                assert f"kvtcd_namespace_watched_blocks{labels} {float(said.blocks)}" in text
        missed = f'kvtcd_namespace_drift{{figure="missed",namespace="{DIGEST}",stream="k"}} 1.25'
        assert missed in text
        assert 'kvtcd_drifts_total{state="drifting"} 1.0' in text
        assert 'kvtcd_drifts_total{state="usual"} 1.0' in text
        (warned,) = (record for record in caplog.records if record.levelno == logging.WARNING)
        assert "chat" in warned.getMessage()
        assert "4 times as much outside of the basis" in warned.getMessage()
        await toy.service.purge("uid:1", "chat")
        assert b"kvtcd_namespace_drifting{" not in toy.service.metrics_text()


async def test_what_is_not_to_be_packed_stays_raw_and_no_line_is_written_of_each(tmp_path, caplog):
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register("uid:1", "chat", IDENTITY)
        toy.codecs[0].drift, toy.codecs[0].fail = UNLIKE, Drifted(UNLIKE.why)
        with caplog.at_level(logging.WARNING, logger="kvtcd"):
            for number in range(3):
                assert await store(toy.service, ns, number) == "failed"
        assert len(caplog.records) == 1
        assert 'outcome="drift"} 3.0' in toy.service.metrics_text().decode()
        key = EngineKey(bytes([2] * 32))
        async with toy.service.blocks.read(ns, key, b"", soon()) as lease:
            assert lease.tier is Tier.HOST
            assert b"".join(bytes(piece) for piece in lease.pieces()) == block(2)
        toy.codecs[0].drift, toy.codecs[0].fail = USUAL, None
        assert await store(toy.service, ns, 9) == "stored"


async def test_metrics_show_a_bounded_number_of_namespaces_the_drifting_ones_first(tmp_path):
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register("uid:1", "chat", IDENTITY)
        metrics = Metrics()
        many = []
        for number in range(drift.SHOWN + 20):
            codec = dataclasses.replace(toy.codecs[0], drift=UNLIKE if number % 10 == 9 else USUAL)
            many.append(dataclasses.replace(ns, digest=bytes([number]) * 32, codec=codec))
        drift.show(many, metrics)
        text = metrics.text().decode()
        shown = [line for line in text.splitlines() if line.startswith("kvtcd_namespace_drifting{")]
        assert len(shown) == drift.SHOWN
        assert sum(line.endswith(" 1.0") for line in shown) == sum(n % 10 == 9 for n in range(len(many)))
        assert text.count("kvtcd_namespace_drift{") == 3 * drift.SHOWN

"""What is counted is counted somewhere, and puts by what became of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.toy import BLOCK_TOKENS, IDENTITY, block, soon, toy_service

import kvtcd
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.engine import metrics
from kvtcd.engine.metrics import Metrics


def test_no_metric_is_declared_that_nothing_sets() -> None:
    package, own = Path(kvtcd.__file__).parent, Path(metrics.__file__)
    text = "\n".join(path.read_text() for path in package.rglob("*.py") if path != own)
    inside = own.read_text()
    declared = {name for name in vars(Metrics()) if name != "registry"}
    unset = {
        name for name in declared
        if not re.search(rf"metrics\.{name}\b", text) and len(re.findall(rf"\bself\.{name}\b", inside)) < 2
    }  # fmt: skip
    assert unset == set()


@pytest.mark.asyncio
async def test_puts_are_counted_by_outcome(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        namespace = await toy.service.register("t", "demo", IDENTITY)
        for expected in ("stored", "duplicate"):
            async with toy.service.blocks.batch(namespace, b"", soon()) as batch:
                head = BlockHead(EngineKey(bytes(32)), BLOCK_TOKENS)
                data = block(0, BLOCK_TOKENS)
                slot = await batch.reserve(head, len(data))
                if slot is not None:
                    slot.write(memoryview(data))
                (result,) = await batch.commit()
                assert result.outcome == expected
        async with toy.service.blocks.batch(namespace, b"", soon()) as batch:
            await batch.reserve(BlockHead(EngineKey(bytes([1]) * 32), BLOCK_TOKENS), len(data))
        value = toy.service.metrics.registry.get_sample_value
        counted = {
            outcome: value("kvtcd_puts_total", {"outcome": outcome})
            for outcome in ("stored", "duplicate", "dropped")
        }
        assert counted == {"stored": 1, "duplicate": 1, "dropped": 1}

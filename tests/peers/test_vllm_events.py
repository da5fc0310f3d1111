"""vLLM's own classes read what the daemon publishes, and name blocks as vLLM's engines do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvtcd.client import BlockHead
from kvtcd.core.identity import Identity
from kvtcd.core.kv_events import VLLM_KEYS
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.lab.daemon import Daemon

pytestmark = [
    pytest.mark.peers("vllm"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what vLLM says while it is imported is not about us
]
IDENTITY = Identity(
    engine="vllm", hash_scheme=VLLM_KEYS, model="m", weights="ab" * 32, rope=None, block_tokens=64,
    layout=Layout((Stream("pages", 1, 64, rope=False),), 1, Dtype.F16),
)  # fmt: skip
BLOCK = bytes(IDENTITY.layout.nbytes(64))


def test_vllm_reads_what_the_daemon_publishes() -> None:
    import msgspec  # noqa: PLC0415 - where vLLM is
    import zmq  # noqa: PLC0415
    from vllm.distributed.kv_events import (  # noqa: PLC0415
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: PLC0415

    read = msgspec.msgpack.Decoder(KVEventBatch).decode
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name, zmq.Context() as context:
        folder = Path(name)
        daemon = Daemon(folder, host=64 << 20, disk=0, profiles=folder / "profiles")
        said = daemon.config.read_text()
        for field, value in {"zmq": f"ipc://{name}/out", "replay": f"ipc://{name}/again"}.items():
            said = said.replace(f'{field} = ""', f'{field} = "{value}"')
        daemon.config.write_text(said.replace('tenant = ""', f'tenant = "uid:{folder.stat().st_uid}"'))
        hashes = [bytes([number]) * 32 for number in range(3)]
        keys = [one + bytes(4) for one in hashes]
        with daemon, daemon.client() as client, context.socket(zmq.DEALER) as asked:
            client.register("n", IDENTITY)
            client.put_many("n", [(BlockHead(key, 64, 64 * i), BLOCK) for i, key in enumerate(keys)])
            client.delete("n", keys[2])
            events: list[object] = []
            asked.connect(f"ipc://{name}/again")
            while not any(isinstance(event, BlockRemoved) for event in events):
                asked.send_multipart([b"", (0).to_bytes(8, "big")])
                events = []
                while asked.poll(30_000) and (batch := asked.recv_multipart()[3]):
                    events += read(batch).events

    assert isinstance(events[0], AllBlocksCleared)
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.block_hashes for event in stored] == [[maybe_convert_block_hash(h)] for h in hashes]
    assert stored[1].parent_block_hash == maybe_convert_block_hash(hashes[0])
    assert {(event.medium, event.block_size, event.group_idx) for event in stored} == {("CPU", 64, 0)}
    (removed,) = (event for event in events if isinstance(event, BlockRemoved))
    assert removed.block_hashes == [maybe_convert_block_hash(hashes[2])]

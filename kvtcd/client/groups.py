"""How the blocks of one `put_many` become requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvtcd.client.call import Buffer
from kvtcd.client.device import Data, DevicePart
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead

GROUP_BYTES = 256 << 20
GROUP_BLOCKS = 1024
"""What `put_many` sends in one request at most, besides a single larger block."""


def groups(blocks: Iterable[tuple[BlockHead, Data]]) -> Iterator[list[tuple[BlockHead, Data]]]:
    """Split a sequence of blocks into groups that one request takes.

    Within a request the order is the chain; across groups it is made explicit.
    """
    group: list[tuple[BlockHead, Data]] = []
    nbytes = 0
    previous: EngineKey | None = None
    for block, data in blocks:
        size = data.nbytes if isinstance(data, DevicePart) else memoryview(data).nbytes
        if group and (nbytes + size > GROUP_BYTES or len(group) == GROUP_BLOCKS):
            yield group
            group, nbytes = [], 0
            if block.parent is None and block.first_token != 0:
                block = replace(block, parent=previous)  # noqa: PLW2901 - the same block, said in full
        group.append((block, data))
        nbytes += size
        previous = block.key
    if group:
        yield group


def on_host(group: Iterable[tuple[BlockHead, Data]]) -> list[tuple[BlockHead, Buffer]]:
    """Return a group with what lies on a GPU copied to the host."""
    return [(block, data.on_host() if isinstance(data, DevicePart) else data) for block, data in group]

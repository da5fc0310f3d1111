"""Blobs taken apart and put together again with something changed, their checksums made right."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvtcd.core.blob import Blob, Chunk, Run, Section, assemble, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def chunks_of(blob: Blob, section: Section) -> list[Chunk]:
    """Return the chunks of a section as they are stored."""
    start, chunks = section.offset, []
    for nbytes, stored in section.chunks:
        chunks.append(Chunk(bytes(blob.data[start : start + nbytes]), stored=stored))
        start += -(-nbytes // 16) * 16
    return chunks


def reassembled(
    data: bytes | bytearray,
    header: Mapping[str, Any] | None = None,
    sections: Callable[[list[Run]], list[Run]] | None = None,
) -> Blob:
    """Return the blob with some header fields replaced and its sections passed through a function."""
    blob = parse(memoryview(data))
    runs = [
        Run(s.kind, s.stream, s.part, s.token_start, s.token_count, s.raw_bytes, chunks_of(blob, s))
        for s in blob.sections
    ]
    if sections:
        runs = sections(runs)
    return parse(memoryview(assemble(dataclasses.replace(blob.header, **(header or {})), runs)))

"""Sections of a blob before and after the entropy stage, and the runs of tokens they make up.

A run of tokens is either exact (byte planes of every stream) or coded (codes and ranges of every stream). The
sections a run must have follow from layout and plan alone, so a blob that says anything else is refused
before a chunk is inflated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtcd.codec.entropy import deflate, inflate
from kvtcd.core.blob import CHUNK_BYTES, Blob, Chunk, Header, Kind, Run, Section, assemble
from kvtcd.core.errors import BadField


class Part(NamedTuple):
    """What tells the sections of one run of tokens apart."""

    kind: Kind
    stream: int
    part: int


class Scratch(Protocol):
    """Memory for one block."""

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes, aligned for every element type, that nobody else uses."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """A section without its entropy coding: tokens ``start .. start + count - 1``, flat uint8 on the CPU."""

    part: Part
    start: int
    count: int
    data: Tensor


def plain(part: Part, start: int, count: int, values: Tensor, scratch: Scratch) -> Plain:
    """Copy the low byte of integer values, of any shape and on any device, into a section."""
    data = torch.from_numpy(scratch.take(values.numel()))
    data.view(values.shape).copy_(values)
    return Plain(part, start, count, data)


def plains(
    sizes: Mapping[Part, int], start: int, count: int, values: Tensor, scratch: Scratch
) -> list[Plain]:
    """Copy flat uint8, on any device, into small sections of a run, by size: one copy, and one wait."""
    data = torch.from_numpy(scratch.take(values.numel()))
    data.copy_(values)
    pieces = torch.split(data, list(sizes.values()))
    return [Plain(part, start, count, piece) for part, piece in zip(sizes, pieces, strict=True)]


def deflated(header: Header, sections: Iterable[Plain]) -> bytearray:
    """Compress sections into a blob, in the order given; arrays stay as they are."""
    runs = []
    for section in sections:
        data = section.data.numpy().data
        chunks = as_it_is(data) if section.part.kind is Kind.ARRAY else deflate(data)
        runs.append(Run(*section.part, section.start, section.count, len(data), chunks))
    return assemble(header, runs)


def as_it_is(data: memoryview) -> list[Chunk]:
    """Cut into chunks, none of them compressed."""
    return [Chunk(data[n : n + CHUNK_BYTES], stored=True) for n in range(0, len(data), CHUNK_BYTES)]


def inflated(blob: Blob, scratch: Scratch) -> list[Plain]:
    """Decompress every section of a blob, in its order.

    Raises:
        BadChecksum, BadField: a section is damaged.
    """
    sections = []
    for section in blob.sections:
        data = scratch.take(section.raw_bytes)
        inflate(blob, section, data.data)
        part = Part(section.kind, section.stream, section.part)
        sections.append(Plain(part, section.token_start, section.token_count, torch.from_numpy(data)))
    return sections


def by_run(sections: Iterable[Plain]) -> dict[tuple[int, int], dict[Part, Tensor]]:
    """Sort what was inflated by run: (first token, tokens) -> part -> flat uint8."""
    runs: dict[tuple[int, int], dict[Part, Tensor]] = {}
    for section in sections:
        runs.setdefault((section.start, section.count), {})[section.part] = section.data
    return runs


def check_runs(blob: Blob) -> dict[tuple[int, int], dict[Part, Section]]:
    """Sort the sections of a blob by run: (first token, tokens) -> part -> section.

    Raises:
        BadField: the runs do not make up the block, or a section occurs twice.
    """
    runs: dict[tuple[int, int], dict[Part, Section]] = {}
    for section in blob.sections:
        run = runs.setdefault((section.token_start, section.token_count), {})
        part = Part(section.kind, section.stream, section.part)
        if part in run:
            raise BadField("blob", f"two sections for {part}")
        run[part] = section
    end = 0
    for start, count in sorted(runs):
        if start != end:
            raise BadField("blob", f"tokens {end} to {start} are missing or there twice")
        end = start + count
    if end != blob.header.tokens:
        raise BadField("blob", f"sections hold {end} of {blob.header.tokens} tokens")
    return runs


def require(found: Mapping[Part, Section], sizes: Mapping[Part, int]) -> None:
    """Compare the sections of a run with those it must have, by their uncompressed sizes.

    Raises:
        BadField: a section is missing, superfluous or of another size.
    """
    got = {part: section.raw_bytes for part, section in found.items()}
    if got != sizes:
        part, nbytes = min(set(got.items()) ^ set(sizes.items()))
        raise BadField("blob", f"section {part} of {nbytes} bytes does not fit layout and plan")

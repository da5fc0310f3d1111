"""Sections of a blob as tensors, and the runs of tokens they make up.

A run of tokens is either exact (byte planes of every stream) or coded (codes and ranges of every stream). The
sections a run must have follow from layout and plan alone, so a blob that says anything else is refused
before a chunk is inflated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvtcd.codec.entropy import deflate, inflate
from kvtcd.core.blob import Blob, Kind, Run, Section
from kvtcd.core.errors import BadField


class Part(NamedTuple):
    """What tells the sections of one run of tokens apart."""

    kind: Kind
    stream: int
    part: int


def write(part: Part, start: int, count: int, data: Tensor) -> Run:
    """Compress a contiguous uint8 tensor into a section of tokens ``start .. start + count - 1``."""
    flat = data.cpu().numpy().data.cast("B")
    return Run(part.kind, part.stream, part.part, start, count, len(flat), deflate(flat))


def read(blob: Blob, section: Section) -> Tensor:
    """Decompress a section into a flat uint8 tensor on the CPU.

    Raises:
        BadChecksum, BadField: the section is damaged.
    """
    out = torch.empty(section.raw_bytes, dtype=torch.uint8)
    inflate(blob, section, out.numpy().data)
    return out


def by_run(blob: Blob) -> dict[tuple[int, int], dict[Part, Section]]:
    """Sort the sections by run: (first token, tokens) -> part -> section.

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

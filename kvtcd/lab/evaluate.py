"""What a codec costs and what it saves, measured on a model: the figures that demo, reports and tests share.

A document is context and continuation. The context's cache is cut into blocks as a client would cut it, every
block goes through the codec, and the model reads the continuation behind the cache that came back. It is
compared with its own run behind the untouched cache, in the same shape: the same prefill and the same number
of further tokens, since a run of another shape differs by rounding alone.

`ratio` is over the *coded* tokens, those that are neither one of the first `SINKS` nor of the last `WINDOW`
of the context, at 16 bits per value, and counts every byte stored for them: headers, section and chunk
tables, ranges and padding of all blocks they are in. `ratio_all` is over every token of the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder
from kvtcd.codec.rope import Rotation
from kvtcd.codec.transform import rows, views
from kvtcd.core.blob import Blob, parse
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Layout
from kvtcd.integrations.transformers_blocks import cache_from_raw, raw_block
from kvtcd.lab.capture import prefill
from kvtcd.lab.models import LoadedModel

SINKS = 4
WINDOW = 128
_BITS = 16


@dataclass(frozen=True, slots=True)
class Block:
    """A raw block of a context: `after` tokens of the context follow it."""

    raw: Tensor
    first_token: int
    tokens: int
    after: int


@dataclass(frozen=True, slots=True)
class Document:
    """A context in blocks, and what the model says of the continuation behind the untouched cache.

    Attributes:
        blocks: of the context.
        continuation: token ids.
        logits: float32 ``[len(continuation), vocabulary]``.
    """

    blocks: tuple[Block, ...]
    continuation: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Size:
    """Bits at 16 a value, and bits stored; of the coded tokens and of all. Sizes add up over documents."""

    coded_raw: float
    coded: float
    all_raw: float
    all: float

    def __add__(self, other: Size) -> Size:
        return Size(
            self.coded_raw + other.coded_raw,
            self.coded + other.coded,
            self.all_raw + other.all_raw,
            self.all + other.all,
        )

    @property
    def ratio(self) -> float:
        """Compression of the coded tokens; NaN when there are none."""
        return self.coded_raw / self.coded if self.coded else math.nan

    @property
    def ratio_all(self) -> float:
        """Compression of all tokens."""
        return self.all_raw / self.all


@dataclass(frozen=True, slots=True)
class Quality:
    """How far a continuation is from the untouched run; means over its tokens.

    Attributes:
        kl: Kullback-Leibler divergence from the untouched run's distribution, nats per token.
        top1: share of tokens with the same most likely successor.
        dnll: increase of the negative log likelihood of the text itself, nats per token.
    """

    kl: float
    top1: float
    dnll: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A document through a codec.

    Attributes:
        size: what it takes.
        quality: how the model reads on.
        error: by stream, squared error of the coded tokens relative to their energy about their mean, RoPE
            undone.
    """

    size: Size
    quality: Quality
    error: dict[str, float]


def read(loaded: LoadedModel, identity: Identity, tokens: Sequence[int], context: int) -> Document:
    """Run the model over a document; the tokens behind the first `context` are its continuation.

    Raises:
        UnsupportedCache: a layer of the model does not keep its whole past.
    """
    blocks = cut(loaded, identity, tokens[:context])
    continuation = tuple(tokens[context:])
    logits = continue_behind(loaded, [block.raw for block in blocks], identity.layout, continuation)
    return Document(blocks, continuation, logits)


def measure(
    loaded: LoadedModel, identity: Identity, document: Document, encoder: Encoder, decoder: BlobDecoder
) -> Measured:
    """Take a document through a codec and let the model read on."""
    encoded = encode(encoder, document.blocks)
    decoded = decode(decoder, document.blocks, encoded)
    logits = continue_behind(loaded, decoded, identity.layout, document.continuation)
    return Measured(
        size=size(identity.layout, document.blocks, encoded),
        quality=quality(document.logits, logits, document.continuation),
        error=errors(identity, document.blocks, decoded),
    )


def cut(loaded: LoadedModel, identity: Identity, context: Sequence[int]) -> tuple[Block, ...]:
    """Prefill a context and cut its cache into blocks of the namespace, the last one perhaps shorter."""
    cache = prefill(loaded, context)
    blocks = []
    for start in range(0, len(context), identity.block_tokens):
        stop = min(start + identity.block_tokens, len(context))
        raw = raw_block(cache, start, stop, identity.layout)
        blocks.append(Block(raw, start, stop - start, len(context) - stop))
    return tuple(blocks)


def encode(encoder: Encoder, blocks: Sequence[Block]) -> list[Encoded]:
    """Encode each block where it stands in its context."""
    return [encoder.encode(b.raw, tokens=b.tokens, first_token=b.first_token, after=b.after) for b in blocks]


def decode(decoder: BlobDecoder, blocks: Sequence[Block], encoded: Sequence[Encoded]) -> list[Tensor]:
    """Decode into new raw blocks, like those given."""
    decoded = [torch.empty_like(block.raw) for block in blocks]
    for packed, out in zip(encoded, decoded, strict=True):
        decoder.decode(parse(memoryview(packed.blob)), out)
    return decoded


def continue_behind(
    loaded: LoadedModel, raw: Sequence[Tensor], layout: Layout, continuation: Sequence[int]
) -> Tensor:
    """Read tokens behind the cache in raw blocks; return float32 logits ``[tokens, vocabulary]``."""
    cache = cache_from_raw(raw, layout)
    ids = torch.tensor([continuation], device=loaded.model.device)
    with torch.no_grad():
        logits: Tensor = loaded.model(ids, cache=cache).logits
    return logits[0].to(torch.float32)


def quality(reference: Tensor, logits: Tensor, tokens: Sequence[int]) -> Quality:
    """Compare two runs over the same tokens, by logits ``[tokens, vocabulary]``.

    `dnll` is over the tokens from the second on: nothing here predicts the first.
    """
    p, q = reference.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    next_tokens = torch.tensor(tokens[1:], device=logits.device)[:, None]
    return Quality(
        kl=float((p.exp() * (p - q)).sum(dim=-1, dtype=torch.float64).mean()),
        top1=float((p.argmax(dim=-1) == q.argmax(dim=-1)).to(torch.float64).mean()),
        dnll=float((p[:-1] - q[:-1]).gather(1, next_tokens).to(torch.float64).mean()),
    )


def size(layout: Layout, blocks: Sequence[Block], encoded: Sequence[Encoded]) -> Size:
    """Count what blocks of one context take, see the module."""
    raw_bits = layout.token_elements * _BITS
    total = Size(0, 0, 0, 0)
    for block, packed in zip(blocks, encoded, strict=True):
        coded = _coded(block)
        blob = parse(memoryview(packed.blob))
        total += Size(
            coded_raw=raw_bits * len(coded),
            coded=8 * _bytes_of(blob, range(coded.start - block.first_token, coded.stop - block.first_token)),
            all_raw=raw_bits * block.tokens,
            all=8 * len(packed.blob),
        )
    return total


def errors(identity: Identity, blocks: Sequence[Block], decoded: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative squared error of each stream over the coded tokens, if any; see `Measured`."""
    pairs = [pair for pair in zip(blocks, decoded, strict=True) if _coded(pair[0])]
    found: dict[str, float] = {}
    for index, stream in enumerate(identity.layout.streams if pairs else ()):
        want = torch.cat([_coded_rows(identity, block, block.raw, index) for block, _ in pairs])
        got = torch.cat([_coded_rows(identity, block, raw, index) for block, raw in pairs])
        energy = (want - want.mean(dim=0)).square().sum(dtype=torch.float64)
        found[stream.name] = float((got - want).square().sum(dtype=torch.float64) / energy)
    return found


def _coded(block: Block) -> range:
    """The coded tokens of a block, as positions in the context."""
    end = block.first_token + block.tokens
    start = min(max(block.first_token, SINKS), end)
    return range(start, max(start, end + min(0, block.after - WINDOW)))


def _bytes_of(blob: Blob, tokens: range) -> float:
    """Bytes of a blob on account of a run of tokens: sections by the tokens they share, tables in full."""
    if not tokens:
        return 0
    counted = float(len(blob.data) - sum(section.nbytes for section in blob.sections))
    for section in blob.sections:
        shared = range(
            max(tokens.start, section.token_start),
            min(tokens.stop, section.token_start + section.token_count),
        )
        counted += section.nbytes * len(shared) / section.token_count
    return counted


def _coded_rows(identity: Identity, block: Block, raw: Tensor, index: int) -> Tensor:
    """The coded tokens of one stream of a block, float32 ``[T, p]``, RoPE undone."""
    stream, rope, tokens = identity.layout.streams[index], identity.rope, _coded(block)
    start = tokens.start - block.first_token
    view = views(raw, identity.layout, block.tokens)[index][:, start : start + len(tokens)]
    undo = (
        Rotation(rope, tokens.start, len(tokens), inverse=True, device=raw.device)
        if rope and stream.rope
        else None
    )
    return rows(view, undo)

"""What a codec costs and what it saves, measured on a model: the figures that demo, reports and tests share.

A document is context and continuation. The context's cache is cut into blocks as a client would cut it, every
block goes through the codec, and the model reads the continuation behind the cache that came back. It is
compared with its own run behind the untouched cache, in the same shape: the same prefill and the same number
of further tokens, since a run of another shape differs by rounding alone.

`ratio` is over the *coded* tokens, those that are neither one of the first `SINKS` nor of the last `WINDOW`
of the context, at 16 bits per value, and counts every byte stored for them: headers, section and chunk
tables, ranges and padding of all blocks they are in. `ratio_all` is over every token of the context.

Memory is that of one document: its cache twice, and its logits three times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder, Reason
from kvtcd.codec.rope import Rotation
from kvtcd.codec.transform import rows, views
from kvtcd.core.blob import Blob, CodecId, parse
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Layout
from kvtcd.integrations.transformers_blocks import cache_from_raw, raw_block
from kvtcd.lab.capture import prefill
from kvtcd.lab.models import LoadedModel

SINKS = 4
WINDOW = 128
_BITS = 16
_POSITIONS = 64
"""Rows of logits that are compared at once: vocabularies are large."""


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
        context: token ids.
        blocks: of the context.
        continuation: token ids.
        logits: float32 ``[len(continuation), vocabulary]``.
    """

    context: tuple[int, ...]
    blocks: tuple[Block, ...]
    continuation: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Size:
    """Bits at 16 a value, and bits stored; of the coded tokens and of all. Sizes add up over documents."""

    coded_raw: float = 0
    coded: float = 0
    all_raw: float = 0
    all: float = 0

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
        finer: blocks that the codec stored finer than asked, to keep a bound.
        refused: blocks with coded tokens that it stored losslessly instead.
        reasons: how many of these for which reason.
    """

    size: Size
    quality: Quality
    error: dict[str, float]
    finer: int
    refused: int
    reasons: Mapping[Reason, int] = field(default_factory=dict)


def reasons_of(measured: Iterable[Measured]) -> dict[Reason, int]:
    """Count why blocks were stored losslessly, over documents."""
    return dict(sum((Counter(one.reasons) for one in measured), Counter[Reason]()))


def read(loaded: LoadedModel, identity: Identity, tokens: Sequence[int], context: int) -> Document:
    """Run the model over a document; the tokens behind the first `context` are its continuation.

    Raises:
        UnsupportedCache: a layer of the model does not keep its whole past.
    """
    blocks = cut(prefill(loaded, tokens[:context]), identity)
    continuation = tuple(tokens[context:])
    logits = continue_behind(loaded, [block.raw for block in blocks], identity.layout, continuation)
    return Document(tuple(tokens[:context]), blocks, continuation, logits)


def noise(loaded: LoadedModel, identity: Identity, document: Document) -> Quality:
    """Return what rounding alone does to a document, no codec in between: the floor of every measure.

    The model reads the context again, a block at a time. The sums are the same, their order is not.
    """
    cache = prefill(loaded, document.context, identity.block_tokens)
    return quality(document.logits, read_on(loaded, cache, document.continuation), document.continuation)


def measure(
    loaded: LoadedModel, identity: Identity, document: Document, encoder: Encoder, decoder: BlobDecoder
) -> Measured:
    """Take a document through a codec and let the model read on."""
    encoded = encode(encoder, document.blocks)
    decoded = decode(decoder, document.blocks, encoded)
    logits = continue_behind(loaded, decoded, identity.layout, document.continuation)
    changed = [packed for packed in encoded if packed.reason not in {None, Reason.WINDOW}]
    refused = [packed.reason for packed in changed if packed.codec is CodecId.LOSSLESS and packed.reason]
    return Measured(
        size=size(identity.layout, document.blocks, encoded),
        quality=quality(document.logits, logits, document.continuation),
        error=errors(identity, document.blocks, decoded),
        finer=len(changed) - len(refused),
        refused=len(refused),
        reasons=Counter(refused),
    )


def cut(cache: DynamicCache, identity: Identity, start: int = 0) -> tuple[Block, ...]:
    """Cut a cache from token `start` on into blocks of the namespace, the last one perhaps shorter."""
    blocks, length = [], cache.get_seq_length()
    for first in range(start, length, identity.block_tokens):
        stop = min(first + identity.block_tokens, length)
        raw = raw_block(cache, first, stop, identity.layout)
        blocks.append(Block(raw, first, stop - first, length - stop))
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
    return read_on(loaded, cache_from_raw(raw, layout), continuation)


def read_on(loaded: LoadedModel, cache: DynamicCache, tokens: Sequence[int]) -> Tensor:
    """Read tokens behind a cache, which grows; return float32 logits ``[tokens, vocabulary]``."""
    ids = torch.tensor([tokens], device=loaded.model.device)
    with torch.no_grad():
        logits: Tensor = loaded.model(ids, cache=cache).logits
    return logits[0].to(torch.float32)


def quality(reference: Tensor, logits: Tensor, tokens: Sequence[int]) -> Quality:
    """Compare two runs over the same tokens, by logits ``[tokens, vocabulary]``.

    `dnll` is over the tokens from the second on: nothing here predicts the first.
    """
    following = torch.tensor([*tokens[1:], 0], device=logits.device)[:, None]
    kl = top1 = dnll = 0.0
    for start in range(0, len(tokens), _POSITIONS):
        some = slice(start, start + _POSITIONS)
        p, q = reference[some].log_softmax(dim=-1), logits[some].log_softmax(dim=-1)
        gain = p - q
        kl += float((p.exp() * gain).sum(dtype=torch.float64))
        top1 += float((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        dnll += float(gain.gather(1, following[some])[: len(tokens) - 1 - start].sum(dtype=torch.float64))
    return Quality(kl / len(tokens), top1 / len(tokens), dnll / max(len(tokens) - 1, 1))


def size(layout: Layout, blocks: Sequence[Block], encoded: Sequence[Encoded], window: int = WINDOW) -> Size:
    """Count what blocks of one context take whose last `window` tokens are not coded; see the module."""
    raw_bits = layout.token_elements * _BITS
    total = Size()
    for block, packed in zip(blocks, encoded, strict=True):
        coded = coded_tokens(block, window)
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
    pairs = [pair for pair in zip(blocks, decoded, strict=True) if coded_tokens(pair[0])]
    found: dict[str, float] = {}
    for index, stream in enumerate(identity.layout.streams if pairs else ()):
        tokens, error, energy, total = 0, 0.0, 0.0, torch.zeros(())
        for block, raw in pairs:
            want, got = (coded_rows(identity, block, either, index) for either in (block.raw, raw))
            tokens += len(want)
            error += float((got - want).square().sum(dtype=torch.float64))
            energy += float(want.square().sum(dtype=torch.float64))
            total = total.to(want.device) + want.sum(dim=0, dtype=torch.float64)
        found[stream.name] = error / (energy - float(total.square().sum()) / tokens)
    return found


def coded_tokens(block: Block, window: int = WINDOW) -> range:
    """The coded tokens of a block, as positions in the context."""
    end = block.first_token + block.tokens
    start = min(max(block.first_token, SINKS), end)
    return range(start, max(start, end + min(0, block.after - window)))


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


def coded_rows(identity: Identity, block: Block, raw: Tensor, index: int) -> Tensor:
    """The coded tokens of one stream of a block, float32 ``[T, p]``, RoPE undone."""
    stream, rope, tokens = identity.layout.streams[index], identity.rope, coded_tokens(block)
    start = tokens.start - block.first_token
    view = views(raw, identity.layout, block.tokens)[index][:, start : start + len(tokens)]
    undo = (
        Rotation(rope, tokens.start, len(tokens), inverse=True, device=raw.device)
        if rope and stream.rope
        else None
    )
    return rows(view, undo)

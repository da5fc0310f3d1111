"""The two halves of a codec: one after the other they are the codec, whatever lay in their memory before."""

import dataclasses

import pytest
import torch
from support.codec_blobs import reassembled
from support.codec_world import World, kv

from kvtcd.codec.choose import Decoder
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.lossless import Lossless
from kvtcd.codec.ports import deflate
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.blob import Chunk, CodecId, Kind, parse
from kvtcd.core.errors import BadField, BlockMismatch

WORLD = World(kv())
TOKENS = 64


@pytest.fixture(scope="module")
def profile():
    return WORLD.profile()[0]


@pytest.fixture(params=["kvtc", "lossless"])
def codec(request, profile):
    coding = Kvtc(WORLD.layout, WORLD.rope, profile, 4, window=16)
    encoder = coding if request.param == "kvtc" else Lossless(WORLD.layout)
    return encoder, Decoder(WORLD.layout, WORLD.rope, lambda _: profile)


def dirty() -> HeapScratch:
    """Memory in which another block has been."""
    scratch = HeapScratch()
    scratch.take(4 * WORLD.layout.nbytes(TOKENS))[:] = 0xA5
    scratch.clear()
    return scratch


def test_halves_of_several_blocks_may_run_in_any_order_on_used_memory(codec):
    encoder, decoder = codec
    blocks = [WORLD.block(TOKENS, seed) for seed in range(3)]
    place = {"tokens": TOKENS, "first_token": 0, "after": 0}
    whole = [bytes(encoder.encode(raw, **place).blob) for raw in blocks]

    symbols = [encoder.analyze(raw, **place, scratch=dirty()) for raw in blocks]
    blobs = {index: deflate(symbols[index]).blob for index in (2, 0, 1)}
    assert [bytes(blobs[index]) for index in range(3)] == whole

    inflated = [decoder.inflate(parse(memoryview(blob)), dirty()) for blob in whole]
    for index in (1, 2, 0):
        out, want = torch.empty_like(blocks[0]), torch.empty_like(blocks[0])
        decoder.synthesize(inflated[index], out)
        decoder.decode(parse(memoryview(whole[index])), want)
        assert torch.equal(out, want)


def test_symbols_know_the_codec_and_why_it_is_not_the_one_asked_for(profile):
    encoder = Kvtc(WORLD.layout, WORLD.rope, profile, 4, window=TOKENS)
    symbols = encoder.analyze(
        WORLD.block(TOKENS, 1), tokens=TOKENS, first_token=0, after=0, scratch=HeapScratch()
    )
    encoded = deflate(symbols)
    assert (encoded.codec, encoded.reason) == (CodecId.LOSSLESS, "window")
    assert symbols.reason is encoded.reason


def test_a_blob_that_does_not_fit_is_refused_before_a_chunk_is_inflated(codec):
    """Its chunks are no DEFLATE streams, but the error is about the section that is missing."""
    encoder, decoder = codec
    blob = encoder.encode(WORLD.block(TOKENS, 1), tokens=TOKENS, first_token=0, after=0).blob

    def spoilt(runs):
        return [
            dataclasses.replace(run, chunks=[Chunk(b"\xff" * len(c.data), c.stored) for c in run.chunks])
            for run in runs
        ]

    def incomplete(runs):
        return [run for run in spoilt(runs) if (run.kind, run.stream, run.part) != (Kind.PLANE, 1, 1)]

    with pytest.raises(BadField, match="does not fit layout and plan"):
        decoder.inflate(reassembled(blob, None, incomplete), HeapScratch())
    with pytest.raises(BadField, match="DEFLATE"):
        decoder.inflate(reassembled(blob, None, spoilt), HeapScratch())


def test_the_tensor_half_writes_only_into_a_block_of_the_right_length(codec):
    encoder, decoder = codec
    blob = encoder.encode(WORLD.block(TOKENS, 1), tokens=TOKENS, first_token=0, after=0).blob
    symbols = decoder.inflate(parse(memoryview(blob)), HeapScratch())
    with pytest.raises(BlockMismatch, match="bytes"):
        decoder.synthesize(symbols, torch.empty(10, dtype=torch.uint8))

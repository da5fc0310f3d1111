"""What is timed: a codec of a case, as a daemon runs it, and what else could pack the same bytes.

The peers are general compressors, and four bits a value in groups of neighbours, without any transform.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kvtcd.codec.choose import Decoder
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.kvtc2 import Kvtc2
from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.staged import Accelerator, StagedDecoder, StagedEncoder
from kvtcd.core.blob import parse
from kvtcd.core.errors import Unavailable
from kvtcd.lab.bench_codec_case import FIRST_TOKEN, PLAN, TOKENS, Case

CODECS = ("kvtc", "kvtc2")
PEERS = ("zlib", "zstd", "int4")
_ZLIB_LEVEL, _ZSTD_LEVEL = 6, 1
_GROUP = 64
_MOST = 15.0


@dataclass(frozen=True, slots=True)
class Packer:
    """What packs a given block.

    Attributes:
        encode: packs it.
        decode: restores it from what was packed before.
        nbytes: of what was packed.
        device: where that happens.
        straight: restores it to where it is wanted on an accelerator; None without one.
    """

    encode: Callable[[], object]
    decode: Callable[[], object]
    nbytes: int
    device: str
    straight: Callable[[], object] | None = None


def codec(name: str, case: Case, accelerator: Accelerator | None) -> Packer:
    """Return one of `CODECS` for blocks in host memory, working on a CPU or on an accelerator."""
    device = accelerator.device if accelerator else torch.device("cpu")
    encoder, decoder = _halves(name, case, device, accelerator)
    raw, out = case.raw, torch.empty_like(case.raw)
    if accelerator:
        spare = cache(partial(_halves, name, case, torch.device("cpu")))
        encoder = StagedEncoder(encoder, accelerator, lambda: spare()[0])
        decoder = StagedDecoder(decoder, accelerator, lambda: spare()[1])
        if device.type == "cuda":
            raw, out = raw.pin_memory(), out.pin_memory()
    scratch = HeapScratch()

    def encode() -> Encoded:
        scratch.clear()
        symbols = encoder.analyze(
            raw, tokens=TOKENS, first_token=FIRST_TOKEN, after=FIRST_TOKEN, scratch=scratch
        )
        return encoder.deflate(symbols)

    def decode() -> None:
        scratch.clear()
        decoder.synthesize(decoder.inflate(parse(blob), scratch), out)

    def straight() -> None:
        scratch.clear()
        decoder.synthesize_there(decoder.inflate(parse(blob), scratch), there)

    encoded = encode()
    assert encoded.reason is None, "the case is made so that it can be coded"
    blob, there = memoryview(encoded.blob), torch.empty(raw.shape, dtype=raw.dtype, device=device)
    return Packer(encode, decode, len(blob), device.type, straight if accelerator else None)


def _halves(
    name: str, case: Case, device: torch.device, accelerator: Accelerator | None = None
) -> tuple[Encoder, BlobDecoder]:
    arithmetic = accelerator.arithmetic if accelerator else None
    graphs = accelerator.graphs if accelerator else None
    encoder: Encoder
    if name == "kvtc":
        encoder = Kvtc(case.layout, case.rope, case.profile, PLAN, device=device, graphs=graphs)
    else:
        # With a bound, as in a daemon, that no block is above.
        encoder = Kvtc2(
            case.layout, case.rope, case.profile, case.step,
            bound=math.inf, device=device, arithmetic=arithmetic, graphs=graphs,
        )  # fmt: skip
    return encoder, Decoder(case.layout, case.rope, lambda _: case.profile, device, arithmetic, graphs=graphs)


def peer(name: str, raw: Tensor, device: torch.device) -> Packer:
    """Return one of `PEERS` for a raw block, flat uint8 in host memory.

    Raises:
        Unavailable: zstandard is not installed.
    """
    if name == "int4":
        values = raw.to(device).view(torch.bfloat16)
        packed = quantize(values)
        nbytes = sum(part.nbytes for part in packed)
        return Packer(lambda: quantize(values), lambda: dequantize(packed), nbytes, device.type)
    data = raw.numpy().data
    compress, decompress = _zlib() if name == "zlib" else _zstd()
    compressed = compress(data)
    return Packer(lambda: compress(data), lambda: decompress(compressed), len(compressed), "cpu")


def quantize(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round bfloat16 values, 64 neighbours with one range, to 16 steps from the least to the largest.

    Returns:
        Two codes in a byte, and float16 steps and least values of each group.
    """
    groups = values.view(-1, _GROUP).to(torch.float32)
    least = groups.amin(dim=1, keepdim=True).half()
    step = ((groups.amax(dim=1, keepdim=True) - least) / _MOST).clamp_min_(2.0**-24).half()
    codes = (groups - least).div_(step).round_().clamp_(0, _MOST).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4), step, least


def dequantize(packed: Sequence[Tensor]) -> Tensor:
    """Return the bfloat16 values that `quantize` packed."""
    codes, step, least = packed
    both = torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), _GROUP)
    return both.to(torch.float32).mul_(step).add_(least).to(torch.bfloat16).flatten()


_Call = Callable[[Any], bytes]


def _zlib() -> tuple[_Call, _Call]:
    return lambda data: zlib.compress(data, _ZLIB_LEVEL), zlib.decompress


def _zstd() -> tuple[_Call, _Call]:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Unavailable(
            f"zstd needs {error.name}; pip install 'kvtcd[lab]', or name other codecs"
        ) from error
    return zstandard.ZstdCompressor(_ZSTD_LEVEL).compress, zstandard.ZstdDecompressor().decompress

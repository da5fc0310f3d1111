"""Every rival at stands of its dial that differ, and blobs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtcd.codec.choose import Decoder
from kvtcd.codec.rivals.coder import Rival
from kvtcd.codec.rivals.setting import Setting
from kvtcd.core.blob import parse

if TYPE_CHECKING:
    from support.codec_world import World

    from kvtcd.codec.ports import Encoded
    from kvtcd.codec.profile import Profile

SETTINGS = {
    "tq-1": Setting("tq", 1),
    "tq-3-mean-norm": Setting("tq", 3, frozenset({"mean", "norm"})),
    "tq-4-haar-unbiased": Setting("tq", 4, frozenset({"haar", "unbiased"}), seed=5),
    "tq-prod-3": Setting("tq-prod", 3),
    "tq-prod-1": Setting("tq-prod", 1),
    "qjl-2": Setting("qjl", 2),
    "sq-3": Setting("sq", 3),
    "sq-3-norm": Setting("sq", 3, frozenset({"norm"})),
    "sq-2-raw": Setting("sq", 2, frozenset({"raw"})),
    "kivi-2": Setting("kivi", 2),
    "kivi-3-mean": Setting("kivi", 3, frozenset({"mean"})),
    "gear-2": Setting("gear", 2),
    "xkv-2": Setting("xkv", 2.0),
    "cachegen-1": Setting("cachegen", 1),
    "cachegen-1-delta": Setting("cachegen", 1, frozenset({"delta"})),
    "fp8": Setting("fp8"),
}


def encode(
    world: World,
    setting: Setting,
    raw: torch.Tensor,
    *,
    tokens: int,
    profile: Profile | None = None,
    first_token: int | None = 64,
    after: int = 0,
    sinks: int = 4,
    window: int = 0,
) -> Encoded:
    """Encode a block; by default in the middle of a sequence, with no window."""
    needed = profile if setting.codec == "sq" else None
    encoder = Rival(world.layout, world.rope, setting, needed, sinks=sinks, window=window)
    return encoder.encode(raw, tokens=tokens, first_token=first_token, after=after)


def decode(
    world: World, blob: bytes | bytearray, tokens: int, profile: Profile | None = None
) -> torch.Tensor:
    """Decode a blob as a daemon would."""
    out = torch.empty(world.layout.nbytes(tokens), dtype=torch.uint8)
    Decoder(world.layout, world.rope, lambda _: profile).decode(parse(memoryview(blob)), out)
    return out

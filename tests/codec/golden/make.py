"""Writes the golden files beside it; run from the root of the repository.

    PYTHONPATH=tests python tests/codec/golden/make.py

Files that exist are left alone: what was once written stays readable. A new format version adds files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from support.choices import chosen_profile
from support.codec_world import YARN, World, kv, mla
from support.rivals import SETTINGS, decode, encode

from kvtcd.codec.choose import Decoder
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.kvtc2 import Kvtc2
from kvtcd.codec.lossless import Lossless
from kvtcd.codec.profile import SUFFIX
from kvtcd.core.blob import parse
from kvtcd.core.layout import Dtype

HERE = Path(__file__).parent
WORLDS = {
    "kv-float32": World(kv(Dtype.F32, layers=2)),
    "kv-bfloat16": World(kv(Dtype.BF16, layers=2)),
    "kv-float16": World(kv(Dtype.F16, layers=2)),
    "mla-yarn-bfloat16": World(mla(Dtype.BF16), YARN),
}
LOSSLESS = ("kv-float32", "kv-bfloat16", "kv-float16")
CODED = ("kv-bfloat16", "mla-yarn-bfloat16", "kv-float32")
TOKENS = 40
VERSION = 1


def write(name: str, data: bytes) -> None:
    """Write a file that is not there yet."""
    path = HERE / name
    if not path.exists():
        path.write_bytes(data)


def main() -> None:
    """Write all files of this version."""
    for name in LOSSLESS:
        world = WORLDS[name]
        raw = world.block(5, seed=40)
        raw[:4] = torch.tensor([float("nan")]).view(torch.uint8)
        blob = Lossless(world.layout).encode(raw, tokens=5, first_token=None, after=0).blob
        write(f"lossless-{VERSION}-{name}.blob", blob)
        write(f"lossless-{VERSION}-{name}.raw", bytes(raw.numpy()))
    for name in CODED:
        world = WORLDS[name]
        profile, data = world.profile(ratios=(4, 8))
        write(f"{profile.digest.hex()}{SUFFIX}", data)
        raw = world.block(TOKENS, seed=41)
        codec = Kvtc(world.layout, world.rope, profile, 4, window=8)
        blob = codec.encode(raw, tokens=TOKENS, first_token=0, after=0).blob
        out = torch.empty_like(raw)
        Decoder(world.layout, world.rope, lambda _, p=profile: p).decode(parse(memoryview(blob)), out)
        write(f"kvtc-{VERSION}-{name}.blob", blob)
        write(f"kvtc-{VERSION}-{name}.raw", bytes(out.numpy()))
        blob = Kvtc2(world.layout, world.rope, profile, 0.2, window=8).encode(
            raw, tokens=TOKENS, first_token=0, after=0
        )
        Decoder(world.layout, world.rope, lambda _, p=profile: p).decode(parse(memoryview(blob.blob)), out)
        write(f"kvtc2-{VERSION}-{name}.blob", blob.blob)
        write(f"kvtc2-{VERSION}-{name}.raw", bytes(out.numpy()))
    world = WORLDS["kv-bfloat16"]
    profile, data = chosen_profile(world)
    write(f"{profile.digest.hex()}{SUFFIX}", data)
    profile, _ = world.profile(ratios=(4, 8))
    for name, setting in SETTINGS.items():
        blob = encode(
            world,
            setting,
            world.block(TOKENS, seed=41),
            tokens=TOKENS,
            profile=profile,
            first_token=0,
            window=8,
        ).blob
        write(f"{name}-{VERSION}-kv-bfloat16.blob", blob)
        write(f"{name}-{VERSION}-kv-bfloat16.raw", bytes(decode(world, blob, TOKENS, profile).numpy()))


if __name__ == "__main__":
    main()

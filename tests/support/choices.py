"""Choices for `auto`, made up, and a profile that has them."""

from dataclasses import replace

from support.codec_world import World

from kvtcd.codec.choices import Candidate, Choice
from kvtcd.codec.profile import Profile, build
from kvtcd.core.policy import CodecChoice


def candidate(codec: CodecChoice, kl: float, errors: tuple[float, float] = (0.5, 0.25)) -> Candidate:
    """Make up what was measured of a codec."""
    return Candidate(
        codec, 4.5, kl, kl / 2, kl * 2, kl / 0.01, kl / 0.02, kl / 0.005, dict(zip("kv", errors, strict=True))
    )


CHOICES = (
    Choice(
        4.0, 8,
        (
            candidate(CodecChoice("tq", None, bits=3, options=("mean", "norm")), 0.01),
            candidate(CodecChoice("kvtc", 4), 0.02, (0.1, 0.3)),
            candidate(CodecChoice("fp8", None), 0.03),
        ),
    ),
    Choice(12.0, 8, (candidate(CodecChoice("kvtc2", 12), 0.01),)),
    Choice(
        2.0, 8,
        (
            candidate(CodecChoice("kivi", None, bits=4), 0.01),
            candidate(CodecChoice("cachegen", None, level=2, options=("delta",)), 0.04),
        ),
    ),
)  # fmt: skip


def chosen_profile(world: World, choices: tuple[Choice, ...] = CHOICES) -> tuple[Profile, bytes]:
    """Calibrate, and add the choices."""
    made = world.profile()[0]
    origin = replace(made.origin, choices=tuple(choice.to_json() for choice in choices))
    return build(origin, made.streams, made.weighted)

"""Encoders by policy and profile, or why one cannot be had."""

from __future__ import annotations

import torch

from kvtcd.codec.graphs import Graphs
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.kvtc2 import GUARD, Kvtc2
from kvtcd.codec.ports import Encoder
from kvtcd.codec.profile import Profile
from kvtcd.codec.rivals.coder import Rival
from kvtcd.codec.rivals.setting import Setting, obstacle
from kvtcd.codec.uniform import Arithmetic
from kvtcd.core.identity import Identity, Rope
from kvtcd.core.layout import Layout
from kvtcd.core.policy import CodecChoice


def expected_kl(profile: Profile, choice: CodecChoice) -> float | None:
    """Return what calibration measured where the dial stands, on its curve; only `kvtc2` has one."""
    curve = profile.curve if choice.name == "kvtc2" else None
    return None if curve is None else curve.at(curve.step_for(ratio=choice.ratio, max_kl=choice.max_kl)).kl


def encoder_for(
    identity: Identity,
    profile: Profile | None,
    choice: CodecChoice,
    device: torch.device,
    arithmetic: Arithmetic | None = None,
    *,
    graphs: Graphs | None = None,
) -> Encoder | str:
    """Return the encoder of canonical blocks that a policy asks for, or say why it cannot be had.

    Args:
        identity: the namespace.
        profile: that fits it; None for a codec that needs none.
        choice: of its policy; neither `lossless` nor `auto`.
        device: where raw blocks lie.
        arithmetic: of `Kvtc2`.
        graphs: of it and `Kvtc`.
    """
    layout, rope = identity.layout, identity.rope
    if profile and choice.name == "kvtc":
        return _kvtc(layout, rope, profile, choice, device, graphs=graphs)
    if profile and choice.name == "kvtc2":
        return _kvtc2(layout, rope, profile, choice, device, arithmetic=arithmetic, graphs=graphs)
    setting = Setting.of(choice)
    return obstacle(setting, identity) or Rival(
        layout, rope, setting, profile, sinks=choice.sinks, window=choice.window, device=device
    )


def _kvtc(
    layout: Layout, rope: Rope | None, profile: Profile, choice: CodecChoice, device: torch.device,
    *, graphs: Graphs | None,
) -> Encoder | str:  # fmt: skip
    """The encoder, or why it cannot be had."""
    ratio = int(choice.ratio or 0)
    if ratio != choice.ratio or ratio not in profile.ratios:
        known = ", ".join(str(ratio) for ratio in profile.ratios)
        return f"profile {profile.digest.hex()} has plans for {known}, not for {choice.dial}"
    if not any(stream.plans[ratio].rank for stream in profile.streams.values()):
        return f"ratio {ratio} leaves this small model no bit to code with"
    return Kvtc(
        layout, rope, profile, ratio,
        sinks=choice.sinks, window=choice.window, device=device, graphs=graphs,
    )  # fmt: skip


def _kvtc2(
    layout: Layout, rope: Rope | None, profile: Profile, choice: CodecChoice, device: torch.device,
    *, arithmetic: Arithmetic | None, graphs: Graphs | None,
) -> Encoder | str:  # fmt: skip
    """The encoder, or why it cannot be had."""
    curve = profile.curve
    if curve is None or not profile.weighted:
        return f"profile {profile.digest.hex()} has no rate-quality curve; run `kvtcd calibrate` again"
    try:
        step = curve.step_for(ratio=choice.ratio, max_kl=choice.max_kl)
    except ValueError as fault:
        return f"profile {profile.digest.hex()}: {fault}"
    without = choice.options
    return Kvtc2(
        layout, rope, profile, step,
        bound=None if "no-guard" in without else GUARD * curve.at(step).error,
        sinks=choice.sinks, window=0 if "no-recent" in without else choice.window,
        device=device, arithmetic=arithmetic, classes="no-classes" not in without, graphs=graphs,
    )  # fmt: skip

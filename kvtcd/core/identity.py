"""Whose bytes these are: everything that must agree before one block may stand for another.

Two caches with equal tokens are interchangeable only if model weights, adapter, RoPE, dtype, layout and
page format agree too. All of it is hashed into the namespace digest, and the digest goes into every key.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from kvtcd.core.errors import BadIdentity, UnsupportedRope
from kvtcd.core.forms import DECIMAL, Form, Pattern, Range, text
from kvtcd.core.layout import Layout, canonical_json
from kvtcd.core.message import Request

NAMESPACE_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
TRIAL = "kvtcd-doctor"
"""Namespaces of this name, or of one that goes on behind a dot, are trials; see `is_trial`."""
_TEXT = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,255}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_Text = Annotated[str, Pattern(_TEXT.pattern, "1 to 256 printable ASCII characters")]
_Decimal = Annotated[float, DECIMAL]
MAX_BLOCK_TOKENS = 1 << 16


class RopeKind(StrEnum):
    """How inverse frequencies follow from `theta`; the names are those of transformers."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


def _kind(name: str, value: Any) -> RopeKind:  # noqa: ANN401 - any JSON value
    if (given := text().read(name, value)) not in tuple(RopeKind):
        raise UnsupportedRope(given, tuple(RopeKind))
    return RopeKind(given)


_KIND = Form({"type": "string", "enum": [str(kind) for kind in RopeKind]}, _kind, str)


class Pairing(StrEnum):
    """Which two dimensions form a plane: ``i`` and ``i + rotary_dim/2``, or ``2i`` and ``2i + 1``."""

    HALVES = "halves"
    NEIGHBOURS = "neighbours"


_NEEDS = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
    RopeKind.YARN: ("factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor"),
}


@dataclass(frozen=True, slots=True)
class Rope(Request):
    """Rotary position embedding, complete enough to be undone.

    `rotary_dim` is the number of leading dimensions that are rotated (partial rotary: less than head_dim).
    YaRN's `attention_factor` multiplies cosine and sine; `truncate` (0 or 1) rounds its correction range.

    Raises:
        UnsupportedRope: a kind not in `RopeKind`.
        BadIdentity: a parameter missing for the kind, superfluous, or out of range.
    """

    fault: ClassVar = BadIdentity

    kind: Annotated[RopeKind, _KIND]
    theta: _Decimal
    rotary_dim: Annotated[int, Range(2)]
    pairing: Pairing = Pairing.HALVES
    factor: _Decimal | None = None
    low_freq_factor: _Decimal | None = None
    high_freq_factor: _Decimal | None = None
    original_max_position: Annotated[int, Range(1)] | None = None
    beta_fast: _Decimal | None = None
    beta_slow: _Decimal | None = None
    attention_factor: _Decimal | None = None
    truncate: Annotated[int, Range(0, 1)] | None = None

    def __post_init__(self) -> None:
        if self.kind not in RopeKind:
            raise UnsupportedRope(str(self.kind), tuple(RopeKind))
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise BadIdentity("rope.rotary_dim", f"{self.rotary_dim} is not an even number from 2 up")
        optional = {RopeKind.YARN: {"truncate"}}.get(self.kind, set())
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position", "beta_fast",
                     "beta_slow", "attention_factor", "truncate"):  # fmt: skip
            value = getattr(self, name)
            if value is None:
                if name in _NEEDS[self.kind]:
                    raise BadIdentity(f"rope.{name}", f"is needed for rope kind {self.kind}")
            elif name not in _NEEDS[self.kind] and name not in optional:
                raise BadIdentity(f"rope.{name}", f"has no meaning for rope kind {self.kind}")
        for name in ("theta", *_NEEDS[self.kind]):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise BadIdentity(f"rope.{name}", f"{getattr(self, name)} is not a positive number")


@dataclass(frozen=True, slots=True)
class Identity(Request):
    """Everything two engines must share to share blocks.

    Attributes:
        engine: program that made the cache, e.g. ``transformers``.
        hash_scheme: how its keys are made, e.g. ``kvtcd-chain-v1``.
        model: a name for people; `weights` is what counts.
        weights: 64 hex digits, digest of the model's weight files.
        adapter: 64 hex digits of the LoRA files, or ``none``.
        layout: streams, layers and dtype of the blocks.
        rope: how rotated streams were rotated; None when no stream is.
        scales: scheme of quantised caches, ``none`` for plain floats.
        block_tokens: tokens of a full block.
        page_format: how pages are laid out; ``canonical`` is that of `core.layout`.
        parallel: ``canonical`` for whole heads and layers, else e.g. ``tp2-rank0``.
    """

    fault: ClassVar = BadIdentity

    engine: _Text
    hash_scheme: _Text
    model: _Text
    weights: Annotated[str, Pattern(_DIGEST.pattern, "64 lower-case hex digits")]
    layout: Layout
    rope: Rope | None
    adapter: Annotated[str, Pattern(f"none|{_DIGEST.pattern}", "'none' or 64 lower-case hex digits")] = "none"
    scales: _Text = "none"
    block_tokens: Annotated[int, Range(1, MAX_BLOCK_TOKENS)] = 256
    page_format: _Text = "canonical"
    parallel: _Text = "canonical"

    def __post_init__(self) -> None:
        for name in ("engine", "hash_scheme", "model", "scales", "page_format", "parallel"):
            if not _TEXT.fullmatch(getattr(self, name)):
                raise BadIdentity(name, "is not 1 to 256 printable ASCII characters")
        if not _DIGEST.fullmatch(self.weights):
            raise BadIdentity("weights", "is not 64 lower-case hex digits")
        if self.adapter != "none" and not _DIGEST.fullmatch(self.adapter):
            raise BadIdentity("adapter", "is neither 'none' nor 64 lower-case hex digits")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise BadIdentity("block_tokens", f"{self.block_tokens} is not within 1..{MAX_BLOCK_TOKENS}")
        rotated = [s for s in self.layout.streams if s.rope]
        if rotated and self.rope is None:
            raise BadIdentity("rope", f"stream {rotated[0].name!r} is rotated, but no rope is given")
        if self.rope is not None:
            for stream in rotated:
                if self.rope.rotary_dim > stream.head_dim:
                    raise BadIdentity("rope.rotary_dim", f"is over head_dim {stream.head_dim}")

    def to_json(self) -> dict[str, object]:
        """Return the canonical JSON form."""
        body: dict[str, object] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in {"layout", "rope"}
        }
        body["layout"] = self.layout.to_json()
        body["rope"] = self.rope.to_json() if self.rope else None
        return body

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON, 32 bytes."""
        return hashlib.sha256(canonical_json(self.to_json())).digest()


def differing(a: Identity, b: Identity) -> tuple[str, ...]:
    """Name the fields in which two identities differ."""
    return tuple(f.name for f in fields(Identity) if getattr(a, f.name) != getattr(b, f.name))


def is_trial(name: str) -> bool:
    """Tell whether a namespace is there to try a daemon.

    Its blocks are in memory alone; neither they nor it are listed, told of, recorded or counted. A restart
    forgets it.
    """
    return name.partition(".")[0] == TRIAL

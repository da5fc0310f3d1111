"""Whose bytes these are: everything that must agree before one block may stand for another.

Two caches with equal tokens are interchangeable only if model weights, adapter, RoPE, dtype, layout and
page format agree too. All of it is hashed into the namespace digest, and the digest goes into every key.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from kvtcd.core.errors import BadIdentity, UnsupportedRope
from kvtcd.core.layout import Dtype, Layout, Stream, canonical_json

NAMESPACE_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
_TEXT = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,255}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_BLOCK_TOKENS = 1 << 16


class RopeKind(StrEnum):
    """How inverse frequencies follow from `theta`; the names are those of transformers."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


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
class Rope:
    """Rotary position embedding, complete enough to be undone.

    `rotary_dim` is the number of leading dimensions that are rotated (partial rotary: less than head_dim).
    YaRN's `attention_factor` multiplies cosine and sine; `truncate` (0 or 1) rounds its correction range.

    Raises:
        UnsupportedRope: a kind not in `RopeKind`.
        BadIdentity: a parameter missing for the kind, superfluous, or out of range.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    pairing: Pairing = Pairing.HALVES
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: int | None = None

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

    def to_json(self) -> dict[str, object]:
        """Return the canonical JSON form: floats as `repr` strings, absent parameters left out."""
        return {
            name: repr(value) if isinstance(value, float) else str(value) if isinstance(value, str) else value
            for name, value in asdict(self).items()
            if value is not None
        }


@dataclass(frozen=True, slots=True)
class Identity:
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

    engine: str
    hash_scheme: str
    model: str
    weights: str
    layout: Layout
    rope: Rope | None
    adapter: str = "none"
    scales: str = "none"
    block_tokens: int = 256
    page_format: str = "canonical"
    parallel: str = "canonical"

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

    @classmethod
    def from_json(cls, body: object) -> Identity:
        """Build from the form that `to_json` writes.

        Raises:
            BadIdentity: a field is missing, unknown, of the wrong type or out of range.
        """
        top = _mapping("identity", body)
        layout = _mapping("layout", top.get("layout"))
        names = {f.name for f in fields(cls)}
        _known("identity", top, names)
        _known("layout", layout, {"dtype", "layers", "streams"})
        streams = layout.get("streams")
        if not isinstance(streams, list):
            raise BadIdentity("layout.streams", "is not a list")
        try:
            dtype = Dtype(_typed("layout.dtype", layout.get("dtype"), str))
        except ValueError:
            raise BadIdentity("layout.dtype", f"is not one of {', '.join(Dtype)}") from None
        rest = {
            name: _typed(name, top[name], int if name == "block_tokens" else str)
            for name in names - {"layout", "rope"}
            if name in top
        }
        for name in ("engine", "hash_scheme", "model", "weights"):
            if name not in rest:
                raise BadIdentity(name, "is missing")
        return cls(
            layout=Layout(
                tuple(_stream(s) for s in streams),
                _typed("layout.layers", layout.get("layers"), int),
                dtype,
            ),
            rope=None if top.get("rope") is None else rope_from_json(top["rope"]),
            **rest,
        )


def differing(a: Identity, b: Identity) -> tuple[str, ...]:
    """Name the fields in which two identities differ."""
    return tuple(f.name for f in fields(Identity) if getattr(a, f.name) != getattr(b, f.name))


def rope_from_json(body: object) -> Rope:
    """Build a `Rope` from the form that `Rope.to_json` writes.

    Raises:
        UnsupportedRope: a kind that cannot be undone.
        BadIdentity: any other fault.
    """
    given = _mapping("rope", body)
    _known("rope", given, {f.name for f in fields(Rope)})
    kind = _typed("rope.kind", given.get("kind"), str)
    if kind not in tuple(RopeKind):
        raise UnsupportedRope(kind, tuple(RopeKind))
    pairing = _typed("rope.pairing", given.get("pairing", Pairing.HALVES), str)
    if pairing not in tuple(Pairing):
        raise BadIdentity("rope.pairing", f"is not one of {', '.join(Pairing)}")
    integers = ("rotary_dim", "original_max_position", "truncate")
    rest: dict[str, Any] = {}
    for name, value in given.items():
        if name in integers:
            rest[name] = _typed(f"rope.{name}", value, int)
        elif name not in {"kind", "pairing"}:
            rest[name] = _float(f"rope.{name}", value)
    for name in ("theta", "rotary_dim"):
        if name not in rest:
            raise BadIdentity(f"rope.{name}", "is missing")
    return Rope(kind=RopeKind(kind), pairing=Pairing(pairing), **rest)


def _stream(body: object) -> Stream:
    given = _mapping("layout.streams", body)
    _known("layout.streams", given, {"name", "heads", "head_dim", "rope"})
    rope = _typed("layout.streams.rope", given.get("rope"), int)
    if rope not in (0, 1):
        raise BadIdentity("layout.streams.rope", "is neither 0 nor 1")
    return Stream(
        name=_typed("layout.streams.name", given.get("name"), str),
        heads=_typed("layout.streams.heads", given.get("heads"), int),
        head_dim=_typed("layout.streams.head_dim", given.get("head_dim"), int),
        rope=bool(rope),
    )


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadIdentity(field, "is not a JSON object")
    return value


def _known(field: str, given: Mapping[str, Any], names: set[str]) -> None:
    if unknown := sorted(set(given) - names):
        raise BadIdentity(f"{field}.{unknown[0]}", "is not a known field")


def _typed(field: str, value: object, kind: type) -> Any:  # noqa: ANN401 - checked against `kind` right here
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadIdentity(field, f"is not {'an integer' if kind is int else 'a string'}")
    return value


def _float(field: str, value: object) -> float:
    """Read a float from its `repr` string, the spelling on which every writer agrees."""
    try:
        return float(_typed(field, value, str))
    except ValueError:
        raise BadIdentity(field, "is not a number written as a string") from None

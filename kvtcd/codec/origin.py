"""Where a profile comes from: the model it was made for, and the tokens it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtcd.core.errors import BadField, BadIdentity, BadVersion, ProfileMismatch
from kvtcd.core.identity import Identity, Rope
from kvtcd.core.layout import Layout, Stream

_FORMAT, _WITH_CHOICES = 2, 3
"""Profiles without choices for `auto` are written as they ever were."""
_READ = (1, _FORMAT, _WITH_CHOICES)
_FIRST = {"sensitivity": "none"}
"""Fields that format 1 did not have, and what they say of its files."""
_LISTS = frozenset({"choices", "curve", "streams", "texts"})
_INTEGERS = frozenset({"layers", "seed", "sinks", "tokens"})

ENOUGH_TOKENS = 8192
"""Fewer are a bad bargain (`lab/measured.md`, Calibration)."""


@dataclass(frozen=True, slots=True)
class Text:
    """A calibration text: its name and the SHA-256 of its bytes, 64 hex digits."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Model and calibration data of a profile.

    Attributes:
        model: a name for people.
        weights: digest of the weight files, 64 hex digits.
        adapter: digest of the LoRA files, or ``none``.
        rope: how rotated streams were rotated; None when no stream is.
        streams: of the layout, in order.
        layers: of the layout.
        parallel: which part of the model, as in the identity.
        sinks: first tokens of every sequence that calibration left out.
        tokens: rows that mean and basis were fitted on.
        texts: what those rows came from.
        seed: of every random choice.
        version: of kvtcd.
        sensitivity: how the weights of the weighted basis were estimated: ``fisher``, ``attention``, or
            ``none``, where all errors weigh alike.
        curve: rate and quality of `kvtc2` on held-out text (`codec.dial`); empty if not measured.
        choices: what `auto` stands for (`codec.choices`); empty if nothing was chosen.
    """

    model: str
    weights: str
    adapter: str
    rope: Rope | None
    streams: tuple[Stream, ...]
    layers: int
    parallel: str
    sinks: int
    tokens: int
    texts: tuple[Text, ...]
    seed: int
    version: str
    sensitivity: str = "none"
    curve: tuple[Mapping[str, int | str], ...] = ()
    choices: tuple[Mapping[str, Any], ...] = ()

    @property
    def starved(self) -> str | None:
        """What to think of a profile that was fitted to few tokens; None where they were enough."""
        if self.tokens >= ENOUGH_TOKENS:
            return None
        return (
            f"fitted to {self.tokens:,} tokens, fewer than {ENOUGH_TOKENS:,}: divergence is a multiple of "
            "what more tokens give, and the guard of kvtc2 may store most blocks losslessly, whatever its "
            "curve says; calibrate on more tokens"
        )

    def check(self, identity: Identity) -> None:
        """Compare with a namespace.

        Raises:
            ProfileMismatch: another model, adapter, RoPE, set of streams, part of the model, or scaled
            values.
        """
        layout = identity.layout
        pairs = {
            "weights digest": (identity.weights, self.weights),
            "adapter digest": (identity.adapter, self.adapter),
            "rope": (identity.rope, self.rope),
            "streams": (layout.streams, self.streams),
            "layers": (layout.layers, self.layers),
            "parallel part": (identity.parallel, self.parallel),
            "scales": (identity.scales, "none"),
        }
        for what, (want, got) in pairs.items():
            if want != got:
                raise ProfileMismatch(what, want, got)

    def check_shapes(self, layout: Layout, rope: Rope | None) -> None:
        """Compare streams, layers and RoPE alone.

        Raises:
            ProfileMismatch: one of them differs.
        """
        for what, want, got in (
            ("streams", layout.streams, self.streams),
            ("layers", layout.layers, self.layers),
            ("rope", rope, self.rope),
        ):
            if want != got:
                raise ProfileMismatch(what, want, got)

    def to_json(self) -> dict[str, object]:
        """Return the canonical JSON form."""
        chosen = {"choices": [dict(row) for row in self.choices]} if self.choices else {}
        return chosen | {
            "adapter": self.adapter,
            "curve": [dict(row) for row in self.curve],
            "format": _WITH_CHOICES if self.choices else _FORMAT,
            "layers": self.layers,
            "model": self.model,
            "parallel": self.parallel,
            "rope": self.rope.to_json() if self.rope else None,
            "seed": self.seed,
            "sensitivity": self.sensitivity,
            "sinks": self.sinks,
            "streams": [
                {"head_dim": s.head_dim, "heads": s.heads, "name": s.name, "rope": int(s.rope)}
                for s in self.streams
            ],
            "texts": [{"name": text.name, "sha256": text.sha256} for text in self.texts],
            "tokens": self.tokens,
            "version": self.version,
            "weights": self.weights,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Origin:
        """Build from the form that `to_json` writes.

        Raises:
            BadVersion: of another format version.
            BadField: a field is missing, superfluous or out of range.
        """
        try:
            fields = dict(body)
            version = fields.pop("format")
            if type(version) is not int or version not in _READ:
                raise BadVersion("profile", f"format {version}; this release reads 1 to {_WITH_CHOICES}")
            if ("choices" in fields) is not (version == _WITH_CHOICES):
                raise BadField("profile", f"metadata: choices do not belong to format {version}")
            if version == 1:
                fields = _FIRST | fields
            rope = fields.pop("rope")
            for name, value in fields.items():
                if type(value) is not (list if name in _LISTS else int if name in _INTEGERS else str):
                    raise BadField("profile", f"metadata: {name} is {value!r}")
            return cls(
                rope=None if rope is None else Rope.from_json(rope),
                streams=tuple(Stream(**{**s, "rope": bool(s["rope"])}) for s in fields.pop("streams")),
                texts=tuple(Text(**text) for text in fields.pop("texts")),
                curve=tuple(fields.pop("curve")),
                choices=tuple(fields.pop("choices", ())),
                **fields,
            )
        except (TypeError, ValueError, KeyError, AttributeError, BadIdentity) as fault:
            raise BadField("profile", f"metadata: {fault}") from None

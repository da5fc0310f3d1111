"""What a rival was told, as its blobs say it: where the dial stands, options, and the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtcd.core.blob import BasisId, CodecId, Header
from kvtcd.core.dials import DIALS, OPTIONS, CodecName
from kvtcd.core.errors import BadField
from kvtcd.core.identity import Identity
from kvtcd.core.policy import CodecChoice

CODECS: dict[CodecName, CodecId] = {
    "tq": CodecId.TQ,
    "tq-prod": CodecId.TQ_PROD,
    "qjl": CodecId.QJL,
    "sq": CodecId.SQ,
    "kivi": CodecId.KIVI,
    "gear": CodecId.GEAR,
    "xkv": CodecId.XKV,
    "cachegen": CodecId.CACHEGEN,
    "fp8": CodecId.FP8,
}
_NAMES = {codec: name for name, codec in CODECS.items()}
_SEED_BITS = 16
_MAX_RATIO = 10_000
_LOW_RANK_TOKENS = 64
"""Tokens of a block below which the low-rank part of GEAR takes more room than it is worth."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a rival works.

    Attributes:
        codec: which.
        dial: bits, a level or a ratio, as the codec has it; 0: it has none.
        options: see `core.dials`.
        seed: of all that is random, below ``2**16``.
    """

    codec: CodecName
    dial: float = 0
    options: frozenset[str] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        """Round the dial to what a header can hold, so that encoder and decoder have the same."""
        object.__setattr__(self, "dial", float(np.float32(self.dial)))

    @classmethod
    def of(cls, choice: CodecChoice) -> Setting:
        """Return what a policy asks for."""
        dial = choice.bits or choice.level or (choice.ratio if DIALS[choice.name].names else 0)
        return cls(choice.name, dial or 0, frozenset(choice.options))

    @classmethod
    def read(cls, header: Header) -> Setting:
        """Return what a blob was written with.

        Raises:
            BadField: no rival can have written this.
        """
        name = _NAMES[header.codec]
        dial, flags, seed = DIALS[name], header.plan & 0xFFFF, header.plan >> _SEED_BITS
        options = tuple(word for bit, word in enumerate(OPTIONS) if flags >> bit & 1)
        field = dial.names[0] if dial.names else ""
        fault = dial.fault(name, {field: header.step}) if field else None
        strange = dial.strange(name, options) or (fault and fault[1])
        if strange or flags >> len(OPTIONS) or not (header.step > 1 if field == "ratio" else True):
            raise BadField("blob", strange or f"options {flags:#x} and a dial of {header.step:g}")
        if not 0 <= header.step <= _MAX_RATIO or not (field or header.step == 0):
            raise BadField("blob", f"a dial of {header.step:g}")
        if header.basis is not (BasisId.PLAIN if dial.calibrated else BasisId.NONE) or header.token_classes:
            raise BadField("blob", f"{name} knows no basis {header.basis}, {header.token_classes} classes")
        return cls(name, header.step, frozenset(options), seed)

    @property
    def plan(self) -> int:
        """What the header's `plan` holds: a bit for each option, and the seed above."""
        return sum(1 << OPTIONS.index(word) for word in self.options) | self.seed << _SEED_BITS

    @property
    def bits(self) -> int:
        """The dial of codecs that take bits."""
        return int(self.dial)


def obstacle(setting: Setting, identity: Identity) -> str | None:
    """Say why a rival cannot be had for a namespace, if so."""
    if setting.codec == "gear" and identity.block_tokens < _LOW_RANK_TOKENS:
        return f"gear needs blocks of {_LOW_RANK_TOKENS} tokens, and these have {identity.block_tokens}"
    return None

"""What each codec is asked for: its dial, and the words that change how it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

CodecName = Literal[
    "kvtc",
    "kvtc2",
    "lossless",
    "tq",
    "tq-prod",
    "qjl",
    "sq",
    "kivi",
    "gear",
    "xkv",
    "cachegen",
    "fp8",
    "auto",
]
DialName = Literal["ratio", "max_kl", "bits", "level"]
OPTIONS = ("mean", "haar", "norm", "unbiased", "raw", "delta")
"""Every option that a blob names. The place of one is its bit there: new ones go to the end."""


@dataclass(frozen=True, slots=True)
class Dial:
    """What may be asked of one codec.

    Attributes:
        names: of what it takes, of which one is to be said; none: it has no dial.
        lowest, highest: bounds of `bits` and `level`, which are whole numbers.
        options: words that it knows.
        calibrated: whether it needs a profile.
    """

    names: tuple[DialName, ...] = ()
    lowest: int = 0
    highest: int = 0
    options: tuple[str, ...] = ()
    calibrated: bool = False

    def takes(self, codec: str) -> str:
        """Say what it takes, for people."""
        if not self.names:
            return f"{codec} has no dial"
        if self.highest:
            return f"{codec} takes {self.names[0]}, a whole number from {self.lowest} to {self.highest}"
        wanted = {"ratio": "a ratio", "max_kl": "max_kl (nats per token)"}
        either = "either " if len(self.names) > 1 else ""
        return f"{codec} takes {either}{' or '.join(wanted[name] for name in self.names)}"

    def fault(self, codec: str, asked: Mapping[str, float | None]) -> tuple[str, str] | None:
        """Return which field is wrong with what was asked for, and why."""
        said = {name: value for name, value in asked.items() if value is not None}
        for name in said:
            if name not in self.names:
                return name, self.takes(codec)
        if self.names and len(said) != 1:
            return self.names[-1], f"{self.takes(codec)}: say one of them" if said else self.takes(codec)
        for name, value in said.items():
            if self.highest and not (self.lowest <= value <= self.highest and value == int(value)):
                return name, self.takes(codec)
        return None

    def strange(self, codec: str, options: tuple[str, ...]) -> str | None:
        """Say what is wrong with options, if anything."""
        for number, option in enumerate(options):
            if option not in self.options:
                known = " and ".join(self.options) or "no options"
                return f"{codec} does not know {option!r}; it knows {known}"
            if option in options[:number]:
                return f"{option!r} is there twice"
        if len({"norm", "unbiased", "raw"} & set(options)) > 1:
            return "of 'norm', 'unbiased' and 'raw' there can be but one"
        return None


DIALS: Mapping[CodecName, Dial] = MappingProxyType(
    {
        "kvtc": Dial(("ratio",), calibrated=True),
        "kvtc2": Dial(("ratio", "max_kl"), options=("no-classes", "no-recent", "no-guard"), calibrated=True),
        "lossless": Dial(),
        "tq": Dial(("bits",), 1, 8, ("mean", "haar", "norm", "unbiased")),
        "tq-prod": Dial(("bits",), 1, 8, ("mean", "haar")),
        "qjl": Dial(("bits",), 1, 8, ("mean",)),
        "sq": Dial(("bits",), 1, 8, ("norm", "raw"), calibrated=True),
        "kivi": Dial(("bits",), 1, 7, ("mean",)),
        "gear": Dial(("bits",), 1, 7, ("mean",)),
        "xkv": Dial(("ratio",), options=("mean",)),
        "cachegen": Dial(("level",), 1, 3, ("delta", "mean")),
        "fp8": Dial(options=("mean",)),
        "auto": Dial(("ratio",), calibrated=True),
    }
)

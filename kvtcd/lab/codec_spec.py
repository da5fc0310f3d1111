"""Codecs as a command line names them: ``NAME``, ``NAME:dial`` or ``NAME:dial,option,…``.

For codecs that take a ratio, a dial below 1 is the most divergence there may be, in nats per token; others
take bits or a level (`core.dials`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvtcd.core.dials import DIALS, CodecName
from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import CodecChoice

_OPTION = "--codec"


@dataclass(frozen=True, slots=True)
class Spec:
    """A codec, and where its dial stands.

    Attributes:
        name: of the codec.
        dial: a ratio, a divergence, bits or a level; None: it has no dial, or the dial is to be swept.
        options: words that it knows.
    """

    name: CodecName
    dial: float | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read ``kvtc:16``, ``kvtc2:0.02``, ``kvtc``, ``lossless``, ``tq:3,mean`` or ``tq,mean``.

        Raises:
            ConfigError: no such codec, or a dial or an option that it does not have.
        """
        head, *options = text.split(",")
        name, colon, dial = head.partition(":")
        known = {known: known for known in get_args(CodecName)}
        if name not in known:
            raise ConfigError(_OPTION, "", f"{name!r} is not one of {', '.join(known)}")
        if colon and not DIALS[known[name]].names:
            raise ConfigError(_OPTION, "", f"{text!r}: {name} has no dial")
        spec = cls(known[name], _number(text, dial) if colon else None, tuple(options))
        why = DIALS[spec.name].strange(name, spec.options)
        try:
            if not why and not spec.swept:
                spec.choice(sinks=0, window=0)
        except ValueError as error:
            why = str(error)
        if why:
            raise ConfigError(_OPTION, "", f"{text!r}: {why}")
        return spec

    def __str__(self) -> str:
        return spelled(self.codec, self.dial)

    @property
    def codec(self) -> str:
        """The codec with its options, wherever its dial stands."""
        return ",".join((self.name, *self.options))

    @property
    def swept(self) -> bool:
        """Whether the dial is left to be swept."""
        return self.dial is None and bool(DIALS[self.name].names)

    def choice(self, *, sinks: int = 4, window: int = 128) -> CodecChoice:
        """Return what a policy with this codec says.

        Raises:
            ValueError: the dial cannot stand there.
        """
        names = DIALS[self.name].names
        if not names:
            return CodecChoice(self.name, None, sinks, window, options=self.options)
        name = "max_kl" if "ratio" in names and self.dial is not None and self.dial < 1 else names[0]
        whole = self.dial is not None and name in {"bits", "level"} and self.dial == int(self.dial)
        dial = {"ratio": None, name: int(self.dial) if whole and self.dial else self.dial}
        return CodecChoice(self.name, sinks=sinks, window=window, options=self.options, **dial)  # type: ignore[arg-type]  # numbers, checked there


def policy_text(choice: CodecChoice) -> str:
    """Return a policy file that says `choice`; further tables may follow it."""
    asked = ((name, getattr(choice, name)) for name in DIALS[choice.name].names)
    lines = [f"{name} = {value}" for name, value in asked if value is not None]
    if choice.options:
        lines.append(f"options = {list(choice.options)}")
    return "\n".join(["[codec]", f'name = "{choice.name}"', *lines, ""])


def spelled(codec: str, dial: float | None) -> str:
    """Return a codec with its options, and where its dial stands, as the command line has it."""
    name, comma, options = codec.partition(",")
    return codec if dial is None else f"{name}:{dial:g}{comma}{options}"


def _number(text: str, dial: str) -> float:
    try:
        number = float(dial)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            _OPTION, "", f"{text!r}: the dial is no number above zero: a ratio, a divergence, bits or a level"
        )
    return number

"""Whether texts are held out: not among those that a profile was made from, whole or in part.

A profile knows its texts by their digests, so one that was edited or cut cannot be told by them. Those of the
recipe are here, though: what shares many windows of words with one that a profile was made from is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtcd.codec.origin import Text as Source
from kvtcd.core.errors import ConfigError
from kvtcd.lab import texts
from kvtcd.lab.calibration import digest_of
from kvtcd.lab.texts import Text

_WORDS = 8
"""Of a window; two texts of different origin rarely share one."""
_SHARED = 0.1
"""Share of windows that headings, licences and quotations do not come to."""


def check(sources: Sequence[Text], made_from: Sequence[Source]) -> None:
    """Refuse texts that a profile was made from.

    Raises:
        ConfigError: one was, or a good part of it.
    """
    check_digests([Source(source.name, digest_of(source)) for source in sources], made_from)
    known = {source.sha256 for source in made_from}
    for other in texts.recipe():
        if digest_of(other) in known:
            whole = _windows(other.text)
            for source in sources:
                if (share := _share(_windows(source.text), whole)) >= _SHARED:
                    raise ConfigError(
                        source.name,
                        "",
                        f"has {share:.0%} of its runs of {_WORDS} words in {other.name} of the recipe, which "
                        "the profile was made from; take a text that is held out",
                    )


def check_digests(sources: Sequence[Source], made_from: Sequence[Source]) -> None:
    """Refuse texts whose digests are among those that a profile was made from.

    Raises:
        ConfigError: one is.
    """
    known = {source.sha256 for source in made_from}
    if used := [source.name for source in sources if source.sha256 in known]:
        raise ConfigError(
            ", ".join(used), "", "is a text that the profile was made from; nothing of it is held out"
        )


def _windows(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + _WORDS]) for at in range(len(words) - _WORDS + 1)}


def _share(own: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return len(own & other) / len(own) if own else 0.0

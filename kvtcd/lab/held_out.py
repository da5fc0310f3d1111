"""Whether texts are held out: not among those that a profile was made from, whole or in part.

A profile knows its texts by their digests, so one that was edited or cut cannot be told by them. Those of the
recipe are here, though: what shares many runs of words with one that a profile was made from is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtcd.codec.origin import Text as Known
from kvtcd.core.errors import ConfigError
from kvtcd.lab import runs, texts
from kvtcd.lab.calibration import digest_of
from kvtcd.lab.dump import Source
from kvtcd.lab.texts import Text

_SHARED = 0.1
"""Share of runs that headings, licences and quotations do not come to."""


def source(text: Text) -> Source:
    """Return what a text is known by."""
    return Source(text.name, digest_of(text), runs.sample(text.text))


def check(sources: Sequence[Source], made_from: Sequence[Known]) -> None:
    """Refuse texts that a profile was made from; of those whose runs are not known, whole ones.

    Raises:
        ConfigError: one was, or a good part of it.
    """
    known = {text.sha256 for text in made_from}
    if used := [own.name for own in sources if own.sha256 in known]:
        raise ConfigError(
            ", ".join(used), "", "is a text that the profile was made from; nothing of it is held out"
        )
    for other in texts.recipe():
        if digest_of(other) in known:
            whole = runs.digests(other.text)
            for own in sources:
                if own.runs and (share := len(whole.intersection(own.runs)) / len(own.runs)) >= _SHARED:
                    raise ConfigError(
                        own.name,
                        "",
                        f"has {share:.0%} of its runs of {runs.WORDS} words in {other.name} of the recipe, "
                        "which the profile was made from; take a text that is held out",
                    )

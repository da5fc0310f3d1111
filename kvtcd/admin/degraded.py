"""What is wrong with a daemon that serves all the same, in words for operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvtcd.core.messages import Fault

WORDS: dict[Fault, str] = {
    "left-out": "tenants are refused: their disk environment could not be opened at the start",
    "set-aside": "damaged disk environments are set aside, until they are purged or moved away",
    "other-key": "tenants on disk are under another master key, and nothing of theirs is served",
    "out-of-use": "disk environments failed, and are out of use until the next start",
    "remote-away": "the store that is shared with other daemons does not answer",
    "remote-refuses": "the store that is shared with other daemons takes no blocks, and they wait",
    "unknown-gpu": "policies name GPUs for which the start has prepared nothing, and have to do without",
}


def said(degraded: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each fault that a daemon names in its figures; a later release may know others."""
    words: Mapping[str, str] = {str(fault): text for fault, text in WORDS.items()}
    for fault, count in degraded.items():
        yield f"{fault} ({count:,}): {words.get(fault, 'see the log')}"

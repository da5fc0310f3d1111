"""`kvtcd check`: what a start would refuse is refused, by the same code, and nothing is begun.

Nothing is made, held or left behind, and a daemon that runs meanwhile does not notice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvtcd import bootstrap, entrance
from kvtcd.config import Config
from kvtcd.config.remote import CREDENTIAL as REMOTE
from kvtcd.systemd import credential
from kvtcd.tiers.state import MASTER_KEY


def examine(config: Config) -> Iterator[str]:
    """Yield what is worth knowing before a start; credentials and sockets are those of this process.

    Raises:
        ConfigError, Unavailable: what `serve` would end with.
    """
    handed = entrance.handed_over(config)
    master, entry = credential(os.environ, MASTER_KEY), credential(os.environ, REMOTE)
    doors = entrance.Entrance(config, handed)
    found = bootstrap.examine(config, master=master, remote=entry)
    taken = entrance.examine(config, handed, busy=found.held)
    yield f"policies in effect: {', '.join(policy.name for policy in found.policies)}"
    yield from found.notes
    if doors.tokens:
        yield f"tokens: {len(doors.tokens)}"
    if doors.tls:
        yield f"the certificate ends on {doors.tls.ends:%Y-%m-%d}"
    if found.held:
        yield f"a daemon, or a command of an operator, uses {config.daemon.state} now"
    elif taken:
        yield f"somebody listens on {config.daemon.socket} now: a daemon, or its service manager"

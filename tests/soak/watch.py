"""What the kernel says of a process, and whether it grows."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from scipy.stats import theilslopes

Sample = dict[str, float]
STRETCHES = 30
"""Of the last third."""


class Watch:
    """What the kernel says of the daemon, a sample every so often.

    Memory is its own (`RssAnon`): the host tier's slab, what fills by design, and what should not grow. By
    design fill the index (by the blocks that are known, so these are watched as well), the last 8,192 notices
    of each tenant, and within an hour 360 samples of history, a third of a MiB.
    """

    def __init__(self, pid: int) -> None:
        self.proc = Path(f"/proc/{pid}")
        self.began = time.monotonic()
        self.samples: list[Sample] = []
        self.named: set[str] = set()
        """Files in ``/dev/shm`` that it has mapped."""

    def look(self, blocks: int) -> None:
        """Take a sample, while the daemon knows so many blocks."""
        status = (self.proc / "status").read_text()
        mapped = (self.proc / "maps").read_text()
        self.named.update(re.findall(r"/dev/shm/\S+", mapped))  # noqa: S108 - looked at only
        self.samples.append(
            {
                "minute": (time.monotonic() - self.began) / 60,
                "mib": int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024,
                "descriptors": len(list((self.proc / "fd").iterdir())),
                "shared": mapped.count("memfd:"),
                "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
                "blocks": blocks,
            }
        )


def slope(samples: Sequence[Sample], what: str) -> dict[str, float]:
    """Return the growth an hour (Theil and Sen) with its 95 % interval, in the last third of a run.

    The two thirds before are left out. Allocators keep what a peak has taken once, and a process that does
    the same all the time still sets records, though ever more rarely: as many while the run grows from a
    third to all of its length as from a ninth to a third. What leaks goes on in proportion to time. Of each
    of some stretches the least counts, what is held on to between requests.
    """
    late = [one for one in samples if one["minute"] > samples[-1]["minute"] * 2 / 3]
    size = max(1, len(late) // STRETCHES)
    parts = [late[i : i + size] for i in range(0, len(late) - size + 1, size)]
    least = [min(part, key=lambda one: one[what]) for part in parts]
    found = theilslopes([one[what] for one in least], [one["minute"] / 60 for one in least])
    return {"an_hour": float(found.slope), "lo": float(found.low_slope), "hi": float(found.high_slope)}

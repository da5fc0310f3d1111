"""What the kernel says of a process, and whether it grows."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path

from scipy.stats import theilslopes


class Watch:
    """What the kernel says of the daemon, a sample every so often.

    Memory is its own (`RssAnon`): the host tier's slab, what fills by design, and what should not grow. By
    design fill, within minutes here, the index (by the blocks that are known) and the 8,192 notices of each
    tenant; and within an hour 360 samples of history, a quarter of a MiB. So judged is the second half, and
    `blocks` are watched beside memory: as long as they grow, memory has to.
    """

    def __init__(self, pid: int) -> None:
        self.proc = Path(f"/proc/{pid}")
        self.began = time.monotonic()
        self.samples: list[dict[str, float]] = []

    def look(self, blocks: int) -> None:
        """Take a sample, while the daemon knows so many blocks."""
        status = (self.proc / "status").read_text()
        mapped = (self.proc / "maps").read_text()
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

    def slope(self, what: str) -> dict[str, float]:
        """Return the growth an hour (Theil and Sen) with its 95 % interval, over medians of thirty stretches.

        The first half is left out, in which what is bounded fills. Stretches are long beside the time for
        which one sample depends on the one before.
        """
        late = [one for one in self.samples if one["minute"] > self.samples[-1]["minute"] / 2]
        size = max(1, len(late) // 30)
        parts = [late[i : i + size] for i in range(0, len(late) - size + 1, size)]
        values = [statistics.median(one[what] for one in part) for part in parts]
        hours = [statistics.median(one["minute"] for one in part) / 60 for part in parts]
        found = theilslopes(values, hours)
        return {"an_hour": float(found.slope), "lo": float(found.low_slope), "hi": float(found.high_slope)}

"""How long a test waits for what normally takes no time."""

from __future__ import annotations

PATIENCE_S = 120.0
"""Seconds. It ends a hang; where all is well nobody waits so long, however busy the machine is."""

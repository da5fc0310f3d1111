"""What can happen to files of a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def unreadable(environment: Path) -> None:
    """Have opening a tenant's environment fail, and not for damage, as for want of a right to it."""
    (data,) = environment.glob("*/data.mdb")
    data.unlink()
    data.mkdir()

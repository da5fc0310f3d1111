"""What is stored in an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtcd.tiers.disk import Environment


def keys_in(environment: Environment) -> list[bytes]:
    return [key for page in environment.scan() for key in page.keys]

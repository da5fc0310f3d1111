"""Which releases of transformers take our caches, told without loading one."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from kvtcd.core.errors import Unavailable

MINIMUM = (5, 24)
"""The first release whose models name the argument `cache`; older ones pass over what they do not know."""


def require_release() -> None:
    """Refuse to go on with a transformers that would leave out the cache it is given, without a word.

    Raises:
        Unavailable: transformers is older than `MINIMUM`, or not installed.
    """
    needed = ".".join(map(str, MINIMUM))
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = "none"
    found = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if found < MINIMUM:
        raise Unavailable(
            f"transformers {needed} or later is needed, {installed} is installed: "
            f'pip install "transformers>={needed},<6"'
        )

"""What a user imports: a client for threads, `Client`, and one for asyncio, `AsyncClient`.

Importing this loads no tensor library and no HTTP library; `AsyncClient` brings aiohttp when it is asked for.

Example:
    >>> from kvtcd.client import BlockHead, Client
    >>> client = Client("/run/kvtcd/kvtcd.sock")  # connects when it is first used
    >>> client.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtcd.client.sync import Client
from kvtcd.core.matches import BlockMatch, LeaseInfo, Matches
from kvtcd.core.messages import BlockHead, BlockResult, Info, NamespaceInfo, Removed
from kvtcd.core.notices import Notice, What
from kvtcd.core.operation import Operation

if TYPE_CHECKING:
    from kvtcd.client.aio import AsyncClient

__all__ = [
    "AsyncClient",
    "BlockHead",
    "BlockMatch",
    "BlockResult",
    "Client",
    "Info",
    "LeaseInfo",
    "Matches",
    "NamespaceInfo",
    "Notice",
    "Operation",
    "Removed",
    "What",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the class, when it is asked for
    if name == "AsyncClient":
        from kvtcd.client.aio import AsyncClient  # noqa: PLC0415 - loads aiohttp

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

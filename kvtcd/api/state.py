"""What handlers share: the keys under which an application and its requests keep things."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvtcd.api.limits import InFlight, Limits, Traffic
from kvtcd.api.operations import Operations
from kvtcd.api.refusals import Refusals
from kvtcd.api.regions import Regions
from kvtcd.api.tls import Tls
from kvtcd.core.access import Caller, Scope
from kvtcd.engine.service import Service

SERVICE = web.AppKey("service", Service)
LIMITS = web.AppKey("limits", Limits)
IN_FLIGHT = web.AppKey("in_flight", InFlight)
TRAFFIC = web.AppKey("traffic", Traffic)
REFUSALS = web.AppKey("refusals", Refusals)
OPERATIONS = web.AppKey("operations", Operations)
REGIONS = web.AppKey("regions", Regions)
AUTHENTICATE: web.AppKey[Callable[[web.Request], Caller]] = web.AppKey("authenticate")
PEER: web.AppKey[Callable[[socket.socket], Caller]] = web.AppKey("peer")
TLS: web.AppKey[Tls | None] = web.AppKey("tls")
"""Of those who come by TCP; None: nothing is encrypted, and only this host can come."""
DOCUMENT = web.AppKey("document", bytes)
RELOAD: web.AppKey[Callable[[], Awaitable[None]]] = web.AppKey("reload")

TENANT = web.RequestKey("tenant", str)
SCOPES = web.RequestKey("scopes", frozenset[Scope])

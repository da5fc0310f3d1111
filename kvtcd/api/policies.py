"""Routes of policies: which are in effect, and reading them anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from aiohttp import web

from kvtcd.api.bodies import json_response
from kvtcd.api.parameters import DEADLINE, Deadline, refuse_if_stopping
from kvtcd.api.route import reply, route
from kvtcd.api.state import RELOAD, SERVICE, TENANT
from kvtcd.core.access import Scope
from kvtcd.core.errors import ConfigError, DeadlineExceeded
from kvtcd.core.message import INLINE, Answer
from kvtcd.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Governing(Answer):
    """A policy, and the namespaces of the caller that it governs."""

    policy: Annotated[Policy, INLINE]
    namespaces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Policies(Answer):
    """All of them, in order."""

    policies: tuple[Governing, ...]


def _policies(request: web.Request) -> web.Response:
    policies = request.app[SERVICE].policies(request[TENANT])
    return json_response(Policies(tuple(Governing(policy, tuple(names)) for policy, names in policies)))


@route("GET", "/v1/policies", replies={200: reply("In effect.", Policies)})
async def listing(request: web.Request) -> web.Response:
    """Show the policies in order, each with the namespaces of the caller that it governs."""
    return _policies(request)


@route(
    "POST", "/v1/policies:reload", DEADLINE, scope=Scope.ADMIN,
    replies={200: reply("In effect from now on.", Policies)}, raises=(ConfigError, DeadlineExceeded),
)  # fmt: skip
async def reload(request: web.Request) -> web.Response:
    """Read the policy files anew: all of them are right and in effect, or nothing has changed."""
    refuse_if_stopping(request)
    async with Deadline.of(request).bound("the reload"):
        await request.app[RELOAD]()
    return _policies(request)

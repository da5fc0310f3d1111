"""The transfer budget: what is held is given back, and nobody is refused for ever."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http import NS, TENANT_HEADER, closed, running, unhurried, until
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, block

from kvtcd.api.limits import InFlight
from kvtcd.api.state import IN_FLIGHT
from kvtcd.core.errors import Busy


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=30),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_sums_are_kept_and_bounds_hold_unless_nothing_else_is_in_flight(steps, total, per_tenant):
    budget = InFlight(total, per_tenant)
    open_ones: list[tuple[str, int, ExitStack]] = []
    for tenant, nbytes, release in steps:
        if release and open_ones:
            open_ones.pop(0)[2].close()
        held = sum(n for _, n, _ in open_ones)
        own = sum(n for t, n, _ in open_ones if t == tenant)
        assert budget.held == held
        fits = (not held or held + nbytes <= total) and (not own or own + nbytes <= per_tenant)
        stack = ExitStack()
        if fits:
            stack.enter_context(budget.take(tenant, nbytes))
            open_ones.append((tenant, nbytes, stack))
        else:
            with pytest.raises(Busy):
                stack.enter_context(budget.take(tenant, nbytes))
    for _, _, stack in open_ones:
        stack.close()
    assert budget.held == 0


def test_an_error_gives_the_bytes_back():
    budget = InFlight(10, 10)
    with pytest.raises(ZeroDivisionError), budget.take("a", 10):
        raise ZeroDivisionError
    assert budget.held == 0


@pytest.mark.asyncio
async def test_a_put_over_the_budget_is_refused_before_its_body_and_other_tenants_are_not():
    async with running(unhurried(tenant_in_flight=BLOCK_BYTES)) as daemon:
        await daemon.register()
        await daemon.register(**{TENANT_HEADER: "uid:2"})
        path = f"{NS}/blocks/aa?tokens={BLOCK_TOKENS}"
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: kvtcd\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {BLOCK_BYTES}\r\n\r\n"
        ).encode()
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        writer.write(head + block(1)[:1])
        await until(lambda: daemon.app[IN_FLIGHT].held)

        expect = head[:-2] + b"Expect: 100-continue\r\nTest-Tenant: %s\r\n\r\n"
        refused = await daemon.raw((expect % b"uid:1").replace(b"/aa", b"/bb"), upto=b"\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in refused
        welcome = await daemon.raw((expect % b"uid:2").replace(b"/aa", b"/bb"), upto=b"\r\n\r\n")
        assert welcome == b"HTTP/1.1 100 Continue\r\n\r\n"

        writer.write(block(1)[1:])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 201 ")
        await closed(writer)
        await daemon.settled()
        assert daemon.blocks() == 1

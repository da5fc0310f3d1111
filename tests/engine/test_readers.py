"""How long blocks are held by those who read them."""

from __future__ import annotations

import pytest

from kvtcd.engine import readers
from kvtcd.engine.readers import Readers


def test_the_first_who_still_reads_is_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(readers.time, "monotonic", lambda: now[0])
    those = Readers()
    assert those.oldest_s() == 0
    first, second = those.reading(), those.reading()
    first.__enter__()
    now[0] = 103.0
    second.__enter__()
    now[0] = 110.0
    assert those.oldest_s() == 10
    first.__exit__(None, None, None)
    assert those.oldest_s() == 7
    second.__exit__(None, None, None)
    assert those.oldest_s() == 0

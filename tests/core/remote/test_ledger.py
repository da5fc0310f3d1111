"""The ledger: what is written is read, and what is not one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.errors import Corrupt
from kvtcd.core.remote.ledger import Known, Ledger

spaces = st.tuples(st.text(max_size=8), st.binary(min_size=32, max_size=32))
GOLDEN = (
    b'{"deletes":["a/b/0/c"],"namespaces":[{"generation":5,"namespace":"' + b"00" * 32 + b'",'
    b'"purging":1,"tenant":"uid:1"}]}'
)


@given(
    st.dictionaries(spaces, st.tuples(st.integers(0, 1 << 62), st.booleans()), max_size=5),
    st.sets(st.text(max_size=8), max_size=5),
)
def test_a_ledger_is_read_back(rows, deletes) -> None:
    ledger = Ledger(deletes=deletes)
    for (tenant, namespace), (generation, purging) in rows.items():
        known = ledger.of(tenant, namespace)
        known.generation, known.purging, known.heard = generation, purging, purging
    back = Ledger.from_bytes(ledger.to_bytes())

    assert back.deletes == deletes
    assert [(k.tenant, k.namespace, k.generation, k.purging) for k in back.namespaces.values()] == [
        (t, n, g, p) for (t, n), (g, p) in rows.items() if g or p
    ]
    assert not any(known.heard for known in back.namespaces.values()), (
        "the store is told again after a restart"
    )
    assert back.pending == len(deletes) + sum(p for _, p in rows.values())


def test_golden() -> None:
    ledger = Ledger.from_bytes(GOLDEN)

    assert ledger.purges() == [Known("uid:1", bytes(32), 5, purging=True)]
    assert ledger.to_bytes() == GOLDEN


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", GOLDEN[:-3], GOLDEN.replace(b"5", b'"5"'), GOLDEN.replace(b"5", b"-5"),
     GOLDEN.replace(b'"uid:1"', b"1"), GOLDEN.replace(b'["a/b/0/c"]', b"[1]"),
     GOLDEN.replace(b"00", b"zz", 1)],
)  # fmt: skip
def test_what_is_no_ledger_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Ledger.from_bytes(data)

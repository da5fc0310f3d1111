"""The ledger: what is written is read, and what is not one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.errors import Corrupt
from kvtcd.core.keys import TenantKeys
from kvtcd.core.remote import names
from kvtcd.core.remote.ledger import Known, Ledger, Purge

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


FORMER = (
    b'{"deletes":[],"former":[{"generation":5,"prefix":"a/b/","stated":"0102"}],"namespaces":[{"generation":5,'
    b'"namespace":"' + b"00" * 32 + b'","purging":0,"tenant":"uid:1"}]}'
)


def test_golden_of_purges_under_a_former_key() -> None:
    ledger = Ledger.from_bytes(FORMER)

    assert (ledger.purges(), ledger.pending) == ([], 1)
    assert ledger.former == [Purge("a/b/", 5, b"\1\2")]
    assert ledger.to_bytes() == FORMER


@given(st.dictionaries(spaces, st.tuples(st.integers(1, 1 << 62), st.booleans()), max_size=5))
def test_purges_go_on_under_the_names_of_a_key_that_is_replaced(rows) -> None:
    ledger, old = Ledger(), bytes(32)
    for (tenant, namespace), (generation, purging) in rows.items():
        known = ledger.of(tenant, namespace)
        known.generation, known.purging = generation, purging
    pending = ledger.pending
    ledger.rekeyed(lambda tenant: TenantKeys.derive(old, tenant))
    back = Ledger.from_bytes(ledger.to_bytes())
    told = {one.name: (one.generation, one.stated) for one in back.former}
    again = ledger.to_bytes()
    ledger.rekeyed(lambda tenant: TenantKeys.derive(old, tenant))

    assert (back.purges(), back.pending) == ([], pending)
    assert {(k.tenant, k.namespace): k.generation for k in back.namespaces.values()} == {
        space: generation for space, (generation, _) in rows.items()
    }
    for (tenant, namespace), (generation, purging) in rows.items():
        keys = TenantKeys.derive(old, tenant)
        found = told.get(names.generation_name(keys, namespace))
        assert (found is not None) == purging
        if found:
            assert names.stated_generation(keys, namespace, found[1]) == found[0] == generation
    assert ledger.to_bytes() == again, "a rekey that is begun anew has nothing more to carry over"


def test_of_what_was_purged_all_goes_but_what_is_valid() -> None:
    purge = Purge("a/b/", 5, b"")
    found = ["a/b/generation", "a/b/5/k", "a/b/4/k", "a/b/55/k", "a/b/x"]

    assert [name for name in found if purge.dooms(name)] == ["a/b/4/k", "a/b/55/k", "a/b/x"]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", GOLDEN[:-3], GOLDEN.replace(b"5", b'"5"'), GOLDEN.replace(b"5", b"-5"),
     GOLDEN.replace(b'"uid:1"', b"1"), GOLDEN.replace(b'["a/b/0/c"]', b"[1]"),
     GOLDEN.replace(b"00", b"zz", 1), FORMER.replace(b'"0102"', b'"01x"'), FORMER.replace(b'"a/b/"', b"7")],
)  # fmt: skip
def test_what_is_no_ledger_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Ledger.from_bytes(data)

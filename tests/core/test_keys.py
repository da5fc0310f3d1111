"""Keys: golden values, published vectors, and the chain recomputed by hand."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core import keys
from kvtcd.core.errors import BadKey, BadRequest
from kvtcd.core.keys import EngineKey, TenantKeys, chain, parse_key

HERE = Path(__file__).parent / "golden"
GOLDEN = json.loads((HERE / "keys-v1.json").read_text())
NAMESPACE = bytes.fromhex(json.loads((HERE / "identities-v1.json").read_text())["kv"]["digest"])
TOKENS = [5, 0, 4_294_967_295, 17, 17, 3, 9]


def test_golden_keys() -> None:
    tenant = TenantKeys.derive(bytes(range(32)), "uid:1000")
    first = EngineKey(bytes.fromhex(GOLDEN["chain"][0]))

    assert [link.key.hex() for link in chain(NAMESPACE, TOKENS, 3)] == GOLDEN["chain"]
    for name in ("key_id", "record", "mac", "cipher", "tag"):
        assert getattr(tenant, name).hex() == GOLDEN[name]
    assert [tenant.record_key(NAMESPACE, s, first).hex() for s in (b"", b"salt")] == GOLDEN["record_keys"]


def test_key_derivation_agrees_with_rfc_5869() -> None:
    """Test case 3 of the RFC: no salt, no info; the first 32 of its 42 bytes."""
    okm = keys.hkdf(b"\x0b" * 22, b"")

    assert okm.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_the_chain_is_blake2b_over_all_tokens_so_far(tokens: list[int], size: int) -> None:
    links = list(chain(NAMESPACE, tokens, size))

    key = hashlib.blake2b(b"kvtcd-chain-v1" + NAMESPACE, digest_size=32).digest()
    for number, link in enumerate(links):
        piece = tokens[number * size : (number + 1) * size]
        parent, key = (
            key,
            hashlib.blake2b(key + struct.pack(f"<{len(piece)}I", *piece), digest_size=32).digest(),
        )
        assert (link.key, link.first, link.tokens) == (key, number * size, len(piece))
        assert link.parent == (parent if number else None)
    assert sum(link.tokens for link in links) == len(tokens)


def test_a_record_key_is_an_hmac_that_separates_its_parts() -> None:
    tenant = TenantKeys.derive(b"m" * 32, "uid:1")
    other = TenantKeys.derive(b"m" * 32, "uid:2")
    key = EngineKey(b"k" * 8)

    message = b"kvtcd-rec-v1" + NAMESPACE + b"\x02\x00" + b"ab" + key
    assert tenant.record_key(NAMESPACE, b"ab", key) == hmac.digest(tenant.record, message, "sha256")
    assert tenant.record_key(NAMESPACE, b"ab", key) != other.record_key(NAMESPACE, b"ab", key)
    assert tenant.record_key(NAMESPACE, b"a", EngineKey(b"b" + key)) != tenant.record_key(
        NAMESPACE, b"ab", key
    )


def test_tenant_keys_do_not_show_themselves() -> None:
    tenant = TenantKeys.derive(b"m" * 32, "uid:1")

    assert tenant.mac.hex() not in repr(tenant)
    assert repr(tenant.mac) not in repr(tenant)


@pytest.mark.parametrize("text", ["", "a", "abc", "AB", "0x12", "zz", "ab" * 65, "ab\n", " ab"])
def test_bad_keys_are_refused(text: str) -> None:
    with pytest.raises(BadKey, match="lower-case hex"):
        parse_key(text)


def test_keys_of_1_to_64_bytes_are_read() -> None:
    assert parse_key("00") == b"\x00"
    assert parse_key("ab" * 64) == b"\xab" * 64


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5]])
def test_token_ids_beyond_32_bits_are_refused(tokens) -> None:
    with pytest.raises(BadRequest, match="tokens"):
        list(chain(NAMESPACE, tokens, 4))


def test_a_salt_is_bounded() -> None:
    with pytest.raises(BadRequest, match="salt"):
        TenantKeys.derive(b"m" * 32, "t").record_key(NAMESPACE, b"s" * 256, EngineKey(b"k"))


@given(st.binary(max_size=255), st.binary(min_size=1, max_size=64), st.binary(min_size=32, max_size=32))
def test_record_keys_are_hmacs_however_many_are_made(salt, key, namespace) -> None:
    tenant = TenantKeys.derive(b"m" * 32, "t")
    make = tenant.record_keys(namespace, salt)
    message = b"kvtcd-rec-v1" + namespace + len(salt).to_bytes(2, "little") + salt + key

    assert [make(key), make(b"other"), make(key)][::2] == [hmac.digest(tenant.record, message, "sha256")] * 2

"""What `kvtcd inspect` says of a state directory that is written here, record by record."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.toy import IDENTITY
from typer.testing import CliRunner

from kvtcd.admin.store_view import command
from kvtcd.cli import app
from kvtcd.core import cipher
from kvtcd.core.errors import AlreadyRunning, ConfigError
from kvtcd.core.keys import EngineKey, TenantKeys
from kvtcd.core.record import Envelope, blob_mac, parse, seal
from kvtcd.engine.namespaces import TENANT_NAME, persisted
from kvtcd.tiers.disk import Environment, Put
from kvtcd.tiers.state import StateDirectory

BLOB = (Path(__file__).parents[1] / "codec/golden/kvtc-1-kv-bfloat16.blob").read_bytes()
COUNT = 5


def put(keys: TenantKeys, number: int, *, blob: bytes = BLOB, expires: int | None = None) -> Put:
    engine_key = EngineKey(number.to_bytes(32, "big"))
    key = keys.record_key(IDENTITY.digest, b"", engine_key)
    envelope = Envelope(
        key=key, tenant_tag=keys.tag, key_id=keys.key_id, namespace=IDENTITY.digest, generation=1,
        engine_key=engine_key, salt=b"", parent=None, first_token=128 * number, tokens=128,
        raw_bytes=1_000_000, blob_bytes=len(blob), created=1_764_000_000_000 + number, expires=expires,
        blob_mac=blob_mac(keys, blob),
    )  # fmt: skip
    return Put(key, seal(keys, envelope), blob)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with five blocks of one namespace, one of which has expired."""
    held = StateDirectory(tmp_path / "state")
    keys = TenantKeys.derive(held.master_key(), "uid:1")
    environment = Environment(held.tenant(keys.tag.hex()), quota=1 << 24)
    environment.put_namespace(TENANT_NAME, b"uid:1")
    environment.put_namespace("docs", persisted(IDENTITY, 1))
    environment.write([put(keys, n, expires=1 if n == 0 else None) for n in range(COUNT)], [])
    environment.close()
    held.close()
    return tmp_path / "state"


def encrypted(keys: TenantKeys, number: int) -> Put:
    plain = put(keys, number)
    envelope = parse(plain.envelope)
    blob = bytes(cipher.encrypt(keys, envelope.key, b"n" * 12, memoryview(BLOB)))
    return Put(
        envelope.key,
        seal(keys, replace(envelope, nonce=b"n" * 12, blob_bytes=len(blob), blob_mac=blob_mac(keys, blob))),
        blob,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def inspected(
    path: Path, *, shown: int = 0, verify: bool = False, key: Path | None = None
) -> tuple[bool, dict]:
    out = path.with_name("out.json")
    well = command(path, shown=shown, verify=verify, key=key, json=out)
    (tenant,) = json.loads(out.read_text())["tenants"]
    return well, tenant


def test_a_sound_store_is_counted_and_not_changed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(state)
    well, tenant = inspected(state, shown=2, verify=True)

    assert well
    assert files(state) == before
    assert (tenant["tenant"], tenant["condition"], tenant["authentic"]) == ("uid:1", "clean", True)
    held = tenant["namespaces"]["docs"]
    assert (held["model"], held["blocks"], held["tokens"]) == (IDENTITY.model, COUNT, COUNT * 128)
    assert (held["raw_bytes"], held["blob_bytes"]) == (COUNT * 1_000_000, COUNT * len(BLOB))
    assert (held["expired"], held["codecs"], held["damaged"]) == (1, {"kvtc": COUNT}, {})
    assert len(tenant["records"]) == 2
    shown = capsys.readouterr().out
    assert "MACs of envelopes and blobs compared" in " ".join(shown.split())


def test_a_changed_byte_of_a_blob_is_found_when_blobs_are_read(state: Path) -> None:
    (data,) = state.rglob("data.mdb")
    content = bytearray(data.read_bytes())
    at = content.rindex(BLOB[-64:])
    content[at] ^= 1
    data.write_bytes(content)

    assert inspected(state)[0], "envelopes alone are sound"
    well, tenant = inspected(state, verify=True)
    assert not well
    assert tenant["namespaces"]["docs"]["damaged"] == {"BadChecksum": 1}
    assert tenant["namespaces"]["docs"]["codecs"] == {"kvtc": COUNT - 1}


def test_without_its_key_a_store_is_read_as_far_as_its_form_goes(state: Path) -> None:
    (state / "master.key").unlink()
    well, tenant = inspected(state, verify=True)

    assert not well, "nobody has compared a MAC, and a daemon would not start"
    assert not tenant["authentic"]
    assert tenant["namespaces"]["docs"]["codecs"] == {"kvtc": COUNT}


@pytest.mark.parametrize(
    ("length", "mode", "said"), [(31, 0o600, "has 31 bytes; a key has 32"), (32, 0o644, "others may read it")]
)
def test_a_key_that_a_start_would_refuse_is_named_and_not_well(
    state: Path, capsys, length, mode, said
) -> None:
    key = state / "master.key"
    key.write_bytes(key.read_bytes()[:length])
    key.chmod(mode)

    assert not inspected(state)[0]
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    assert "no MAC was compared" in shown
    assert "urandom" not in shown, "what is left of the key would be overwritten"
    assert ("restore it" in shown) == (length == 31)


def test_encrypted_blobs_are_read_with_their_key_alone(state: Path) -> None:
    held = StateDirectory(state)
    keys = TenantKeys.derive(held.master_key(), "uid:1")
    environment = Environment(held.tenant(keys.tag.hex()), quota=1 << 24)
    environment.write([encrypted(keys, COUNT)], [])
    environment.close()
    held.close()

    assert inspected(state, verify=True)[1]["namespaces"]["docs"]["codecs"] == {"kvtc": COUNT + 1}
    (state / "master.key").unlink()
    assert inspected(state, verify=True)[1]["namespaces"]["docs"]["codecs"] == {"kvtc": COUNT, "encrypted": 1}


def test_under_another_key_no_record_is_authentic_and_that_is_said(state: Path, capsys) -> None:
    key = state / "master.key"
    key.write_bytes(bytes(32))
    well, tenant = inspected(state)

    assert not well
    assert not tenant["authentic"]
    assert "the key does not fit this tenant" in " ".join(capsys.readouterr().out.split())


def test_a_key_that_is_kept_elsewhere_is_given(state: Path, capsys) -> None:
    key = (state / "master.key").rename(state.with_name("key"))
    well, tenant = inspected(state, key=key)
    assert well
    assert tenant["authentic"]
    key.write_bytes(b"k" * 32)
    assert not inspected(state, key=key)[0]
    assert "the key does not fit this tenant" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="cannot be read"):
        inspected(state, key=state / "none")


def test_one_tenant_that_cannot_be_read_is_named_and_the_others_are_shown(state: Path, capsys) -> None:
    broken = state / "tenants" / ("00" * 16)
    (broken / "00000001").mkdir(parents=True)
    unreadable_ = broken / "00000001" / "data.mdb"
    unreadable_.mkdir()
    well, tenant = inspected(state)

    assert not well
    assert tenant["tenant"] == "uid:1"
    assert f"tenant {broken.name} cannot be read" in " ".join(capsys.readouterr().out.split())
    (left_out,) = json.loads(state.with_name("out.json").read_text())["unreadable"]
    assert left_out["tenant"] == broken.name
    assert "Is a directory" in left_out["why"]


def test_what_does_not_exist_is_said_not_to(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["inspect", str(tmp_path / "nope")])
    assert isinstance(answer.exception, ConfigError)
    assert str(answer.exception) == f"{tmp_path / 'nope'}: does not exist"


def test_a_file_that_was_cut_short_is_said_to_be_and_left_alone(state: Path) -> None:
    (data,) = state.rglob("data.mdb")
    with data.open("r+b") as file:
        file.truncate(8192)
    before = files(state)
    well, tenant = inspected(state)

    assert not well
    assert tenant["fault"]
    assert tenant["namespaces"] == {}
    assert files(state) == before


def test_one_tenant_can_be_named(state: Path) -> None:
    (tenant,) = (state / "tenants").iterdir()

    assert inspected(tenant)[1]["tenant"] == "uid:1"


def test_a_store_in_use_is_left_alone(state: Path) -> None:
    held = StateDirectory(state)
    with pytest.raises(AlreadyRunning):
        command(state, shown=0, verify=False, key=None, json=None)
    held.close()
    assert command(state, shown=0, verify=False, key=None, json=None)


def test_a_tenant_whose_first_block_has_not_come_yet_is_well(state, capsys) -> None:
    (state / "tenants" / ("ab" * 16)).mkdir(mode=0o700)

    assert command(state, shown=0, verify=True, key=None, json=None)
    said = " ".join(capsys.readouterr().out.split())
    assert f"tenant {'ab' * 16}" in said
    assert "damaged:" not in said


def test_an_empty_store_and_a_folder_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StateDirectory(tmp_path / "new").close()

    assert command(tmp_path / "new", shown=0, verify=False, key=None, json=None)
    assert "nothing was stored yet" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="is no state directory"):
        command(tmp_path, shown=0, verify=False, key=None, json=None)
    (tmp_path / "new" / "lock").unlink()
    with pytest.raises(ConfigError, match="`lock` cannot be read"):
        command(tmp_path / "new", shown=0, verify=False, key=None, json=None)


def test_what_was_set_aside_is_named_and_not_well(state: Path, capsys) -> None:
    (tenant,) = (state / "tenants").iterdir()
    (generation,) = tenant.iterdir()
    shutil.copytree(generation, tenant / "00000000.bad-1764000000")
    well, found = inspected(state)

    assert not well
    assert found["set_aside"] == ["00000000.bad-1764000000"]
    said = " ".join(capsys.readouterr().out.split())
    assert "set aside as damaged: 00000000.bad-1764000000; have it purged, or move it away" in said


def test_of_an_environment_that_tells_no_tenant_the_remarks_are_whole(state: Path, capsys) -> None:
    (state / "tenants" / ("ab" * 16)).mkdir(mode=0o700)
    command(state, shown=0, verify=False, key=None, json=None)
    said = " ".join(capsys.readouterr().out.split())
    assert "whose it is cannot be told: no MAC was compared" in said
    assert "; :" not in said

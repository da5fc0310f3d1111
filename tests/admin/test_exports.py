"""Namespaces that leave one store in a file and are served by another, under other keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from dataclasses import replace
from pathlib import Path

import pytest
from admin.test_store_view import put
from engine.test_service import fetch, key, store
from support.faults import unreadable
from support.records import keys_in
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon, toy_service
from typer.testing import CliRunner

from kvtcd.admin import exports, imports
from kvtcd.cli import app
from kvtcd.config import Config
from kvtcd.core import record as records
from kvtcd.core.errors import (
    AlreadyRunning,
    BadChecksum,
    ConfigError,
    Corrupt,
    IdentityConflict,
    NotFound,
    StoreFailed,
    StoreFull,
    Truncated,
    UnknownProfile,
)
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.core.messages import BlockHead
from kvtcd.engine.namespaces import TENANT_NAME, persisted
from kvtcd.tiers.disk import Environment, Put
from kvtcd.tiers.state import StateDirectory

CHAIN = 4
TOKENS = CHAIN * BLOCK_TOKENS
PROFILES = Path(__file__).parents[1] / "codec/golden"


def config(state: Path, **disk: object) -> Config:
    return Config.model_validate({
        "daemon": {"state": state},
        "codec": {"profiles": state.parent / "profiles"},
        "disk": {"capacity": 1 << 30, "encrypt": False} | disk,
    })  # fmt: skip


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "export.key"
    file.write_bytes(secrets.token_bytes(32))
    file.chmod(0o600)
    return file


def filled(state: Path, *, encrypt: bool = False) -> None:
    asyncio.run(_fill(state, encrypt=encrypt))


async def _fill(state: Path, *, encrypt: bool) -> None:
    """Store a chain of blocks, one under a salt, and the blocks of another namespace and another tenant."""
    async with toy_service(state, encrypt=encrypt) as toy:
        ns = await toy.service.register("uid:1", "docs", IDENTITY)
        async with toy.service.blocks.batch(ns, b"", soon(), durable=True) as batch:
            for n in range(CHAIN):
                parent = key(n - 1) if n else None
                head = BlockHead(key(n), BLOCK_TOKENS, first_token=n * BLOCK_TOKENS, parent=parent)
                slot = await batch.reserve(head, BLOCK_BYTES)
                slot.write(memoryview(block(n)))
            await batch.commit()
        await store(toy.service, ns, {9: block(99)}, salt=b"salted", durable=True)
        other = await toy.service.register("uid:1", "other", replace(IDENTITY, model="other"))
        await store(toy.service, other, {0: block(50)}, durable=True)
        strange = await toy.service.register("uid:2", "theirs", IDENTITY)
        await store(toy.service, strange, {0: block(60)}, durable=True)


def check(state: Path, *, tenant: str = "uid:1", name: str = "docs", encrypt: bool = False) -> None:
    asyncio.run(_check(state, tenant, name, encrypt=encrypt))


async def _check(state: Path, tenant: str, name: str, *, encrypt: bool) -> None:
    async with toy_service(state, encrypt=encrypt) as toy:
        ns = toy.service.namespace(tenant, name)
        assert [await fetch(toy.service, ns, n) for n in range(CHAIN)] == [block(n) for n in range(CHAIN)]
        assert await fetch(toy.service, ns, 9, salt=b"salted") == block(99)
        with pytest.raises(NotFound):
            await fetch(toy.service, ns, 0, salt=b"salted")


def envelopes(state: Path, tenant: str) -> dict[bytes, records.Envelope]:
    """Return what a store has of a tenant's `docs`, each record checked, by engine key."""
    held = StateDirectory.existing(state)
    keys = TenantKeys.derive(held.master_key(), tenant)
    environment = Environment(held.tenant(keys.tag.hex()), quota=1 << 30)
    found = {}
    for one in keys_in(environment):
        sealed, blob = environment.read(one)
        envelope = records.open_envelope(keys, RecordKey(one), sealed)
        records.check_blob(keys, envelope, blob.data)
        if envelope.namespace == IDENTITY.digest:
            found[bytes(envelope.engine_key)] = envelope
    environment.close()
    held.close()
    return found


def exported(state: Path, out: Path, secret: Path, **given: object) -> bool:
    given = {"tenant": None, "master": None} | given
    return exports.command("docs", config(state), out=out, key=secret, **given)


def imported(file: Path, state: Path, secret: Path, disk: dict | None = None, **given: object) -> None:
    given = {"tenant": None, "name": None, "master": None} | given
    imports.command(file, config(state, **disk or {}), key=secret, **given)


def begun(state: Path) -> Path:
    """Make the state directory of a daemon that has run and holds nothing."""
    held = StateDirectory(state)
    held.master_key()
    held.close()
    return state


def text(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("before", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("after", [False, True], ids=["to-plain", "to-encrypted"])
def test_another_daemon_serves_what_was_exported(tmp_path, secret, before, after, capsys) -> None:
    filled(tmp_path / "a", encrypt=before)
    exported(tmp_path / "a", tmp_path / "docs.kvtx", secret)
    assert f"{CHAIN + 1} blocks of docs and 0 profiles" in text(capsys)
    imported(tmp_path / "docs.kvtx", begun(tmp_path / "b"), secret, {"encrypt": after})
    assert f"{CHAIN + 1} blocks are in namespace docs of uid:1" in text(capsys)

    check(tmp_path / "b")
    old, new = envelopes(tmp_path / "a", "uid:1"), envelopes(tmp_path / "b", "uid:1")
    assert len(new) == CHAIN + 1
    for one, envelope in new.items():
        assert bool(envelope.nonce) == after
        assert envelope.key != old[one].key
        kept = ("engine_key", "salt", "first_token", "tokens", "raw_bytes", "created", "expires")
        assert [getattr(envelope, name) for name in kept] == [getattr(old[one], name) for name in kept]
    for n in range(1, CHAIN):
        assert new[key(n)].parent == new[key(n - 1)].key, "the chain holds under the new keys"
    check(tmp_path / "a", encrypt=before)


def test_nothing_of_the_content_can_be_read_in_the_file(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", tmp_path / "docs.kvtx", secret)
    data = (tmp_path / "docs.kvtx").read_bytes()
    assert (tmp_path / "docs.kvtx").stat().st_mode & 0o777 == 0o600
    for known in (b"docs", b"uid:1", b"toy", key(0), b"salted", b"KVTB"):
        assert known not in data


def test_another_tenant_and_another_name(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", tmp_path / "docs.kvtx", secret)
    imported(tmp_path / "docs.kvtx", begun(tmp_path / "b"), secret, tenant="team-a", name="books")
    check(tmp_path / "b", tenant="team-a", name="books")


def test_an_import_goes_on_where_it_was_killed_and_a_second_one_changes_nothing(
    tmp_path, secret, monkeypatch, capsys
) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", tmp_path / "docs.kvtx", secret)
    begun(tmp_path / "b")
    monkeypatch.setattr(imports, "_BATCH_BYTES", 1)
    write, calls = Environment.write, 0

    def dies(self, puts, drops) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StoreFailed("write", "EIO")
        write(self, puts, drops)

    with monkeypatch.context() as dying:
        dying.setattr(Environment, "write", dies)
        with pytest.raises(StoreFailed):
            imported(tmp_path / "docs.kvtx", tmp_path / "b", secret)
    imported(tmp_path / "docs.kvtx", tmp_path / "b", secret)
    assert "3 blocks are in namespace docs of uid:1; 2 were there already" in text(capsys)
    imported(tmp_path / "docs.kvtx", tmp_path / "b", secret)
    assert "0 blocks are in namespace docs of uid:1; 5 were there already" in text(capsys)
    check(tmp_path / "b")


def test_a_block_that_is_damaged_in_the_store_is_replaced(tmp_path, secret, capsys) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", tmp_path / "docs.kvtx", secret)
    held = StateDirectory(tmp_path / "a")
    keys = TenantKeys.derive(held.master_key(), "uid:1")
    environment = Environment(held.tenant(keys.tag.hex()), quota=1 << 30)
    one = keys.record_key(IDENTITY.digest, b"", key(2))
    sealed, blob = environment.read(one)
    environment.write([Put(one, sealed[:-1] + bytes([sealed[-1] ^ 1]), blob)], [])
    environment.close()
    held.close()
    capsys.readouterr()
    assert not exported(tmp_path / "a", tmp_path / "again.kvtx", secret), "a script is told"
    assert "4 blocks of docs and 0 profiles" in (said := text(capsys))
    assert "1 were damaged and are left out" in said
    imported(tmp_path / "docs.kvtx", tmp_path / "a", secret)
    check(tmp_path / "a")


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.999])
def test_of_a_file_that_was_changed_anywhere_nothing_is_stored(tmp_path, secret, where) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    good, state = file.read_bytes(), begun(tmp_path / "b")
    changed = bytearray(good)
    changed[int(where * len(good))] ^= 4
    for bad in (bytes(changed), good[: int(where * len(good))]):
        file.write_bytes(bad)
        with pytest.raises(Corrupt):
            imported(file, state, secret)
        assert list((state / "tenants").iterdir()) == []
    file.write_bytes(good)
    (other := tmp_path / "other.key").write_bytes(bytes(32))
    other.chmod(0o600)
    with pytest.raises(BadChecksum, match="not the key"):
        imported(file, state, other)
    imported(file, state, secret)
    check(state)


def test_what_changes_between_the_two_readings_is_found_all_the_same(tmp_path, secret, monkeypatch) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    survey = imports.survey

    def cut(*args):
        found = survey(*args)
        file.write_bytes(file.read_bytes()[:-40])
        return found

    monkeypatch.setattr(imports, "survey", cut)
    with pytest.raises(Truncated):
        imported(file, begun(tmp_path / "b"), secret)


def test_profiles_travel_with_the_blocks_that_need_them(tmp_path, secret, capsys) -> None:
    """The golden blob names a profile: here it is any file of that digest, since none is decoded."""
    state, profile = tmp_path / "a", b"what a profile would say" * 100
    records_of_docs(state, profile)
    with pytest.raises(UnknownProfile):
        exported(state, tmp_path / "docs.kvtx", secret)
    assert not (tmp_path / "docs.kvtx").exists()
    assert not list(tmp_path.glob("*.part"))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.safetensors").write_bytes(profile)
    exported(state, tmp_path / "docs.kvtx", secret)
    assert "3 blocks of docs and 1 profiles" in (said := text(capsys))
    assert "1 had expired" in said

    target = begun(tmp_path / "elsewhere" / "b")
    imported(tmp_path / "docs.kvtx", target, secret)
    named = target.parent / "profiles" / f"{hashlib.sha256(profile).hexdigest()}.safetensors"
    assert named.read_bytes() == profile
    named.rename(named.with_name("theirs.safetensors"))
    imported(tmp_path / "docs.kvtx", target, secret)
    assert [each.name for each in named.parent.iterdir()] == ["theirs.safetensors"], "it is there already"


def records_of_docs(state: Path, profile: bytes) -> None:
    """Store blobs of a toy layout that name a profile; the first has expired."""
    from kvtcd.core import blob as blobs  # noqa: PLC0415 - beside its only use

    raw = block(1)
    header = blobs.Header(
        blobs.CodecId.KVTC, 1, IDENTITY.layout.dtype, IDENTITY.layout.digest, BLOCK_TOKENS, len(raw), 0,
        profile=hashlib.sha256(profile).digest(),
    )  # fmt: skip
    run = blobs.Run(blobs.Kind.RAW, blobs.ALL_STREAMS, 0, 0, BLOCK_TOKENS, len(raw), data=raw)
    blob = bytes(blobs.assemble(header, [run]))
    held = StateDirectory(state)
    keys = TenantKeys.derive(held.master_key(), "uid:1")
    environment = Environment(held.tenant(keys.tag.hex()), quota=1 << 24)
    environment.put_namespace(TENANT_NAME, b"uid:1")
    environment.put_namespace("docs", persisted(IDENTITY, 1))
    now = time.time_ns() // 1_000_000
    for n, expires in enumerate((now - 1, None, now + 10**7, None)):
        made = put(keys, n, blob=blob, expires=expires)
        envelope = replace(records.parse(made.envelope), tokens=BLOCK_TOKENS, raw_bytes=len(raw))
        environment.write([Put(made.key, records.seal(keys, envelope), blob)], [])
    environment.close()
    held.close()


def test_names_that_are_taken(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    with pytest.raises(IdentityConflict, match="registered as namespace 'docs'; use that name"):
        imported(file, tmp_path / "a", secret, name="free")
    other = tmp_path / "other.kvtx"
    exports.command("other", config(tmp_path / "a"), tenant=None, out=other, key=secret, master=None)
    with pytest.raises(IdentityConflict, match=r"another identity \(differs in model\)"):
        imported(other, tmp_path / "a", secret, name="docs")
    with pytest.raises(IdentityConflict, match="registered as namespace 'theirs'; use that name"):
        imported(file, tmp_path / "a", secret, tenant="uid:2")
    imported(file, tmp_path / "a", secret, tenant="uid:2", name="theirs")
    check(tmp_path / "a")
    assert len(envelopes(tmp_path / "a", "uid:2")) == CHAIN + 1, (
        "its own block 0 and that of the file are one"
    )


def test_what_cannot_be_done_is_said(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    file = tmp_path / "docs.kvtx"
    there = r"tenants and their namespaces are .*uid:1 \(docs, other\)"
    with pytest.raises(ConfigError, match=f"there is no namespace none here; {there}"):
        exports.command("none", config(tmp_path / "a"), tenant=None, out=file, key=secret, master=None)
    with pytest.raises(ConfigError, match=f"tenant uid:2 has no namespace docs here; {there}"):
        exported(tmp_path / "a", file, secret, tenant="uid:2")
    (other := tmp_path / "other.key").write_bytes(bytes(32))
    other.chmod(0o600)
    with pytest.raises(ConfigError, match="uid:1 with a namespace docs is under another master key"):
        exported(tmp_path / "a", file, secret, master=other)
    with pytest.raises(ConfigError, match="head -c 32"):
        exported(tmp_path / "a", file, Path(__file__))
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others may read it \(mode 0640\)"):
        exported(tmp_path / "a", file, secret)
    secret.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be written"):
        exported(tmp_path / "a", tmp_path / "none" / "docs.kvtx", secret)
    exported(tmp_path / "a", file, secret)
    with pytest.raises(ConfigError, match="is there already"):
        exported(tmp_path / "a", file, secret)

    with pytest.raises(ConfigError, match="is 0: there is no disk tier"):
        imported(file, tmp_path / "a", secret, {"capacity": 0})
    with pytest.raises(StoreFull, match=r"\[disk\] capacity is 20 KiB"):
        imported(file, begun(tmp_path / "b"), secret, {"capacity": 20 << 10})
    with pytest.raises(ConfigError, match="--tenant"):
        imported(file, tmp_path / "b", secret, tenant="Team A")
    with pytest.raises(ConfigError, match="--name"):
        imported(file, tmp_path / "b", secret, name="@tenant")
    with pytest.raises(ConfigError, match="cannot be read"):
        imported(tmp_path / "none", tmp_path / "b", secret)
    held = StateDirectory(tmp_path / "a")
    with pytest.raises(AlreadyRunning):
        exported(tmp_path / "a", tmp_path / "more.kvtx", secret)
    with pytest.raises(AlreadyRunning):
        imported(file, tmp_path / "a", secret)
    held.close()


def test_an_import_under_another_master_key_than_what_is_there_is_refused(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    filled(tmp_path / "b")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    (other := tmp_path / "other.key").write_bytes(b"k" * 32)
    other.chmod(0o600)
    (tmp_path / "b" / "master.key").rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match=r"\(2 tenants\) is under another master key than this one"):
        imported(file, tmp_path / "b", secret, master=other)
    assert len(list((tmp_path / "b" / "tenants").iterdir())) == 2


def test_a_name_that_several_have_asks_whose(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    imported(file, tmp_path / "a", secret, tenant="uid:3")
    with pytest.raises(ConfigError, match="several have a namespace docs: uid:1, uid:3"):
        exported(tmp_path / "a", tmp_path / "again.kvtx", secret)
    exported(tmp_path / "a", tmp_path / "again.kvtx", secret, tenant="uid:3")


def test_by_the_command_line_with_the_daemons_own_configuration(tmp_path, secret) -> None:
    for each in ("a", "b"):
        (tmp_path / f"{each}.toml").write_text(
            f'[daemon]\nstate = "{each}"\n[codec]\nprofiles = "profiles"\n'
        )
    filled(tmp_path / "a")
    begun(tmp_path / "b")
    file, run = tmp_path / "docs.kvtx", CliRunner().invoke
    first = run(
        app,
        ["export", "docs", "--out", str(file), "--key", str(secret), "--config", str(tmp_path / "a.toml")],
    )
    assert first.exit_code == 0, first.output
    second = run(
        app,
        ["import", str(file), "--key", str(secret), "--config", str(tmp_path / "b.toml"), "--name", "books"],
    )
    assert second.exit_code == 0, second.output
    check(tmp_path / "b", name="books")


def test_an_import_makes_the_state_directory_as_a_daemon_would(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    imported(file, tmp_path / "new" / "b", secret)
    check(tmp_path / "new" / "b")
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "b").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to others"):
        imported(file, tmp_path / "open", secret)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Truncated):
        imported(file, tmp_path / "c", secret)
    assert not (tmp_path / "c").exists(), "of a file that is not whole, nothing is made"


@pytest.mark.parametrize("where", [0.0, 0.02, 0.5, 0.999])
def test_errors_of_an_export_name_the_file(tmp_path, secret, where) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt) as error:
        imported(file, tmp_path / "b", secret)
    assert str(error.value).count(str(file)) == 1


def test_inspect_shows_an_export_with_its_key_and_its_header_without(tmp_path, secret, capsys) -> None:
    filled(tmp_path / "a")
    exported(tmp_path / "a", file := tmp_path / "docs.kvtx", secret)
    capsys.readouterr()
    shown = CliRunner().invoke(app, ["inspect", str(file)])
    assert shown.exit_code == 0, shown.exception
    assert "version 1" in shown.output
    assert "uid:1" not in shown.output
    assert "--key FILE" in shown.output
    out = tmp_path / "figures.json"
    whole = CliRunner().invoke(app, ["inspect", str(file), "--key", str(secret), "--json", str(out)])
    assert whole.exit_code == 0, whole.exception
    rows = json.loads(out.read_text())["export"]
    assert (rows["namespace"], rows["tenant"], rows["blocks"]) == ("docs", "uid:1", CHAIN + 1)
    assert rows["raw_bytes"] == (CHAIN + 1) * BLOCK_BYTES
    assert "every frame" in whole.output
    file.write_bytes(file.read_bytes()[:-3])
    cut = CliRunner().invoke(app, ["inspect", str(file), "--key", str(secret)])
    assert isinstance(cut.exception, Truncated)
    assert str(file) in str(cut.exception)


def test_a_file_of_no_known_kind_is_said_to_be_one(tmp_path) -> None:
    (tmp_path / "junk").write_bytes(bytes(500))
    for file in (tmp_path / "junk", next(PROFILES.glob("*.safetensors"))):
        answer = CliRunner().invoke(app, ["inspect", str(file)])
        assert isinstance(answer.exception, ConfigError)
        assert str(answer.exception).startswith(
            f"{file}: is neither an export nor a blob (`kvtcd profile show`"
        )


def test_an_export_goes_on_behind_another_tenant_that_cannot_be_read(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    broken = tmp_path / "a" / "tenants" / ("00" * 16)
    (broken / "00000001" / "data.mdb").mkdir(parents=True)
    assert exported(tmp_path / "a", tmp_path / "docs.kvtx", secret)
    with pytest.raises(ConfigError, match=f"; {broken} cannot be read"):
        exported(tmp_path / "a", tmp_path / "more.kvtx", secret, tenant="uid:9")


def environment_of(state: Path, tenant: str) -> Path:
    held = StateDirectory(state)
    path = held.tenant(TenantKeys.derive(held.master_key(), tenant).tag.hex())
    held.close()
    return path


@pytest.mark.parametrize("fault", ["unreadable", "damaged", "set aside"])
def test_what_is_wrong_with_the_tenant_is_said_and_not_who_else_there_is(tmp_path, secret, fault) -> None:
    filled(state := tmp_path / "a")
    environment = environment_of(state, "uid:1")
    (data,) = environment.glob("*/data.mdb")
    if fault == "unreadable":
        unreadable(environment)
    else:
        data.write_bytes(b"not a data file")
    if fault == "set aside":
        Environment(environment, quota=1 << 24).close()
    said = {
        "unreadable": f"{environment} cannot be read: ",
        "damaged": f"{environment} is damaged: ",
        "set aside": rf"{environment} was damaged: what it held is set aside \(00000001.bad-\d+\)",
    }[fault]
    with pytest.raises(StoreFailed, match=said) as answer:
        exported(state, tmp_path / "docs.kvtx", secret, tenant="uid:1")
    assert "theirs" not in str(answer.value)
    with pytest.raises(ConfigError, match=said):
        exports.command("docs", config(state), tenant=None, out=tmp_path / "x", key=secret, master=None)
    assert exports.command(
        "theirs", config(state), tenant="uid:2", out=tmp_path / "x", key=secret, master=None
    ), "others are exported all the same"


def test_without_a_key_of_its_own_the_option_is_named(tmp_path, secret) -> None:
    filled(tmp_path / "a")
    (tmp_path / "a" / "master.key").rename(master := tmp_path / "kept")
    with pytest.raises(ConfigError, match="name its file with --master-key"):
        exported(tmp_path / "a", tmp_path / "docs.kvtx", secret)
    exported(tmp_path / "a", tmp_path / "docs.kvtx", secret, master=master)

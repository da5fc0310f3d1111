"""What a configuration says of a shared store, and the secrets that it is entered by."""

from __future__ import annotations

import pytest

from kvtcd import config, shared_store
from kvtcd.config import BucketAt, RedisAt
from kvtcd.config.remote import Remote, load_credentials
from kvtcd.core.errors import ConfigError

SECRET = "hunter2-is-no-password"  # noqa: S105 - made up, to be looked for


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://cache", RedisAt((("cache", 6379),), cluster=False, tls=False, database=0)),
        ("redis://10.0.0.1:7000/3", RedisAt((("10.0.0.1", 7000),), cluster=False, tls=False, database=3)),
        ("rediss://[::1]:7000", RedisAt((("::1", 7000),), cluster=False, tls=True, database=0)),
        ("redis+cluster://a:1,b", RedisAt((("a", 1), ("b", 6379)), cluster=True, tls=False, database=0)),
        ("rediss+cluster://a", RedisAt((("a", 6379),), cluster=True, tls=True, database=0)),
        ("s3://blocks", BucketAt("blocks", "")),
        ("s3://blocks/", BucketAt("blocks", "")),
        ("s3://blocks/a/b", BucketAt("blocks", "a/b")),
    ],
)
def test_where_a_store_is(url: str, where: object) -> None:
    assert Remote(url=url).where == where


@pytest.mark.parametrize(
    "url",
    [
        "cache:6379", "http://cache", "redis://", "redis://a,b", "redis+cluster://a/1", "redis://a:0",
        "redis://a:65536", "redis://a b", "s3://", "s3://B", "s3://a?x=1", f"redis://user:{SECRET}@cache",
        f"s3://key:{SECRET}@bucket",
    ],
)  # fmt: skip
def test_what_says_no_place_is_refused_and_not_shown(tmp_path, url: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[remote]\nurl = "{url}"\n')
    with pytest.raises(ConfigError) as told:
        config.load(file)

    assert told.value.field == "remote.url"
    assert SECRET not in str(told.value)
    assert "remote.credentials" in str(told.value)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('url = "redis://a"\nendpoint = "http://b"', "remote.endpoint"),
        ('url = "s3://bucket"\nauthority = "ca.pem"', "remote.authority"),
        ('endpoint = "ftp://b"', "remote.endpoint"),
        ('ttl = "7"', "remote.ttl"),
        ("timeout = 0", "remote.timeout"),
        ('queue = "1 KiB"', "remote.queue"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, text: str, field: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[remote]\n{text}\n")
    with pytest.raises(ConfigError) as told:
        config.load(file)

    assert told.value.field == field


def test_paths_are_those_of_the_files_folder_and_what_is_dumped_is_read_back(tmp_path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[remote]\nurl = "redis://a"\ncredentials = "entry.toml"\nqueue = "1 GiB"\nttl = ""\n')
    loaded = config.load(file)
    again = tmp_path / "again.toml"
    again.write_text(config.dump(loaded))

    assert loaded.remote.credentials == str(tmp_path / "entry.toml")
    assert (loaded.remote.ttl_s, loaded.remote.queue) == (None, 1 << 30)
    assert config.load(again).remote == loaded.remote


def test_credentials_are_read_from_a_file_of_ours_alone_or_handed_over(tmp_path) -> None:
    file = tmp_path / "entry.toml"
    file.touch(0o600)
    file.write_text(f'username = "kvtcd"\npassword = "{SECRET}"\n')
    mine = load_credentials(str(file))
    handed = load_credentials("", f'key_id = "k"\nsecret = "{SECRET}"\n'.encode())
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_credentials(str(file))

    assert (mine.username, mine.password) == ("kvtcd", SECRET)
    assert (handed.key_id, handed.secret) == ("k", SECRET)
    assert load_credentials("").password == ""
    assert SECRET not in repr(mine) + str(mine) + repr(handed)


@pytest.mark.parametrize("text", [f'passwort = "{SECRET}"', "password = 20261130", f"password = {SECRET}"])
def test_credentials_that_are_wrong_are_not_shown(text: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_credentials("", text.encode())

    assert SECRET not in str(told.value)
    assert "20261130" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "entry", "why"),
    [
        (
            "redis://a",
            {"key_id": SECRET, "secret": SECRET},
            "has key_id, secret, by which no Redis is entered",
        ),
        ("s3://bucket", {"password": SECRET}, "has password, by which no S3 is entered"),
        ("s3://bucket", {"key_id": SECRET}, "say key_id and secret"),
        ("s3://bucket", {"session": SECRET}, "say key_id and secret"),
    ],
)
def test_what_a_store_is_not_entered_by_is_refused_and_not_shown(url: str, entry, why: str) -> None:
    told = config.Config.model_validate({"remote": {"url": url}})
    with pytest.raises(ConfigError, match=why) as error:
        shared_store.client(told, config.Credentials(**entry))

    assert "remote.credentials" in str(error.value)
    assert SECRET not in str(error.value)

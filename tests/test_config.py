"""Configuration and policy files: defaults, refusals, and that the shipped files say what the code does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.toy import IDENTITY
from typer.testing import CliRunner

from kvtcd import cli, config
from kvtcd.core.access import Caller, Scope, Token, bearer
from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import Admit, CodecChoice, Policy, governing

ROOT = Path(__file__).parent.parent


def test_the_example_equals_the_defaults() -> None:
    assert config.load(ROOT / "config.example.toml").model_dump() == config.load(None).model_dump()


def test_every_field_is_in_the_example() -> None:
    text = (ROOT / "config.example.toml").read_text()
    for section, table in config.Config.model_fields.items():
        assert section in text
        for name in getattr(table.annotation, "model_fields", {}):
            assert f"\n{name} = " in text, f"[{section}] {name} is not explained"


def test_balanced_is_what_holds_without_a_policy_file() -> None:
    assert config.load_policies((ROOT / "policies" / "balanced.toml",)) == config.load_policies(())


@pytest.mark.parametrize("name", ["latency", "capacity"])
def test_a_shipped_policy_can_be_the_last(name: str) -> None:
    (policy,) = config.load_policies((ROOT / "policies" / f"{name}.toml",))

    assert policy.name == name
    assert policy != config.load_policies(())[0]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("12 h", 43_200), ("7d", 604_800)])
def test_a_duration_has_a_unit(tmp_path: Path, text: str, seconds: int) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f"[tiers]\ndisk = {{ttl = '{text}'}}\n[evict]\nhalf_life = '{text}'\n")

    policy = config.load_policy(path)

    assert (policy.disk.ttl, policy.evict.half_life) == (seconds, seconds)


def test_admission_and_eviction_are_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        "[admit]\nmin_tokens = 512\non_sight = 2\n[evict]\npolicy = 'arc'\nleaves_first = false\n"
    )

    policy = config.load_policy(path)

    assert policy.admit == Admit(min_tokens=512, on_sight=2)
    assert (policy.evict.policy, policy.evict.leaves_first) == ("arc", False)


def test_a_dump_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[host]\ncapacity = "3 MiB"\n[daemon]\nstate = "s"\nstop_seconds = 2.5\n')
    read = config.load(path)
    again = tmp_path / "again.toml"
    again.write_text(config.dump(read))

    assert config.load(again).model_dump() == read.model_dump()
    assert read.host.capacity == 3 << 20
    assert read.daemon.state == tmp_path / "s"


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("x", "", "is not TOML"),
        ("[host]\ncapacity = 'lots'", "host.capacity", "is not a size"),
        ("[host]\ncapacity = 5", "host.capacity", "5 B is too little; at least 1 MiB"),
        ("[host]\ncapacity = true", "host.capacity", "is not a size"),
        ("[host]\ncapacity = 1.5", "host.capacity", "is not a size"),
        ("[disk]\ncapacity = '64XB'", "disk.capacity", "units are B, KiB, MiB, GiB, TiB"),
        ("[gpu]\ncapacity = '64XB'", "gpu.capacity", "'64XB' is not a size"),
        ("[gpu]\ncapacity = -1", "gpu.capacity", '"auto"'),
        ("[codec]\nmemory = 'much'", "codec.memory", '"auto"'),
        ("[codec]\ndevice = 'tpu'", "codec.device", '\'tpu\' is not "auto", "cpu", "cuda"'),
        ("[codec]\ndevice = ''", "codec.device", "'' is not"),
        ("[tenants]\nhost = '64XB'", "tenants.host", "neither a share above 0 and up to 1, nor a size"),
        ("[limits]\nin_flight = '1 KiB'", "limits.in_flight", "1 KiB is too little; at least 1 MiB"),
        ("[limits]\nconnections = 'x'", "limits.connections", "must be a whole number, not text"),
        ("[daemon]\nstate = 3", "daemon.state", "must be a path in quotes, not 3"),
        ("[daemon]\nlog_level = 'loud'", "daemon.log_level", "'warning' or 'error', not 'loud'"),
        ("[daemon]\nstop_seconds = '60s'", "daemon.stop_seconds", "must be a number, not text"),
        ("[daemon]\nstop_seconds = inf", "daemon.stop_seconds", "must be at most 3600, not inf"),
        (
            "[daemon]\nsockets = 'x'",
            "daemon.sockets",
            "known are log_format, log_level, socket, state, stop_seconds",
        ),
        ("policies = 'x'", "policies", "must be a list in [brackets], not text"),
        ("[hosts]\n", "hosts", "is not a known field"),
        ("host = 3", "host", "is not a table"),
        ("[daemon]\nstop_seconds = 0", "daemon.stop_seconds", "must be above 0, not 0"),
        ("[disk]\ncapacity = '65 TiB'", "disk.capacity", "65 TiB is more than a process can address"),
        ("[host]\ncapacity = 99999999999999999999999", "host.capacity", "more than a process can address"),
        ("[tenants]\ndisk = '0 B'", "tenants.disk", "'0 B' is nothing"),
        ("[tenants]\nhost = '65 TiB'", "tenants.host", "more than a process can address"),
        ("[daemon]\nsocket = '/" + "s" * 107 + "'", "daemon.socket", "108 bytes in all"),
    ],
)
def test_a_wrong_configuration_names_file_field_and_reason(tmp_path, text, field, why) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as error:
        config.load(path)

    assert (error.value.path, error.value.field) == (str(path), field)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("[codec]\nname = 'zip'", "codec.name", "'kvtc', 'kvtc2', 'lossless', 'tq'"),
        ("[codec]\ndevice = 'cuda:x'", "codec.device", '\'cuda:x\' is not "cpu", "cuda", or "cuda:1"'),
        ("[codec]\ndevice = 'cuda:01'", "codec.device", '\'cuda:01\' is not "cpu", "cuda", or "cuda:1"'),
        ("[codec]\nname = 'kvtc'\nratio = 12", "codec.ratio", "8, 16, 32, 64; kvtc2 takes any"),
        ("[codec]\nname = 'kvtc'\nmax_kl = 0.02", "codec.max_kl", "kvtc takes a ratio"),
        ("[codec]\nname = 'kvtc2'\nratio = 30\nmax_kl = 0.02", "codec.max_kl", "say one of them"),
        ("[codec]\nname = 'kvtc2'\nratio = 0.5", "codec.ratio", "must be above 1, not 0.5"),
        ("[codec]\nname = 'kvtc2'\nmax_kl = 0", "codec.max_kl", "must be above 0, not 0"),
        ("[codec]\nname = 'tq'", "codec.bits", "tq takes bits, a whole number from 1 to 8"),
        ("[codec]\nname = 'tq'\nbits = 9", "codec.bits", "from 1 to 8"),
        ("[codec]\nname = 'tq'\nbits = 2.5", "codec.bits", "must be a whole number, not 2.5"),
        ("[codec]\nname = 'tq'\nbits = 3\nratio = 8", "codec.ratio", "tq takes bits"),
        ("[codec]\nname = 'tq'\nbits = 3\noptions = ['delta']", "codec.options", "it knows mean and haar"),
        ("[codec]\nname = 'tq'\nbits = 3\noptions = ['haar', 'haar']", "codec.options", "is there twice"),
        ("[codec]\nname = 'tq'\nbits = 3\noptions = ['norm', 'unbiased']", "codec.options", "but one"),
        ("[codec]\nname = 'fp8'\noptions = ['raw']", "codec.options", "fp8 does not know 'raw'"),
        ("[codec]\nbits = 4", "codec.bits", "kvtc2 takes either a ratio"),
        ("[codec]\nname = 'cachegen'\nbits = 4", "codec.bits", "cachegen takes level"),
        ("[codec]\nname = 'cachegen'", "codec.level", "a whole number from 1 to 3"),
        ("[codec]\nname = 'xkv'\nratio = 4\nmax_kl = 1", "codec.max_kl", "xkv takes a ratio"),
        ("[codec]\nname = 'xkv'", "codec.ratio", "xkv takes a ratio"),
        ("[codec]\nname = 'fp8'\nbits = 8", "codec.bits", "fp8 has no dial"),
        ("[tiers]\nhost = {high = 0.5, low = 0.6}", "tiers.host", "low 0.6 is above high 0.5"),
        ("[tiers]\ntape = {}", "tiers.tape", "is not a known field"),
        ("[tiers]\nhost = {form = 'raw', raw = 0.5}", "tiers.host.raw", 'means nothing to form = "raw"'),
        ("[share]\ndisk = '0 GiB'", "share.disk", "is nothing"),
        ("[share]\nhost = '1000000 TiB'", "share.host", "more than a process can address"),
        ("[tiers]\ndisk = {ttl = '99999999999d'}", "tiers.disk.ttl", "at most 36500d"),
        ("tiers = 3", "tiers", "is not a table but 3"),
        ("[tiers]\ndisk = {tll = '7d'}", "tiers.disk.tll", "known are high, low, ttl, write"),
        ("[tenant]\nname = 'x'", "tenant", "is not a known field"),
        ("[match]\ntenant = 'x'", "match.tenant", "is not a known field"),
        ("[admit]\nmin_tokens = -1", "admit.min_tokens", "must be at least 0, not -1"),
        ("[admit]\non_sight = 0", "admit.on_sight", "must be at least 1, not 0"),
        ("[admit]\non_sight = 99", "admit.on_sight", "must be at most 15, not 99"),
        ("[admit]\nonsight = 2", "admit.onsight", "is not a known field"),
        ("[evict]\npolicy = 'fifo'", "evict.policy", "'lru', 'lfu', 'arc', 's3fifo' or 'gdsf'"),
        ("[evict]\nleaves_first = 1", "evict.leaves_first", "must be true or false, not 1"),
        ("[evict]\npolicy = 'lru'\nhalf_life = '5m'", "evict", "half_life means nothing to lru"),
        ("[evict]\nhalf_life = 300", "evict.half_life", "300 has no unit"),
        ("[evict]\nhalf_life = '0s'", "evict.half_life", "at least 1s"),
        ("[tiers]\ndisk = {ttl = 'a week'}", "tiers.disk.ttl", "'a week' is not a duration"),
        ("[tiers]\nhost = {ttl = '7d'}", "tiers.host.ttl", "is not a known field"),
    ],
)
def test_a_wrong_policy_names_file_field_and_reason(tmp_path, text, field, why) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as error:
        config.load_policy(path)

    assert (error.value.path, error.value.field) == (str(path), field)
    assert why in str(error.value)


def test_a_socket_whose_path_just_fits_is_taken(tmp_path: Path) -> None:
    name = "s" * (107 - len(str(tmp_path)) - 1)
    (tmp_path / "config.toml").write_text(f"[daemon]\nsocket = {name!r}\n")

    assert config.load(tmp_path / "config.toml").daemon.socket == tmp_path / name


def test_a_value_that_the_machine_does_not_give_is_named_with_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("")

    assert str(config.load(path).fault("host.capacity", "cannot be had")).startswith(f"{path}: host.capacity")
    assert str(config.load(None).fault("f", "w")) == "the defaults (no --config): f: w"


def test_no_file_can_say_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("_source = 'another'\n")

    with pytest.raises(ConfigError, match="is not a known field"):
        config.load(path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: cannot be read: No such file"):
        config.load(tmp_path / "absent.toml")


def test_the_last_policy_must_match_everything(tmp_path: Path) -> None:
    path = tmp_path / "narrow.toml"
    path.write_text("[match]\nmodel = 'llama*'\n")

    with pytest.raises(ConfigError, match="must match everything"):
        config.load_policies((path,))


def test_the_first_policy_that_fits_governs(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.toml"
    narrow.write_text("[match]\nmodel = 'llama*'\n[codec]\nratio = 8\n")
    policies = config.load_policies((narrow, ROOT / "policies" / "balanced.toml"))

    chosen = governing(policies, "a", replace(IDENTITY, model="llama-3"))
    other = governing(policies, "a", replace(IDENTITY, model="qwen"))

    assert (chosen.name, chosen.codec.ratio) == ("narrow", 8)
    assert other == Policy("balanced")


@pytest.mark.parametrize(
    ("glob", "parallel", "fits"),
    [
        ("tp2-rank1", "tp2-rank1", True), ("tp2-rank1", "tp2-rank0", False),
        ("tp16-rank1", "tp16-rank11", False), ("pp?-rank1-*", "pp2-rank1-tp4-rank0", True),
        ("tp*", "canonical", False), ("canonical", "canonical", True), ("*", "tp2-rank1", True),
    ],
)  # fmt: skip
def test_a_policy_may_govern_one_rank_of_a_model(tmp_path: Path, glob, parallel, fits) -> None:
    (tmp_path / "rank.toml").write_text(f"[match]\nmodel = 'llama*'\nparallel = '{glob}'\n")
    policies = config.load_policies((tmp_path / "rank.toml", ROOT / "policies" / "balanced.toml"))
    chosen = governing(policies, "n", replace(IDENTITY, model="llama-3", parallel=parallel))

    assert chosen is policies[0 if fits else 1]
    assert governing(policies, "n", replace(IDENTITY, model="qwen", parallel=parallel)) is policies[1]


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1, "1 B"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB")])
def test_sizes_are_shown_as_they_are_read(nbytes: int, text: str) -> None:
    assert config.show_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("", CodecChoice("kvtc2", 16)),
        ("[codec]\nratio = 37.5", CodecChoice("kvtc2", 37.5)),
        ("[codec]\nmax_kl = 0.01", CodecChoice("kvtc2", None, max_kl=0.01)),
        ("[codec]\nname = 'kvtc'", CodecChoice("kvtc", 16)),
        ("[codec]\nname = 'kvtc'\nratio = 32", CodecChoice("kvtc", 32)),
        ("[codec]\nname = 'kvtc2'\nratio = 37.5", CodecChoice("kvtc2", 37.5)),
        ("[codec]\nname = 'kvtc2'\nmax_kl = 0.02\nwindow = 64", CodecChoice("kvtc2", None, 4, 64, 0.02)),
        ("[codec]\nname = 'lossless'", CodecChoice("lossless", None)),
        ("[codec]\nname = 'tq'\nbits = 3", CodecChoice("tq", None, bits=3)),
        (
            "[codec]\nname = 'tq'\nbits = 4\noptions = ['mean', 'haar']",
            CodecChoice("tq", None, bits=4, options=("mean", "haar")),
        ),
        ("[codec]\nname = 'xkv'\nratio = 4", CodecChoice("xkv", 4)),
        ("[codec]\nname = 'cachegen'\nlevel = 2", CodecChoice("cachegen", None, level=2)),
        ("[codec]\nname = 'fp8'", CodecChoice("fp8", None)),
    ],
)
def test_a_codec_has_one_dial(tmp_path, text, choice) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    assert config.load_policy(path).codec == choice


@pytest.mark.parametrize("address", ["localhost:7337", ":7337", "127.0.0.1", "127.0.0.1:0", "[::1]:65536"])
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[tcp]\nlisten = '{address}'\n")

    with pytest.raises(ConfigError, match="is no address and port") as error:
        config.load(path)
    assert error.value.field == "tcp.listen"


@pytest.mark.parametrize("address", ["0.0.0.0:7337", "192.168.1.2:7337", "[::]:7337"])
def test_tcp_is_for_this_host_alone_unless_it_is_encrypted(tmp_path: Path, address: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[tcp]\nlisten = '{address}'\n")
    with pytest.raises(ConfigError, match=r"name tcp\.certificate and tcp\.key") as error:
        config.load(path)
    assert error.value.field == "tcp.listen"

    path.write_text(f"[tcp]\nlisten = '{address}'\ncertificate = 'tls/server.pem'\nkey = '/run/server.key'\n")
    read = config.load(path)
    assert read.tcp.tls == (tmp_path / "tls/server.pem", Path("/run/server.key"))
    path.write_text(config.dump(read))
    assert config.load(path) == read


@pytest.mark.parametrize("half", ["certificate", "key"])
def test_a_certificate_and_its_key_are_named_together(tmp_path: Path, half: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[tcp]\n{half} = 'server.pem'\n")
    with pytest.raises(ConfigError, match="name both, or neither"):
        config.load(path)


@pytest.mark.parametrize(
    ("text", "address"), [("127.0.0.1:7337", ("127.0.0.1", 7337)), ("[::1]:80", ("::1", 80)), ("", None)]
)
def test_an_address_of_this_host_is_read(tmp_path: Path, text: str, address: tuple[str, int] | None) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[tcp]\nlisten = '{text}'\n")

    assert config.load(path).tcp.address == address


def entry(digit: str, tenant: str = "team", scopes: str = '["data"]') -> str:
    return f'[[token]]\nsha256 = "{digit * 64}"\ntenant = "{tenant}"\nscopes = {scopes}\n'


def test_tokens_are_read_from_a_file_or_from_what_was_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(entry("a") + entry("b", "uid:1000", '["metrics", "admin"]'))
    read = config.load_tokens(path)

    assert read[0] == Token(b"\xaa" * 32, Caller("team", frozenset({Scope.DATA})))
    assert read[1] == Token(b"\xbb" * 32, Caller("uid:1000", frozenset({Scope.METRICS, Scope.ADMIN})))
    assert config.load_tokens(tmp_path / "missing", entry("a").encode()) == read[:1]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "token"),
        ("token = []\n", "token"),
        ("[[token]]\nsha256 = 'AB'\ntenant = 'a'\n", "token.0.sha256"),
        (entry("a", "uid:x"), "token.0.tenant"),
        (entry("a", "../etc"), "token.0.tenant"),
        (entry("a", scopes="[]"), "token.0.scopes"),
        (entry("a", scopes='["all"]'), "token.0.scopes.0"),
        (entry("b") + entry("a") + entry("a", "other"), "token.2"),
        (f"token = '{'a' * 64}'\n", "token"),
        (f"[[token]]\nsha256 = 'x{'a' * 64}'\ntenant = 'a'\n", "token.0.sha256"),
        (f"[[token]]\nsha256 = '{'b' * 64}'\ntenant = 'a'\nsecret = '{'a' * 64}'\n", "token.0.secret"),
    ],
)
def test_a_wrong_token_is_named_by_its_field_and_not_shown(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        config.load_tokens(path)

    assert error.value.field == field
    assert "a" * 64 not in str(error.value)


def test_a_tenant_that_cannot_be_gets_no_token() -> None:
    for tenant in ('a"b', "", "uid:", "A"):
        made = CliRunner().invoke(cli.app, ["token", "--tenant", tenant])
        assert isinstance(made.exception, ConfigError), tenant
        assert made.stdout == ""


def test_what_kvtcd_token_prints_is_an_entry_for_the_token_that_it_shows(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli.app, ["token", "--tenant", "team", "--scope", "data", "--scope", "metrics"])
    secret = made.stderr.split()[-1]
    (read,) = config.load_tokens(tmp_path, made.stdout.encode())

    assert bearer((read,), secret.encode()) == Caller("team", frozenset({Scope.DATA, Scope.METRICS}))
    assert secret not in made.stdout


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("zmq = 'tcp://127.0.0.1:5557'", "events.tenant"),
        ("tenant = 'uid:1'", "events.tenant"),
        ("replay = 'tcp://127.0.0.1:5558'", "events.replay"),
        ("zmq = '127.0.0.1:5557'\ntenant = 'uid:1'", "events.zmq"),
        ("zmq = 'ipc://x'\ntenant = 'uid:1'", "events.zmq"),
        ("hashes = 'int32'", "events.hashes"),
    ],
)
def test_events_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[events]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert caught.value.field == field

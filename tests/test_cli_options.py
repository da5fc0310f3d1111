"""Options of all commands: what is refused before anything is loaded, and that all do it alike."""

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from kvtcd import cli, cli_options
from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.lab import models

WRITTEN = {"json", "plot", "report", "out", "trace"}
"""Options for files that are written, where the name may mean one."""


def options(app=cli.app, name="kvtcd"):
    """Yield of every command its name, the name of a parameter, and what typer was told of it."""
    yield from (each[:3] for each in typed_options(app, name))


def typed_options(app=cli.app, name="kvtcd"):
    """Yield the same, and the type of the parameter."""
    for command in app.registered_commands:
        called = f"{name} {command.name or command.callback.__name__}"
        for parameter, hint in get_type_hints(command.callback, include_extras=True).items():
            for info in getattr(hint, "__metadata__", ()):
                yield called, parameter, info, hint.__origin__
    for group in app.registered_groups:
        own = group.name or group.typer_instance.info.name
        yield from typed_options(group.typer_instance, f"{name} {own}" if isinstance(own, str) else name)


def refused(info, said):
    """Read a value as the command line does; return why it is refused, if so."""
    try:
        (info.parser or str)(said)
    except ConfigError as error:
        return str(error)
    return None


def test_every_file_that_a_command_writes_is_checked_at_its_start(tmp_path):
    bad = str(tmp_path / "none" / "it.png")
    open_ones = {
        f"{command} --{name}"
        for command, name, info in options()
        if name in WRITTEN and not refused(info, bad)
    }
    # Traces to read; and folders, which are made, and checked by what writes them.
    assert open_ones == {
        "kvtcd policy simulate --trace", "kvtcd plan --trace", "kvtcd lab scale --trace",
        "kvtcd calibrate --out", "kvtcd profile choose --out",
    }  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_plot_of_an_unknown_kind_or_without_its_library_is_refused_at_once(tmp_path, monkeypatch):
    plots = [info for _, name, info in options() if name == "plot"]
    assert len(plots) >= 10
    for info in plots:
        assert "ends in none of .png, .svg, .pdf" in refused(info, str(tmp_path / "it.doc"))
    monkeypatch.setattr("kvtcd.lab.picture.find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="matplotlib"):
        refused(plots[0], str(tmp_path / "it.png"))


@pytest.mark.parametrize("said", ["kvtc2:0", "kvtc2:abc", "nonsense:3", "kvtc2:16,nonsense", "tq:99"])
def test_a_codec_that_cannot_be_is_refused_at_once(said):
    specs = [(command, info) for command, name, info in options() if name == "codec"]
    own = {command for command, info in specs if not refused(info, said)}
    assert own == {"kvtcd bench codec"}  # has codecs of others too, and no dials
    assert len(specs) >= 7


def test_a_device_is_refused_at_once_unless_it_is_one():
    devices = {command: info for command, name, info in options() if name == "device"}
    assert set(devices) == {"kvtcd calibrate", "kvtcd bench codec", "kvtcd bench overlap"}
    for info in devices.values():
        for said in ("tpu", "cuda:x", "cuda:01", "CPU", ""):
            assert refused(info, said) == f"--device: {said!r} is neither cpu nor cuda nor cuda:N"
        assert not any(refused(info, said) for said in ("cpu", "cuda", "cuda:1"))


@pytest.mark.parametrize(
    "words",
    [
        "eval rd --model m --codec kvtc2:16 --text none.txt", "calibrate --model m --text none.txt",
        "eval tasks --model m --codec kvtc2:16 --file none.jsonl", "profile show none", "validate none",
        "ablate --dump none", "plan --profile none",
        "policy simulate --trace none --policy p --budget 3blocks",
        "demo --document none.txt",
        "bench ttft --text none.txt", "lab scale --trace none",
    ],
)  # fmt: skip
def test_a_file_to_read_that_is_not_there_is_refused_at_once(words):
    result = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "does not exist" in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("calibrate --model m --stage-layers 3", "--stage-layers: has no effect without --split"),
        ("eval tasks --model m --codec tq:4 --metric f1", "--metric: has no effect without --file"),
        (
            "eval tasks --model m --codec tq:4 --file {here} --data {here}",
            "--data: has no effect with --file",
        ),
        (
            "plan --bytes-per-token 9 --ratio 4 --overhead-ms 3",
            "--overhead-ms: has no effect without --prefill",
        ),
        (
            "plan --bytes-per-token 9 --ratio 4 --bench {here} --prefill 3 --reuse 3",
            "--bench: says both speeds",
        ),
        ("lab scale --trace {here} --bench {here} --overhead-ms 3", "--overhead-ms: has no effect without"),
        ("ablate --dump {here} --trials 8", "--trials: has no effect with --dump"),
        ("validate {here} --windows 8", "--windows: has no effect without --model"),
    ],
)
def test_an_option_that_has_no_effect_is_refused(words, told, monkeypatch):
    monkeypatch.setenv("KVTCD_DATA", "somewhere")  # of the environment, not of the command
    result = CliRunner().invoke(cli.app, words.format(here=__file__).split())
    assert isinstance(result.exception, ConfigError), result.output
    assert told in str(result.exception)


@pytest.mark.parametrize(
    "words",
    [
        "ablate --dump {own} --json {own}",
        "ablate --report {own} --dump {own}",
        "ablate --dump {link} --json {own}",
        "validate {own} --dump {other} --json {own}",
        "validate {other} --model m --text {own} --json {link}",
        "profile show {own} --json {own}",
        "eval rd --json {own} --model m --codec fp8 --text {other} --text {own}",
        "eval dump --model m --text {own} --out {own}",
        "lab scale --trace {own} --json {own}",
        "plan --json {own} --policy {own}",
        "policy simulate --trace {own} --policy {other} --budget 3blocks --json {own}",
        "calibrate --model m --text {own} --json {link}",
        "demo --document {own} --json {own}",
        "bench ttft --text {own} --json {own}",
        "eval tasks --model m --codec fp8 --file {own} --json {own}",
        "profile show {own} --plot {own}",
    ],
)
def test_what_is_read_is_not_written_over(tmp_path, words):
    own, other, link = (tmp_path / name for name in ("own.png", "other", "link"))
    own.write_text("caches of a night")
    other.write_text("")
    link.symlink_to(own)
    result = CliRunner().invoke(cli.app, words.format(own=own, other=other, link=link).split())
    assert isinstance(result.exception, ConfigError), (result.output, result.exception)
    assert "would be written over by" in str(result.exception)
    assert own.read_text() == "caches of a night"


def test_files_and_pipes_of_other_names_are_read_and_written(tmp_path):
    (tmp_path / "empty").write_text("")
    for json in (tmp_path / "new.json", "/dev/null"):
        result = CliRunner().invoke(cli.app, f"ablate --dump {tmp_path / 'empty'} --json {json}".split())
        assert "is no dump of caches" in str(result.exception)


def test_every_file_of_a_command_is_looked_at_when_others_are_written_or_read():
    paths = {
        f"{command} {name}"
        for command, name, info in options()
        if getattr(info, "exists", False) and info.file_okay is not False and info.callback is None
    }
    assert paths == set()


def test_one_option_has_one_minimum():
    for name, least in (("context", 256), ("windows", 1), ("continuation", 2), ("threads", 1)):
        found = {info.min for _, called, info in options() if called == name}
        assert found == {least}, name
    tokens = {command: info.min for command, name, info in options() if name == "tokens"}
    least = cli_options.CALIBRATION_TOKENS
    assert {tokens["kvtcd calibrate"], tokens["kvtcd eval budget"]} == {least}
    assert {tokens["kvtcd demo"], tokens["kvtcd bench ttft"]} == {256}


def test_help_names_the_models_that_there_are():
    assert f"({', '.join(models.ALIASES)})" in cli_options.MODEL
    said = {command: info.help for command, name, info in options() if name == "model"}
    said = {command: text for command, text in said.items() if "llamacpp" not in command}
    assert all(cli_options.MODEL in text for text in said.values()), said
    assert len(said) >= 10


def test_what_is_refused_at_once_needs_no_model_library():
    code = (
        "import sys; from kvtcd import cli\n"
        "sys.argv = ['kvtcd', 'eval', 'rd', '--model', 'x', '--codec', 'kvtc2:0', '--text', 'x.txt']\n"
        "try: cli.main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "False"]
    assert "kvtc2:0" in run.stderr


def test_figures_are_written_before_what_may_fail_to_draw_them():
    root = Path(models.__file__).parent
    both = {
        path.name: (text.index("\n    if json:"), text.index("\n    if plot"))
        for path in root.rglob("*.py")
        if "\n    if json:" in (text := path.read_text("utf-8")) and "\n    if plot" in text
    }
    assert len(both) >= 8
    assert [name for name, (written, drawn) in both.items() if written > drawn] == []


def test_no_number_of_any_command_may_be_infinite() -> None:
    numbers = {}
    for called, parameter, info, kind in typed_options():
        if "float" in str(kind):
            numbers[called, parameter] = info.callback
    known = {parameter for _, parameter in numbers}
    assert known >= {"link", "store", "latency_ms", "ratio", "prefill", "reuse", "overhead_ms", "every"}
    assert set(numbers.values()) == {cli_options._finite}


@pytest.mark.parametrize("said", ["inf", "nan"])
@pytest.mark.parametrize("option", ["--store", "--reuse", "--ratio", "--latency-ms"])
def test_what_is_no_number_is_refused_by_its_option(tmp_path, said: str, option: str) -> None:
    (trace := tmp_path / "trace.jsonl").touch()
    answer = CliRunner().invoke(cli.app, ["lab", "scale", "--trace", str(trace), option, said])
    if said == "inf":
        assert isinstance(answer.exception, ConfigError)
        assert str(answer.exception).startswith(f"{option}: {said} is no number")
    assert answer.exit_code
    assert option in answer.output + str(answer.exception)

"""What a user gets: wheel and source distribution, and the image as far as it can be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.supervised import eventually
from support.toy import BLOCK_TOKENS, IDENTITY, block

from kvtcd import __version__
from kvtcd.client import BlockHead, Client
from kvtcd.core.keys import EngineKey

ROOT = Path(__file__).parents[2]
versioned = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="what belongs to it is known to git alone"
)
SHARED = ("config.example.toml", "policies", "systemd")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder))
    return folder


def kept(*names: str) -> set[str]:
    """Return the files of the source tree, as git knows them, below these names."""
    return set(run("git", "ls-files", "--", *names).splitlines())


@versioned
@pytest.mark.slow
def test_the_wheel_has_the_package_and_what_an_operator_needs_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built / f"kvtcd-{__version__}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    info, data = f"kvtcd-{__version__}.dist-info/", f"kvtcd-{__version__}.data/data/share/kvtcd/"
    assert {name for name in kept(*SHARED) if data + name not in names} == set()
    assert {name for name in kept("kvtcd") if name not in names} == set()
    assert {name for name in names if not name.startswith(("kvtcd/", info, data))} == set()
    assert {name for name in names if re.search(r"(^|/)tests?/|__pycache__|\.pyc$", name)} == set()


@versioned
@pytest.mark.slow
def test_from_the_source_distribution_everything_can_be_tested_and_the_same_wheel_built(
    built, tmp_path
) -> None:
    with tarfile.open(built / f"kvtcd-{__version__}.tar.gz") as source:
        source.extractall(tmp_path, filter="data")
    tree = tmp_path / f"kvtcd-{__version__}"
    assert {name for name in kept() if not (tree / name).exists()} == set()
    again = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=tree, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    name = f"kvtcd-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built / name) as one, zipfile.ZipFile(tmp_path / name) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


@pytest.mark.slow
def test_pip_puts_units_policies_and_example_below_share_and_they_are_right_there(built, tmp_path) -> None:
    wheel = built / f"kvtcd-{__version__}-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    run(*pip, "--prefix", str(tmp_path), str(wheel))
    (site,) = tmp_path.glob("lib/python3*/site-packages")
    share, program = tmp_path / "share" / "kvtcd", tmp_path / "bin" / "kvtcd"
    environment = {"PYTHONPATH": str(site)}
    assert run(str(program), "--version", **environment).strip() == __version__
    example = (share / "config.example.toml").read_text()
    ours = tmp_path / "config.toml"
    ours.write_text(
        example.replace("/var/lib/kvtcd", f"{tmp_path}/state").replace("/run/kvtcd", str(tmp_path))
    )
    assert "balanced" in run(str(program), "check", "--config", str(ours), **environment)
    for name in ("balanced", "capacity", "latency"):
        assert "ok" in run(
            str(program), "policy", "check", str(share / "policies" / f"{name}.toml"), **environment
        )
    assert (share / "systemd" / "drop-ins" / "socket-only.conf").is_file()


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Return a new environment. What we depend on is found where the tests find it; we are not."""
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "elsewhere.pth").write_text("\n".join(others) + "\n")
    return tmp_path / "venv" / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["py3-none-any.whl", "tar.gz"])
def test_what_is_built_installs_in_a_bare_environment_and_a_daemon_of_it_serves(
    built, bare, kind, tmp_path
) -> None:
    (package,) = built.glob(f"*{kind}")
    python = str(bare / "python")
    clean = {"PYTHONPATH": "", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    how = ("--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed")
    run(python, "-m", "pip", "install", *how, str(package), **clean)
    where = run(python, "-P", "-c", "import kvtcd; print(kvtcd.__file__)", cwd=tmp_path, **clean)
    assert Path(where.strip()).is_relative_to(bare.parent)
    needs = run(python, "-P", "-c", NEEDS, cwd=tmp_path, **clean)
    assert needs.strip() == "[]", "what the package says it needs is what the tests run with"
    assert run(str(bare / "kvtcd"), "--version", cwd=tmp_path, **clean).strip() == __version__

    (tmp_path / "c.toml").write_text(
        '[daemon]\nstate = "state"\nsocket = "s"\n[host]\ncapacity = "8 MiB"\n[disk]\ncapacity = "8 MiB"\n'
    )
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [str(bare / "kvtcd"), "serve", "--config", "c.toml"],
            cwd=tmp_path, env=os.environ | clean, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with Client(tmp_path / "s") as client:
            eventually(lambda: daemon.poll() is not None or client.ready())
            assert daemon.poll() is None, (tmp_path / "log").read_text()
            client.register("n", IDENTITY)
            head = BlockHead(EngineKey(b"k"), BLOCK_TOKENS, first_token=0)
            assert client.put("n", head, block(1), durable=True).outcome == "stored"
            assert bytes(client.get("n", EngineKey(b"k"))) == block(1)
        daemon.terminate()
        assert daemon.wait(PATIENCE_S) == 0
    finally:
        daemon.kill()
        daemon.wait()


NEEDS = """
from importlib.metadata import requires, version
from packaging.requirements import Requirement
needs = [Requirement(line) for line in requires("kvtcd")]
print([str(n) for n in needs if (n.marker is None or n.marker.evaluate({"extra": ""}))
       and version(n.name) not in n.specifier])
"""


def test_the_shell_is_told_what_can_be_said() -> None:
    program = str(Path(sys.executable).with_name("kvtcd"))
    answer = run(program, _KVTCD_COMPLETE="complete_bash", COMP_WORDS="kvtcd se", COMP_CWORD="1")
    assert answer.split() == ["serve"]


def test_the_image_is_made_of_what_is_there_and_of_nothing_secret() -> None:
    text = (ROOT / "systemd" / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {
        "FROM",
        "ARG",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "VOLUME",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {name for name, _ in lines} <= known
    copied = [rest.split() for name, rest in lines if name == "COPY" and "--from" not in rest]
    assert all((ROOT / source).exists() for *sources, _ in copied for source in sources)
    assert [rest for name, rest in lines if name == "USER"] == ["kvtcd"], "not root"

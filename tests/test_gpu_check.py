"""The script for machines with a GPU: what it says without one; every part of it, on a CPU twin."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import (
    fake_cuda,
    fake_cudart,
    fake_nvcomp,
    gpu_figures,
    gpu_nvcomp,
    gpu_ready,
    gpu_report,
    gpu_run,
    gpu_versions,
)
from support.gpu_nvcomp import Wrong

from kvtcd.codec import nvcomp
from kvtcd.codec.staged import StagedDecoder
from kvtcd.codec.uniform import Arithmetic, InTorch, Restored

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SCRIPT = ROOT / "tests" / "gpu_check.sh"


def rows(*faster: bool) -> list[dict[str, object]]:
    return [
        {"chunks": 2**n, "inflate_gpu_ms": 1.0 if fast else 3.0, "inflate_cpu_ms": 2.0}
        for n, fast in enumerate(faster)
    ]


# ---- what is missing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and it would all run")
def test_without_a_device_it_says_so_and_is_content(tmp_path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    result = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=False)

    assert result.returncode == 0, result.stderr
    assert "no CUDA device" in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.fixture
def shelf(monkeypatch) -> dict[str, tuple[str, list[str]]]:
    """What is installed: by name its version, and what it requires."""
    shelf: dict[str, tuple[str, list[str]]] = {}

    def distribution(name: str) -> SimpleNamespace:
        if name not in shelf:
            raise gpu_ready.PackageNotFoundError(name)
        return SimpleNamespace(version=shelf[name][0], requires=shelf[name][1], metadata={"Name": name})

    monkeypatch.setattr(gpu_ready, "distribution", distribution)
    return shelf


def test_what_is_missing_is_named_however_deep_it_is_required(shelf) -> None:
    shelf |= {
        "top": (
            "2.0",
            ["middle[fast]>=1", "old>=3", "other; python_version < '3'", "extra; extra == 'rich'"],
        ),
        "middle": ("1.5", ["absent>=4", "quick>=2; extra == 'fast'", "slow; extra == 'slow'", "top"]),
        "old": ("2.9", []),
        "low": ("0.9+cpu", []),
    }
    assert gpu_ready.lacking(["top>=1", "low>=1"]) == ["low>=1", "absent>=4", "quick>=2"]
    assert gpu_ready.lacking(["top[rich]>=1"]) == ["extra", "absent>=4", "quick>=2"]
    assert gpu_ready.lacking(["top>=1", "low>=0.9"]) == ["absent>=4", "quick>=2"], (
        "old is there, if not as liked"
    )


def test_missing_wheels_are_named_with_the_commands_that_bring_them(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_ready, "lacking", lambda _: ["pluggy>=1", "annotated-doc"])
    assert gpu_ready.main() == 69
    said = capsys.readouterr().out

    assert "missing: pluggy>=1 annotated-doc\n" in said
    for command in ("pip wheel --wheel-dir wheels", "pip install --no-index --find-links wheels"):
        assert f"{command} 'pluggy>=1' annotated-doc" in said


def test_without_what_compares_versions_names_alone_are_compared(shelf, monkeypatch, capsys) -> None:
    shelf["torch"] = ("2.11", [])
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert gpu_ready.main() == 69
    missing = capsys.readouterr().out.splitlines()[0].split()

    assert missing[1] == "packaging"
    assert {"pytest>=9,<10", "aiohttp>=3.14.4,<3.15"} <= set(missing)
    assert not any(each.startswith("torch") for each in missing)


COLLECT = """
import sys, pytest
from importlib.metadata import packages_distributions
own, there = set(sys.argv[1].split(",")), packages_distributions()
class Others:
    def find_spec(self, name, path=None, target=None):
        from_ = there.get(name.partition(".")[0])
        if from_ and not own & {each.lower().replace("_", "-") for each in from_}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Others())
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu", *sys.argv[2:]]))
"""


def test_what_is_asked_for_is_enough_to_collect_the_tests() -> None:
    """Whatever else is installed is hidden from them."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    walked = {one.name.lower() for one, _, _ in gpu_ready.walk(gpu_ready.asked(gpu_ready.project()))}
    plugins = [word for name in ("pytest_asyncio.plugin", "pytest_timeout") for word in ("-p", name)]
    result = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(walked), *plugins, *map(str, files)],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={
            **os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_NO_PLUGINS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"
        },
    )  # fmt: skip

    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]


@pytest.mark.parametrize(("cuda", "major"), [("12.8", 12), ("13.0", 13), (None, 13)])
def test_nvcomp_comes_for_the_cuda_of_torch(cuda, major) -> None:
    (asked,) = gpu_ready.nvcomp(gpu_ready.project(), cuda)
    assert asked.startswith(f"nvidia-nvcomp-cu{major}>=6")


@pytest.mark.parametrize(
    ("there", "card", "why", "status", "said"),
    [
        (False, False, None, 3, "no CUDA device"),
        (
            False,
            True,
            "RuntimeError: the driver is too old",
            1,
            "cannot be used: RuntimeError: the driver is too old",
        ),
        (True, True, "AcceleratorError: no kernel image", 1, "no kernel image"),
        (True, True, None, 0, "a card torch"),
    ],
)
def test_a_card_that_cannot_be_used_is_a_failure_with_its_reason(
    monkeypatch, capsys, there, card, why, status, said
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(gpu_ready, "CARD", SimpleNamespace(exists=lambda: card))
    monkeypatch.setattr(gpu_ready, "fault", lambda: why)

    assert gpu_ready.main() == status
    assert said in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_fault_of_a_card_is_what_torch_says(monkeypatch) -> None:
    if torch.version.cuda is None:
        assert "built without CUDA" in gpu_ready.fault()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert re.match("[A-Za-z]+: .+", gpu_ready.fault())


# ---- the parts


@pytest.fixture
def twin(monkeypatch):
    """A device that is the CPU, and parts in sizes that it can do."""
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch)
    fake_cudart.install(monkeypatch)
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    monkeypatch.setattr(gpu_figures.fused, "load", lambda _: Kernels())
    monkeypatch.setattr(gpu_nvcomp, "SIZES", (1, 33, 16_384))
    monkeypatch.setattr(sys.modules["nvidia.nvcomp"], "as_arrays", by_address)
    monkeypatch.setattr(gpu_nvcomp, "_SPIN_S", 0.01)
    small = {
        (gpu_figures, "copies"): (1 << 20,),
        (gpu_figures, "kernels"): ([(20, 5)],),
        (gpu_figures, "entropy"): ((2, 5),),
        (gpu_figures, "lossless"): (300,),
        (gpu_figures, "refused"): (100,),
        (gpu_figures, "overlap"): (2, 0.001),
        (gpu_figures, "straight"): ([(512, 64)],),
    }
    manners, speeds = gpu_nvcomp.manners, gpu_nvcomp.speeds
    monkeypatch.setattr(gpu_nvcomp, "speeds", lambda *most: speeds(*most, chunks=(8192,), batches=(2, 5)))
    monkeypatch.setattr(gpu_nvcomp, "manners", lambda api, device: manners(api, device, 20))
    for (module, name), most in small.items():
        part = getattr(module, name)
        monkeypatch.setitem(gpu_run.PARTS, name, lambda device, part=part, most=most: part(device, *most))


class Kernels(Arithmetic):
    quantise, restore = InTorch.quantise, InTorch.restore


def by_address(buffer, *given):
    """`as_arrays` of the stand-in, of what says where it lies as well."""
    if isinstance(buffer, gpu_nvcomp.OnDevice):
        says = buffer.__cuda_array_interface__
        memory = (ctypes.c_uint8 * says["shape"][0]).from_address(says["data"][0])
        buffer = torch.from_numpy(np.ctypeslib.as_array(memory))
    return fake_nvcomp.as_arrays(buffer, *given)


@pytest.fixture
def ran():
    """The names of functions that have run, by module."""
    names: set[tuple[str, str]] = set()

    def note(frame, event, _) -> None:
        if event == "call":
            names.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    threading.setprofile(note)
    yield names
    sys.setprofile(None)
    threading.setprofile(None)


@pytest.mark.usefixtures("twin")
def test_every_part_runs_and_is_written_and_shown(tmp_path, ran, capsys) -> None:
    file = tmp_path / "figures.json"
    fine = gpu_run.run(file, list(gpu_run.PARTS), CPU)
    sys.setprofile(None)
    parts = json.loads(file.read_text())
    shown = capsys.readouterr().out

    failed = {name: told["why"] for name, told in parts.items() if told["state"] != "ended"}
    assert failed.pop("wheels").startswith("what is installed does not load"), (
        "another process has no stand-in"
    )
    assert failed == {}
    assert not fine
    assert list(parts) == list(gpu_run.PARTS)
    assert all(name in shown for name in parts)
    found = {name: told["found"] for name, told in parts.items()}
    assert [(row["memory"], row["huge"]) for row in found["copies"]] == [
        *((memory, huge) for huge in (True, False) for memory in ("pageable", "pinned")), ("own", None),
    ]  # fmt: skip
    assert [row["chunks"] for row in found["entropy"]] == [2, 5, "device ahead from, 1 used"]
    assert [(row["codec_on"], row["way"]) for row in found["overlap"]] == [
        (where, way) for where in ("threads", "cuda") for way in ("demote", "promote")
    ]
    assert [(row["algorithm"], row["type"], row["chunks"]) for row in found["speeds"]] == [
        (*algorithm, count) for algorithm in gpu_nvcomp.ALGORITHMS for count in (2, 5)
    ]
    assert all(row["decode_gb_s"] > 0 and row["ratio"] > 1 for row in found["speeds"])
    assert len(found["exchanged"]) == 2 * 3 * 2
    said = {row["what"]: row["found"] for row in found["manners"]}
    assert said["pinned"] == "encodes into it and decodes from it"
    assert said["list"].startswith("refused"), "the stand-in takes no lists"
    assert [(row["codec_on"], row["nvcomp"]) for row in found["lossless"]] == [("cpu", False), ("cuda", True)]
    assert all(row["chunks"] > 256 for row in found["lossless"])
    assert len(found["refused"]) == 7
    assert [row["codec"] for row in found["straight"]] == ["kvtc", "kvtc2"]
    assert all(row["host_gb_s"] > 0 and row["straight_gb_s"] > 0 for row in found["straight"])
    modules = (gpu_figures, gpu_nvcomp, gpu_run, gpu_versions)
    assert {
        (module.__file__, function.__name__) for module in modules for function in own(module)
    } - ran == set(), "a typo in it would be found on a card alone"


def own(module):
    """The functions of a module, those of its classes too."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if inspect.isclass(value) else [value]
        yield from (inspect.unwrap(each) for each in members if inspect.isfunction(each))


@pytest.mark.usefixtures("twin")
def test_a_part_that_fails_is_told_and_the_others_run(tmp_path, monkeypatch, capsys) -> None:
    def breaks(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def finds(_: torch.device) -> None:
        raise Wrong("the codes are others", [{"rank": 4}])

    monkeypatch.setitem(gpu_run.PARTS, "copies", breaks)
    monkeypatch.setitem(gpu_run.PARTS, "kernels", finds)
    file = tmp_path / "figures.json"
    assert not gpu_run.run(file, ["copies", "kernels"], CPU)
    assert gpu_run.run(file, ["refused"], CPU)
    parts = json.loads(file.read_text())

    assert [(name, told["state"]) for name, told in parts.items()] == [
        ("copies", "failed"), ("kernels", "failed"), ("refused", "ended"),
    ]  # fmt: skip
    assert "illegal memory access" in parts["copies"]["why"]
    assert parts["kernels"]["found"] == [{"rank": 4}]
    assert "kernels failed: the codes are others" in capsys.readouterr().out


def test_a_process_that_is_killed_leaves_what_it_had_begun(tmp_path, monkeypatch) -> None:
    def dies(_: torch.device) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_run.PARTS, "copies", dies)
    with pytest.raises(KeyboardInterrupt):
        gpu_run.run(tmp_path / "figures.json", ["versions", "copies", "kernels"], CPU)
    parts = json.loads((tmp_path / "figures.json").read_text())

    assert {name: told["state"] for name, told in parts.items()} == {"versions": "ended", "copies": "begun"}


@pytest.mark.usefixtures("twin")
def test_nvcomp_that_is_left_out_is_no_failure_and_one_that_is_missing_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    monkeypatch.setitem(sys.modules, "nvidia", None)
    file, parts = tmp_path / "figures.json", sorted(gpu_run.OF_NVCOMP - {"wheels"})
    assert not gpu_run.run(file, parts, CPU)
    found = json.loads(file.read_text())
    assert all("it is not installed" in found[part]["why"] for part in parts)
    monkeypatch.setenv("NVCOMP", "no")
    assert gpu_run.run(file, parts, CPU)
    assert {told["state"] for told in json.loads(file.read_text()).values()} == {"left out"}


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("part", ["exchanged", "entropy"])
def test_a_library_that_zlib_does_not_read_fails_the_check(part, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        gpu_nvcomp,
        "loaded",
        lambda _: nvcomp.Nvcomp(sys.modules["nvidia.nvcomp"], CPU, gpu_nvcomp.Residency()),
    )
    monkeypatch.setattr(fake_nvcomp.Codec, "flaw", "reads wrong")
    assert not gpu_run.run(tmp_path / "figures.json", [part], CPU)


def test_kernels_that_say_other_codes_fail_the_check(monkeypatch) -> None:
    class Other(Kernels):
        def restore(self, *given):
            coefficients, asked = InTorch().restore(*given)
            return Restored(coefficients + 1, asked)

    monkeypatch.setattr(gpu_figures.fused, "load", lambda _: Other())
    with pytest.raises(Wrong, match="other codes"):
        gpu_figures.kernels(CPU, [(20, 5)])


@pytest.mark.usefixtures("twin")
def test_damage_that_is_taken_fails_the_check(monkeypatch) -> None:
    monkeypatch.setattr(StagedDecoder, "inflate", lambda *_: None)
    with pytest.raises(Wrong, match="was flipped, and taken"):
        gpu_figures.refused(CPU, 100)


def test_what_a_driver_says_is_written_down(tmp_path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95\nGCC version\n")
    said = gpu_versions.versions(CPU, file)

    assert said["driver"].endswith("580.95")
    assert {"python", "torch", "triton", "cuda", "nvidia-nvcomp-cu13", "nvidia-libnvcomp-cu12"} <= set(said)


@pytest.mark.parametrize(
    ("number", "status", "want"), [(13_000, 0, "13.0"), (12_080, 0, "12.8"), (0, 999, None)]
)
def test_the_driver_says_which_cuda_it_speaks(monkeypatch, number, status, want) -> None:
    class Library:
        def cuDriverGetVersion(self, found) -> int:  # noqa: N802 - CUDA's name
            found._obj.value = number
            return status

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    assert gpu_versions.versions(CPU)["driver_cuda"] == want


def test_a_card_is_described(monkeypatch) -> None:
    card = SimpleNamespace(name="a card", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 2))
    said = gpu_versions.versions(torch.device("cuda", 0))

    assert (said["card"], said["capability"], said["multiprocessors"]) == ("a card", "9.0", 132)
    assert (said["memory_free"], said["memory"]) == (1, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_there_is_none() -> None:
    assert gpu_versions.versions(CPU)["driver_cuda"] is None


def test_wheels_that_were_brought_are_tried_in_place_of_what_is_installed(tmp_path) -> None:
    with zipfile.ZipFile(tmp_path / "nvidia_nvcomp_cu13-6.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nvidia/nvcomp/__init__.py", "raise ImportError('this driver is too old')")
    with pytest.raises(Wrong) as wrong:
        gpu_versions.wheels(CPU, str(tmp_path))
    installed, new, old = wrong.value.found

    assert installed["wheel"] == "installed"
    assert (new["wheel"], new["loads"]) == ("cu13", False)
    assert "this driver is too old" in new["why"]
    assert (old["wheel"], old["loads"]) == ("cu12", None)


@pytest.mark.parametrize(
    ("faster", "want"),
    [
        ((False, True, True), 2),
        ((True, False, True), 4),
        ((True, True), 1),
        ((False, False), None),
        ((True, False), None),
        ((), None),
    ],
)
def test_the_crossover_is_where_the_device_stays_ahead(faster, want) -> None:
    assert gpu_figures.crossover(rows(*faster), "inflate") == want


def test_a_call_that_keeps_pythons_lock_is_told_from_one_that_lets_go() -> None:
    keeps = ctypes.PyDLL(None).usleep  # called with the lock held
    lets_go = ctypes.CDLL(None).usleep
    interval = sys.getswitchinterval()
    assert gpu_nvcomp.kept(lambda: keeps(20_000), CPU) == 0
    assert gpu_nvcomp.kept(lambda: lets_go(20_000), CPU) > 0
    assert sys.getswitchinterval() == interval


def test_what_failed_is_written_and_the_rest_goes_on(monkeypatch) -> None:
    def speed(*_: object) -> dict[str, object]:
        raise RuntimeError("not supported")

    monkeypatch.setattr(gpu_nvcomp, "_speed", speed)
    rows = gpu_nvcomp.speeds(None, CPU, float("inf"), chunks=(8192,), batches=(2,))

    assert [row["failed"] for row in rows] == ["not supported"] * len(gpu_nvcomp.ALGORITHMS)
    assert gpu_nvcomp.speeds(None, CPU, 0.0, chunks=(8192,), batches=(2,)) == [], "there was no time left"


# ---- the report, and the script itself

TESTS = '<testsuite><testcase name="one"/><testcase name="two">{}</testcase></testsuite>'


def left(folder: Path, tests: str, **other: str) -> Path:
    """What a run leaves, in which all is well but for `tests` and states of parts."""
    states = dict.fromkeys(gpu_run.PARTS, "ended") | other
    (folder / "figures.json").write_text(
        json.dumps({name: {"state": state} for name, state in states.items() if state})
    )
    (folder / "tests.xml").write_text(TESTS.format(tests))
    for name in gpu_report.CODECS:
        (folder / f"{name}.json").write_text(json.dumps({"rows": [{"p": 32768}]}))
    return folder


@pytest.mark.parametrize(
    ("tests", "other", "fine", "said"),
    [
        ("", {}, True, "2 tests"),
        ('<skipped message="one GPU is here"/>', {}, True, "one GPU is here"),
        ('<failure message="assert 1 == 2">...</failure>', {}, False, "assert 1 == 2"),
        ("", {"speeds": "begun"}, False, "it did not end"),
        ("", {"speeds": "failed"}, False, "failed"),
        ("", {"speeds": ""}, False, "not begun"),
        ("", {"speeds": "left out"}, True, "left out"),
    ],
)
def test_the_report_is_good_only_if_all_has_run(tmp_path, capsys, tests, other, fine, said) -> None:
    assert gpu_report.report(left(tmp_path, tests, **other)) is fine
    report = json.loads((tmp_path / "report.json").read_text())

    assert said in capsys.readouterr().out
    assert {"date", "steps", "parts", "codecs"} <= set(report)
    assert report["codecs"]["codec"]["rows"] == [{"p": 32768}]


@pytest.mark.parametrize("file", ["tests.xml", "figures.json", "codec.json", "codec-no-graphs.json"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_report_of_what_is_not_there_says_so(tmp_path, file, cut) -> None:
    path = left(tmp_path, "") / file
    if cut:
        path.write_text(path.read_text()[:20])
    else:
        path.unlink()
    assert not gpu_report.report(tmp_path)
    assert (tmp_path / "report.json").exists()


def test_a_script_whose_steps_fail_goes_on_and_ends_with_one(tmp_path) -> None:
    """A stand-in for Python notes what it is asked for, and fails at all but the first."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$2" = support.gpu_ready ]\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")}
    result = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=False)
    asked = (tmp_path / "asked").read_text()

    assert result.returncode == 1
    run = [word for line in asked.splitlines() if "support.gpu_run" in line for word in line.split()[3:]]
    assert sorted(run) == sorted(gpu_run.PARTS), "each part once"
    assert "support.gpu_report" in asked
    assert all(f"{name}.json" in asked for name in gpu_report.CODECS)
    assert "speeds ended with 1" in result.stdout


def test_what_its_steps_may_take_is_less_than_six_minutes() -> None:
    text = SCRIPT.read_text("utf-8")
    budgets = re.findall(r'^(?:step "[^"]+"|timeout --kill-after=5) (\d+) ', text, re.MULTILINE)

    assert len(budgets) == len(re.findall(r"^step |^timeout ", text, re.MULTILINE))
    assert sum(map(int, budgets)) < 350
    assert sum(map(int, budgets)) > 300, "more than nothing was found"


def test_each_of_the_twelve_checks_is_in_a_part() -> None:
    checks = re.findall(r"^# +(\d+) (\w+)  ", SCRIPT.read_text("utf-8"), re.MULTILINE)

    assert [int(number) for number, _ in checks] == list(range(1, 13))
    assert {part for _, part in checks} <= set(gpu_run.PARTS)

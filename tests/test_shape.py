"""What the tree promises: small modules, names that say something, a test for each."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvtcd"
# `lab/texts` holds calibration texts, some of which are Python sources of other projects.
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "texts" not in p.relative_to(PACKAGE).parts[:2])
BANNED = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}
MAX_LINES = 300


def test_no_module_is_longer_than_one_reads_at_a_sitting() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}

    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_name_fits_everything() -> None:
    assert [p for p in MODULES if BANNED & set(p.stem.split("_"))] == []


def test_every_module_says_what_it_is() -> None:
    silent = [p for p in MODULES if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))]

    assert silent == []


def test_nothing_loads_code_from_data() -> None:
    """No pickle, no eval, no import by name: reliability by construction."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & {"eval", "exec", "__import__"}
                assert not names, f"{path}:{node.lineno}"
                continue
            else:
                continue
            assert not names & banned, f"{path}:{node.lineno}"


def test_import_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", ["kvtcd", "kvtcd.client", "kvtcd.core.wire"])
def test_a_client_imports_without_torch(module: str) -> None:
    heavy = {"torch", "numba", "llvmlite", "aiohttp", "lmdb"}
    code = f"import sys, {module}; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr

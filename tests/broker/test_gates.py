"""What must never appear on a path that takes in bytes from others, and what the broker must not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("broker", "weights_sync", "generators", "learners", "configs", "launch", "telemetry", "tasks")
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
FORBIDDEN_NAMES = {"eval", "exec"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "unsafe_load"}


def offences(source: str) -> Iterator[str]:
    """Every use of code execution or unpickling in a source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"import {name}" for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
                yield f"{node.func.id}()"
            if isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_METHODS:
                yield f".{node.func.attr}()"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield "shell=True"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.hashing",
        "eval('1')",
        "exec(text)",
        "socket.recv_pyobj()",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=flag)",
    ],
)
def test_the_gate_sees_each_kind_of_offence(source: str) -> None:
    assert list(offences(source))


def test_the_gate_lets_modules_go_into_evaluation_mode() -> None:
    assert not list(offences("model.eval()\nsubprocess.run(x, shell=False)\nimport msgpack"))


@pytest.mark.parametrize("package", PACKAGES)
def test_c120_c123_no_product_code_unpickles_evaluates_or_starts_a_shell(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [f"{file.relative_to(ROOT)}: {what}" for file in files for what in offences(file.read_text("utf-8"))]
    assert found == []


def test_the_broker_runs_without_torch() -> None:
    program = (
        "import sys, pkgutil, importlib, broker\n"
        "for module in pkgutil.iter_modules(broker.__path__, 'broker.'): importlib.import_module(module.name)\n"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0

"""Finds the functions that settings name: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from broker.errors import SlipstreamError


class TaskError(SlipstreamError):
    """A setting of the task, the model or the algorithm cannot be used; the message names it."""


def load_function(reference: str, *, setting: str) -> Callable[..., Any]:
    """The function that ``reference`` names; raises TaskError naming ``setting`` and what is near."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise TaskError(f"{setting}: {reference!r} is not of the form module:function or file.py:function")
    module = _load_file(Path(source), setting) if source.endswith(".py") else _load_module(source, setting)
    function = getattr(module, name, None)
    if not callable(function):
        offered = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise TaskError(f"{setting}: {source!r} has no function {name!r}{_nearest(name, offered)}")
    return function  # type: ignore[no-any-return]


def described(error: BaseException, *, caller: str) -> str:
    """An error of somebody's function in one line, with the place in their file that it came through.

    ``caller``: file that called the function; the frames down to it, and the import machinery's, are left out.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [one for one in extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    theirs = [one for one in frames if one.filename not in (caller, __file__)]
    return f"{text} ({Path(theirs[0].filename).name}:{theirs[0].lineno})" if theirs else text


def _load_module(source: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        # Only "this very module is not there" is about the setting; an import inside it that fails is its own error.
        if error.name is None or not (source == error.name or source.startswith(error.name + ".")):
            raise
        offered = [f"tasks.{path.stem}" for path in Path(__file__).parent.glob("*.py")]
        raise TaskError(f"{setting}: there is no module {source!r}{_nearest(source, offered)}") from None


def _load_file(source: Path, setting: str) -> ModuleType:
    path = source.expanduser().resolve()
    if not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TaskError(f"{setting}: there is no file {path}{_nearest(str(path), beside)}")
    key = f"slipstream_task_{path.stem}_{abs(hash(path)):x}"
    if key in sys.modules:  # prompts and rewards of one file share its module-level state
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{setting}: {path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _nearest(name: str, offered: list[str]) -> str:
    near = get_close_matches(name, sorted(offered), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(offered)) or 'none'}"

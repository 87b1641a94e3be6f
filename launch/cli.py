"""``slipstream``: one command, one module of this folder for each thing it does.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 SIGINT, 143 SIGTERM.
"""

from __future__ import annotations

# Only what the interpreter has loaded anyway: everything else is imported below ``main``, where Ctrl-C is quiet.
import os
import signal
import sys

TYPE_CHECKING = False  # typing's own costs its import
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from types import FrameType
    from typing import NoReturn, TextIO

# name -> (module, or module:function, help); the function, by default ``run``, takes args and returns the exit code.
# Imported when chosen: torch takes seconds, --help must not.
_COMMANDS = {
    "up": ("launch.up", "run everything on this machine"),
    "broker": ("launch.broker_role", "run the broker"),
    "generator": ("launch.generator_role", "run one generator"),
    "learner": ("launch.learner_role", "run the learner, all ranks of this machine"),
    "ledger": ("launch.ledger", "show where every prompt is, and whether the books balance"),
    "requeue": ("launch.ledger:requeue", "queue prompts again that were given up"),
    "config": ("launch.config_show", "show the resolved configuration and the derived numbers"),
    "doctor": ("launch.doctor", "check this machine, and name the fix"),
}


def command() -> NoReturn:
    """The process: runs ``main`` and ends with its exit code.

    By os._exit, after all that atexit holds: a daemon thread that waits inside PyTorch (its TCPStore, a broadcast)
    comes back without the interpreter's lock while that is being taken down, and the process is aborted with code 134.
    """
    import atexit
    import traceback

    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        _finish_threads()
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        os._exit(code)


def _finish_threads() -> None:
    """Those that are no daemons are waited for, as the interpreter does."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()


def _flush(stream: TextIO | None) -> None:
    import contextlib

    with contextlib.suppress(OSError, ValueError):  # closed, or whoever read it has gone
        if stream is not None:
            stream.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _interruptible(quietly=True)
    args = arguments(argv)
    from importlib import import_module

    from broker.errors import SlipstreamError
    from configs.load import ConfigError  # pydantic: not for --help and --version
    from launch.signals import Stopped
    from tasks.loading import TaskError

    try:
        module, _, function = _COMMANDS[args.command][0].partition(":")
        run = getattr(import_module(module), function or "run")
        _interruptible(quietly=False)
        return int(run(args))
    except (ConfigError, TaskError) as error:  # a setting is wrong: trying again does not help
        for line in str(error).splitlines():  # one a problem, and each of them ours
            print(f"slipstream: {line}", file=sys.stderr)
        return 2
    except SlipstreamError as error:
        print(f"slipstream: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (told := _about_a_folder(error, args)) is None:
            raise
        print(f"slipstream: {told[1]}", file=sys.stderr)
        return told[0]
    finally:
        _interruptible(quietly=True)


def _interruptible(*, quietly: bool) -> None:
    """What Ctrl-C does: end the process at once, while it has nothing to close, or interrupt the command, which closes
    what it has opened. Commands with a watch of their own (launch/signals.py) and nohup keep what they have set."""
    quiet, loud = _end, signal.default_int_handler
    if signal.getsignal(signal.SIGINT) is (loud if quietly else quiet):
        signal.signal(signal.SIGINT, quiet if quietly else loud)


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


def _about_a_folder(error: Exception, args: argparse.Namespace) -> tuple[int, str] | None:
    from broker.errors import SlipstreamError
    from configs.load import load
    from launch.run_folder import explain

    try:
        return explain(error, load(args.config, args.overrides))
    except SlipstreamError:
        return None


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere; argparse alone takes them only side by side."""
    grammar = parser()
    args, rest = grammar.parse_known_args(argv)
    if args.command == "requeue":
        words = [*args.overrides, *rest]
        args.items = [word for word in words if "=" not in word and not word.startswith("-")]
        args.overrides = [word for word in args.overrides if "=" in word]
        rest = [word for word in rest if word not in args.items]
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        grammar.error(f"unrecognized arguments: {' '.join(strange)}")
    args.overrides = [*args.overrides, *rest]
    return args


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    import argparse

    from configs.presets import DEFAULT, presets

    offered = f"default: {DEFAULT}; presets: {', '.join(presets())}"
    top = argparse.ArgumentParser(
        prog="slipstream", description="Asynchronous, decoupled RL post-training for LLMs", epilog=f"CONFIG: {offered}"
    )
    top.add_argument("--version", action="version", version=f"slipstream {_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == "config":
            command.add_argument("action", choices=["show"], help="print it as YAML")
        if name == "generator":
            command.add_argument("--id", default="", help="name among the members; default: host and process id")
        if name == "ledger":
            either = command.add_mutually_exclusive_group()
            either.add_argument("--dead", action="store_true", help="list the prompts that were given up")
            either.add_argument("--watch", action="store_true", help="go on until the run has finished")
        if name == "requeue":
            command.add_argument("--all-dead", action="store_true", help="all of them; else name the items")
        command.add_argument(
            "-c", "--config", default=DEFAULT, metavar="CONFIG", help=f"a preset's name or a YAML file ({offered})"
        )
        command.add_argument(
            "overrides",
            nargs="*",
            default=(),  # without one, argparse counts them among the required arguments
            metavar="KEY=VALUE",
            help="settings on top, such as learner.optim.lr=2e-5; docs/configuration.md has them all",
        )
    return top


def _version() -> str:
    from importlib.metadata import version

    return version("slipstream")


if __name__ == "__main__":
    command()

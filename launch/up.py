"""``slipstream up``: everything of one run on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from broker.connect import connect
from broker.messages import Counts
from configs import show
from configs.load import load
from configs.run import RunConfig
from launch.children import Children
from launch.environment import placed, told
from launch.monitor import Monitor
from launch.preflight import check_run
from launch.resumption import Standing, completed, going_on, standing
from launch.run_folder import LAUNCHER, LEARNER, begin_anew, claim, draw, keep_config
from launch.signals import Stopped
from launch.supervisor import Heartbeat, NoProgress, RoleFailed, Supervisor
from telemetry.live import LiveView, PlainView, Progress, View
from telemetry.summary import summarize


def run(args: argparse.Namespace) -> int:
    """Runs until the learner has finished, something failed, or a signal came; a complete run is left as it is."""
    config = told(args, load(args.config, args.overrides))
    found = standing(config)
    if found.complete:
        print(completed(config, found))
        return 0
    check_run(config)
    if config.launch.mode == "serial":
        from launch.serial import run_serial  # imports torch

        print("\n".join(going_on(config, found)), flush=True)
        run_serial(config)
        return 0
    return _run_processes(config, found)


def _run_processes(config: RunConfig, found: Standing) -> int:
    introduction = [*(f"{name}: {text}" for name, text in show.derived(config).items()), *going_on(config, found)]
    run_dir = prepare(config)
    began, since, counts, code = time.monotonic(), time.time(), None, 0
    console = Console(stderr=False)
    console.print("\n".join(introduction), highlight=False, markup=False, soft_wrap=True)
    try:
        with Children(config.launch.stop_timeout_s) as children:
            counts = _supervise(config, run_dir, children, console, since)
    except (RoleFailed, NoProgress) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        code = error.exit_code if isinstance(error, RoleFailed) else 1
    except Stopped as stopped:
        print(f"slipstream: {stopped}; everything is down", file=sys.stderr)
        code = stopped.exit_code
    if 0 < code < 128:  # a learner that finishes draws it; who has pressed Ctrl-C does not wait for one
        draw(config)
    text = summarize(
        run_dir,
        total_steps=config.learner.total_steps,
        max_staleness=config.rollout.max_staleness,
        wall_s=time.monotonic() - began,
        counts=counts,
        since=since,
        resumed=found.checkpoint is not None,
    )
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return code


def prepare(config: RunConfig) -> Path:
    """The run's folder, with the configuration that all its processes load."""
    run_dir = Path(config.run_dir)
    claim(run_dir, LAUNCHER)
    os.close(claim(run_dir, LEARNER))  # a learner that somebody has started by itself
    (run_dir / "logs").mkdir(exist_ok=True)
    if standing(config).checkpoint is None:
        begin_anew(config)
    keep_config(config)
    return run_dir


def _supervise(config: RunConfig, run_dir: Path, children: Children, console: Console, since: float) -> Counts | None:
    supervisor = Supervisor(config, run_dir / "config.yaml", children)
    url = supervisor.start_broker()
    supervisor.start_roles()
    progress = Progress(
        title=f"{config.project}/{config.experiment}",
        total_steps=config.learner.total_steps,
        max_staleness=config.rollout.max_staleness,
        since=since,
    )
    with Monitor(
        lambda: connect(placed(config), url),
        run_dir / "logs",
        progress,
        _view(config, console),
        refresh_s=config.telemetry.refresh_s,
    ) as monitor:
        try:
            supervisor.watch(Heartbeat(last_progress=monitor.last_progress, obstacle=monitor.obstacle))
        finally:
            children.stop("gen", "learner")  # before the broker that they talk to, and the monitor's last look at it
    return monitor.state.counts if monitor.state else None


def _view(config: RunConfig, console: Console) -> View:
    if config.telemetry.live and console.is_terminal:
        return LiveView(console)
    return PlainView(console, every_steps=config.telemetry.log_every_steps)

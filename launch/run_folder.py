"""What a run leaves in its folder beside metrics, checkpoints and the actor, however its roles were started."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

from configs import show
from configs.load import ConfigError
from configs.run import RunConfig

LAUNCHER = ".lock"
LEARNER = ".learner.lock"
BROKER = ".broker.lock"

_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNUSABLE = {
    errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


def claim(run_dir: Path, role: str) -> int:
    """One LAUNCHER, one LEARNER and one BROKER a folder: launchers would write into each other's logs, a second learner
    would cut the metrics and set aside the checkpoints of the first, and a second broker would take its members.

    Returns the descriptor that holds the claim; the kernel gives it up with this process, however that ends.
    Raises ConfigError when another process holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(run_dir / role, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        going_on = "the broker of this run is running" if role == BROKER else "another run is going on"
        way_out = "stop it, or choose" if role == BROKER else "choose"
        raise ConfigError(f"{going_on} in {run_dir}; {way_out} another experiment=NAME") from None
    return lock


def explain(error: Exception, config: RunConfig) -> tuple[int, str] | None:
    """Exit code and message where the error is that a folder of the run cannot be used, or is full; else None."""
    number = _errno(error)
    file = getattr(error, "filename", None)
    if number in _FULL:
        place = os.fsdecode(file) if isinstance(file, (str, bytes)) else config.run_dir
        return 1, f"output_dir={config.output_dir}: {os.strerror(number)}: {place}"
    if number not in _UNUSABLE or not isinstance(file, (str, bytes)):
        return None
    missing = Path(os.path.abspath(os.fsdecode(file)))  # noqa: PTH100 - not resolved: as the settings spell it
    for name, value, folder in (
        ("output_dir", config.output_dir, config.run_dir),
        ("broker.data_dir", config.broker.data_dir, config.broker.data_dir),
    ):
        given = Path(os.path.abspath(folder))  # noqa: PTH100
        inside = given in (missing, *missing.parents)
        # What is not there inside a folder that is there is no fault of the folder's.
        if value and (inside or missing in given.parents) and not (number == errno.ENOENT and given.is_dir()):
            return 2, f"{name}={value}: {os.strerror(number)}: {missing}"
    return None


def _errno(error: Exception) -> int:
    """0 where there is none. Libraries written in Rust (safetensors) tell it in their text alone."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0


def keep_config(config: RunConfig) -> Path:
    """Writes the resolved configuration, without passwords, as ``config.yaml``."""
    path = Path(config.run_dir) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(show.render(config), encoding="utf-8")
    return path


def begin_anew(config: RunConfig) -> None:
    """Empties what an earlier run of the same name would be taken for: its metrics go, and of its logs one is kept."""
    run_dir = Path(config.run_dir)
    for name in ("logs/metrics.jsonl", "logs/eval.jsonl", "reward.png"):
        (run_dir / name).unlink(missing_ok=True)
    for log in (run_dir / "logs").glob("*.log"):
        log.replace(log.with_name(f"{log.name}.1"))


def draw(config: RunConfig) -> None:
    """Draws ``reward.png`` from the steps there are."""
    from telemetry.plot import plot_run  # matplotlib: only when there is something to draw

    run_dir = Path(config.run_dir)
    plot_run(
        run_dir / "logs" / "metrics.jsonl",
        run_dir / "reward.png",
        max_staleness=config.rollout.max_staleness,
        title=f"{config.project}/{config.experiment}",
    )

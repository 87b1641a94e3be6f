"""What a run leaves in its folder beside metrics, checkpoints and the actor, however its roles were started."""

from __future__ import annotations

from pathlib import Path

from configs import show
from configs.run import RunConfig


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

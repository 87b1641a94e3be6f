"""The judge of a finished run."""

from pathlib import Path

import pytest

from configs import show
from configs.load import load
from launch.verify_run import main
from telemetry.sink import JsonlSink


def finished_run(tmp_path: Path, *, steps: int = 20, oldest: int = 1, last: float = 0.9) -> Path:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").write_text("{}")
    (tmp_path / "reward.png").write_bytes(b"")
    (tmp_path / "config.yaml").write_text(show.render(load("quickstart", ["learner.total_steps=20"])))
    sink = JsonlSink(tmp_path / "logs" / "metrics.jsonl")
    sink.write({"step": 0, "skipped": True, "reward_mean": 9.0})
    for step in range(1, steps + 1):
        sink.write(
            {"step": step, "reward_mean": 0.1 if step <= 10 else last, "staleness_max": oldest if step == 5 else 0}
        )
    return tmp_path


CLAIMS = ["--min-reward", "0.8", "--max-start-reward", "0.2", "--max-staleness", "1"]


def test_a_run_that_kept_its_promises_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(finished_run(tmp_path)), *CLAIMS]) == 0
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        ({"steps": 19}, "steps 1 to 20"),
        ({"oldest": 2}, "oldest trained token 2 versions, at most 1"),
        ({"last": 0.7}, "reward of the last 10 steps 0.700, at least 0.8"),
    ],
)
def test_a_run_that_broke_one_is_named(
    broken: dict[str, int], claim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(finished_run(tmp_path, **broken)), *CLAIMS]) == 1  # type: ignore[arg-type]
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert claim in failed[0]


def test_a_run_that_never_began_fails(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(show.render(load("quickstart")))
    assert main([str(tmp_path), "--max-staleness", "1"]) == 1

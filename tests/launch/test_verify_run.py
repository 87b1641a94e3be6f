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


def test_the_bound_is_the_runs_own_unless_another_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, oldest=2)
    assert main([str(run)]) == 1
    assert "oldest trained token 2 versions, at most 1" in capsys.readouterr().out
    assert main([str(run), "--max-staleness", "2"]) == 0


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"5",
        b"[]",
        b"null",
        b'"step"',
        b"\xff",
        b"[" * 100_000,
        b'{"step": null, "reward_mean": 1, "staleness_max": 0}',
        b'{"step": "21", "reward_mean": 1, "staleness_max": 0}',
        b'{"step": NaN, "reward_mean": 1, "staleness_max": 0}',
        b'{"step": Infinity, "reward_mean": 1, "staleness_max": 0}',
        b'{"step": 21, "reward_mean": null, "staleness_max": 0}',
        b'{"step": 21, "reward_mean": 1}',
        b'{"step": 1' + b"0" * 400 + b', "reward_mean": 1, "staleness_max": 0}',
        b'{"step": 1' + b"0" * 5000 + b', "reward_mean": 1, "staleness_max": 0}',
    ],
)
def test_a_line_that_is_no_step_is_a_claim_that_fails(
    line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path)
    with (run / "logs" / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert main([str(run)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_what_is_no_run_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "endless").mkdir()
    endless = show.render(load("quickstart")).replace("total_steps: 200", "total_steps: 1000000000000")
    (tmp_path / "endless" / "config.yaml").write_text(endless)
    for name in ("nowhere", "file", "endless", "x" * 5000, "."):
        assert main([str(tmp_path / name)]) == 2
        assert "is no run that can be judged: " in capsys.readouterr().err


def test_a_run_with_very_many_steps_is_judged_without_counting_them_up(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (run / "config.yaml").write_text(show.render(load("quickstart", ["learner.total_steps=1000000000"])))
    assert main([str(run)]) == 1

"""reward.png."""

from pathlib import Path

from PIL import Image

from telemetry.plot import plot_run
from telemetry.sink import JsonlSink


def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "logs" / "metrics.jsonl")
    for step in range(1, 30):
        sink.write({"step": step, "reward_mean": step / 30, "staleness_max": 1, "staleness_mean": 0.5})
    JsonlSink(tmp_path / "logs" / "eval.jsonl").write({"eval": True, "policy_version": 29, "reward_mean": 0.9})
    output = tmp_path / "reward.png"
    assert plot_run(tmp_path / "logs" / "metrics.jsonl", output, max_staleness=1, title="p/e")
    with Image.open(output) as picture:
        assert picture.size[0] > 600
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10  # lines, not an empty canvas


def test_a_run_without_a_step_has_no_picture(tmp_path: Path) -> None:
    assert not plot_run(tmp_path / "metrics.jsonl", tmp_path / "reward.png", max_staleness=1)
    assert not (tmp_path / "reward.png").exists()

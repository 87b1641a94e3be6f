"""Checkpoints are complete or absent, at whatever moment the process is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from broker.messages import Frontier
from learners.checkpoint import MARKER, CheckpointDamaged, Checkpoints, read_checkpoint
from learners.saving import Saver
from learners.tensor_files import check_tensors, write_tensors


def write(text: str, parts: int = 2) -> object:
    def into(directory: Path) -> None:
        (directory / "sub").mkdir()
        for part in range(parts):
            (directory / "sub" / f"part{part}").write_text(text)

    return into


def test_a_saved_checkpoint_is_found_with_its_version_and_data_position(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.resolve("auto") is None
    frontier = Frontier(base=7, beyond=(9, 12))
    path = checkpoints.save(3, frontier, write("x"))  # type: ignore[arg-type]
    assert path == checkpoints.newest() == tmp_path / "c" / "step_000003"
    assert read_checkpoint(path) == (3, frontier)
    assert (path / "sub" / "part1").read_text() == "x"


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2, 3, 10):
        checkpoints.save(version, Frontier(), write("x"))  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000010"]


def test_a_version_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for text in ("old", "new"):
        checkpoints.save(1, Frontier(), write(text))  # type: ignore[arg-type]
    assert (tmp_path / "step_000001" / "sub" / "part0").read_text() == "new"


def test_c72_killed_at_any_moment_of_a_save_the_previous_checkpoint_or_the_new_one_is_whole(tmp_path: Path) -> None:
    kills = 0
    for moment in range(1, 1000):
        directory = tmp_path / str(moment)
        Checkpoints(directory, keep=1).save(1, Frontier(base=1), write("old"))  # type: ignore[arg-type]
        killed = _save_and_die(directory, moment)
        newest = Checkpoints(directory, keep=1).resolve("auto")
        assert newest is not None, f"killed at event {moment}"
        version, frontier = read_checkpoint(newest)
        text = (newest / "sub" / "part1").read_text()
        assert (version, frontier.base, text) in [(1, 1, "old"), (2, 2, "new")], f"killed at event {moment}"
        shutil.rmtree(directory)
        if not killed:
            assert version == 2
            break
        kills += 1
    assert kills >= 20


def _save_and_die(directory: Path, moment: int) -> bool:
    """Saves in a child that SIGKILLs itself at its ``moment``-th file operation; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        left = moment

        def hook(event: str, _: object) -> None:
            nonlocal left
            if event.partition(".")[0] in ("open", "os", "shutil"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        Checkpoints(directory, keep=1).save(2, Frontier(base=2), write("new"))  # type: ignore[arg-type]
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_c72_killed_from_outside_while_tensors_are_written_the_older_checkpoint_or_the_new_one_is_whole(
    tmp_path: Path,
) -> None:
    survived = []
    for kill in range(20):
        directory = tmp_path / str(kill)
        Checkpoints(directory, keep=1).save(1, Frontier(base=1), write("old"))  # type: ignore[arg-type]
        _save_tensors(directory, after_s=random.Random(kill).uniform(0.0, 0.2))
        newest = Checkpoints(directory, keep=1).resolve("auto")
        assert newest is not None, f"kill {kill}"
        version, frontier = read_checkpoint(newest)
        assert (version, frontier.base) in [(1, 1), (2, 2)], f"kill {kill}"
        if version == 2:
            check_tensors(newest, "model", {f"t{i}": (1 << 18,) for i in range(16)})
        Checkpoints(directory, keep=1).set_aside_after(version)
        left = {path.name for path in directory.iterdir()}
        assert left <= {"step_000001", newest.name}, "what was half-written is still there"
        assert all((directory / name / MARKER).is_file() for name in left), left
        survived.append(version)
        shutil.rmtree(directory)
    assert survived.count(1) >= 5, survived


def _save_tensors(directory: Path, *, after_s: float) -> None:
    """Saves 16 files of 1 MiB beside the main thread of a child, which takes 0.1 s or more, and is killed meanwhile."""
    pid = os.fork()
    if pid == 0:
        saver = Saver(Checkpoints(directory, keep=1))

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for i in range(16):
                time.sleep(0.1 / 16)
                yield f"t{i}", torch.full((1 << 18,), float(i))

        def capture(draft: Path) -> Callable[[], None]:
            return partial(write_tensors, draft, "model", tensors(), file_bytes=1 << 20)

        saver.begin(2, Frontier(base=2), capture)
        ended = saver.wait(30.0) is not None
        os._exit(0 if ended else 1)
    until = time.perf_counter() + after_s
    while time.perf_counter() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.WEXITSTATUS(status) == 0
            return
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_c69_a_missing_or_changed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(1, Frontier(), write("x"))  # type: ignore[arg-type]
    (path / "sub" / "part1").write_text("xy")
    with pytest.raises(CheckpointDamaged, match="part1"):
        read_checkpoint(path)
    (path / "sub" / "part1").unlink()
    with pytest.raises(CheckpointDamaged, match=r"part1.*learner\.checkpoint\.resume"):
        read_checkpoint(path)


def test_a_named_directory_must_be_a_complete_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    path = checkpoints.save(1, Frontier(), write("x"))  # type: ignore[arg-type]
    assert checkpoints.resolve(str(path)) == path
    assert checkpoints.resolve("never") is None
    (path / MARKER).unlink()
    with pytest.raises(CheckpointDamaged, match=r"learner\.checkpoint\.resume"):
        checkpoints.resolve(str(path))


def test_checkpoints_behind_which_a_run_goes_back_are_set_aside_and_not_counted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (4, 8):
        checkpoints.save(version, Frontier(), write("old"))  # type: ignore[arg-type]
    checkpoints.set_aside_after(4)
    checkpoints.save(5, Frontier(), write("new"))  # type: ignore[arg-type]
    assert checkpoints.newest() == tmp_path / "step_000005"
    assert (tmp_path / "given-up-1-step_000008" / "sub" / "part0").read_text() == "old"
    assert (tmp_path / "step_000004").is_dir()


def test_of_those_given_up_the_newest_are_kept_as_many_as_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for begun_anew, text in enumerate("abcd"):
        for version in (50, 200):
            saved = checkpoints.save(version, Frontier(), write(text))  # type: ignore[arg-type]
            at = 1000.0 + 10 * begun_anew + version / 100
            os.utime(saved / MARKER, (at, at))
        caplog.clear()
        checkpoints.set_aside_after(-1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2
    assert {(tmp_path / name / "sub" / "part0").read_text() for name in left} == {"d"}
    assert "is removed: learner.checkpoint.keep = 2" in caplog.text


def test_ranks_meet_before_writing_after_writing_and_at_the_end(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    def barrier() -> None:
        seen.append(((tmp_path / ".tmp-step_000001" / "sub").exists(), (tmp_path / "step_000001" / MARKER).exists()))

    Checkpoints(tmp_path, keep=1, barrier=barrier).save(1, Frontier(), write("x"))  # type: ignore[arg-type]
    assert seen == [(False, False), (True, False), (False, True)]

"""Checkpoints: complete or absent, however the process ends.

    .tmp-step_000010/ (all ranks write) -> fsync -> rename to step_000010/ -> fsync -> complete.json, fsync

The marker comes last and lists every file with its size, so a directory without a marker is half-written (and ignored)
and a directory whose files differ from its marker is damaged (and an error). Nothing here knows what is saved.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from broker.errors import SlipstreamError
from broker.messages import Frontier

log = logging.getLogger(__name__)

MARKER = "complete.json"
_DRAFT, _NAME_OF, _NAME = ".tmp-", "step_{:06d}", re.compile(r"step_(\d{6,})")


class CheckpointDamaged(SlipstreamError):
    """A checkpoint lacks something that it should hold; a run never goes on without it (C69)."""


class Checkpoints:
    """The checkpoints of one run. Every rank calls ``draft``, then rank 0 ``complete``, or all ``save``, which is both.

    ``barrier`` holds the ranks together.
    """

    def __init__(
        self, directory: Path, *, keep: int, rank: int = 0, barrier: Callable[[], None] = lambda: None
    ) -> None:
        self._directory, self._keep, self._rank, self._barrier = directory, keep, rank, barrier

    def save(self, version: int, frontier: Frontier, write: Callable[[Path], None]) -> Path:
        """Saves what ``write`` puts into the directory it is given; complete when this returns, on every rank."""
        write(self.draft(version))
        self._barrier()
        if self._rank == 0:
            self.complete(version, frontier)
        self._barrier()
        return self._final(version)

    def draft(self, version: int) -> Path:
        """Collective. An empty directory to write a checkpoint of ``version`` into."""
        draft = self._directory / f"{_DRAFT}{_NAME_OF.format(version)}"
        if self._rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        self._barrier()
        return draft

    def complete(self, version: int, frontier: Frontier) -> None:
        """Makes the draft, which every rank has written its files into, the newest checkpoint."""
        self._complete(self._directory / f"{_DRAFT}{_NAME_OF.format(version)}", self._final(version), version, frontier)
        self._forget_old()

    def _final(self, version: int) -> Path:
        return self._directory / _NAME_OF.format(version)

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest version."""
        return max(self._complete_ones(), default=(0, None), key=lambda one: one[0])[1]

    def resolve(self, resume: str) -> Path | None:
        """Where to go on: ``checkpoint.resume`` is ``auto``, ``never`` or a directory.

        Raises CheckpointDamaged for a named directory that is no complete checkpoint.
        """
        if resume == "never":
            return None
        if resume == "auto":
            return self.newest()
        path = Path(resume).expanduser()
        if not (path / MARKER).is_file():
            raise CheckpointDamaged(f"learner.checkpoint.resume: {path} is no complete checkpoint (it has no {MARKER})")
        return path

    def set_aside_after(self, version: int) -> None:
        """Renames the checkpoints above ``version``: a run that starts from before them has given them up, and they
        must be neither resumed from nor counted among those to keep. Of all that were given up the newest are kept,
        as many as of the others. What a killed process has left half-written or half-deleted goes too."""
        if self._rank == 0:
            for path in [*self._directory.glob(f"{_DRAFT}step_*"), *self._directory.glob("step_*")]:
                if not (path / MARKER).is_file():  # not yet complete, or not any more
                    shutil.rmtree(path, ignore_errors=True)
            for _, path in [one for one in self._complete_ones() if one[0] > version]:
                number = 1
                while (aside := path.with_name(f"given-up-{number}-{path.name}")).exists():
                    number += 1
                path.rename(aside)
                log.warning("the run starts from version %d; %s is now %s", version, path.name, aside)
            self._forget_given_up()
        self._barrier()

    def _complete(self, draft: Path, final: Path, version: int, frontier: Frontier) -> None:
        files = {str(f.relative_to(draft)): f.stat().st_size for f in sorted(draft.rglob("*")) if f.is_file()}
        for path in [*(draft / name for name in files), *(d for d in draft.rglob("*") if d.is_dir()), draft]:
            _fsync(path)
        if final.exists():  # half-written, or of a run that went back behind this version
            (final / MARKER).unlink(missing_ok=True)
            shutil.rmtree(final)
        draft.rename(final)
        _fsync(self._directory)
        marker = {"version": version, "base": frontier.base, "beyond": list(frontier.beyond), "files": files}
        part = final / f".{MARKER}"
        part.write_text(json.dumps(marker), encoding="utf-8")
        _fsync(part)
        part.rename(final / MARKER)
        _fsync(final)

    def _forget_old(self) -> None:
        for _, path in sorted(self._complete_ones(), reverse=True)[self._keep :]:
            _remove(path)

    def _forget_given_up(self) -> None:
        markers = self._directory.glob(f"given-up-*/{MARKER}")
        newest_first = sorted(markers, key=lambda marker: marker.stat().st_mtime_ns, reverse=True)
        for marker in newest_first[self._keep :]:
            _remove(marker.parent)
            log.warning("%s is removed: learner.checkpoint.keep = %d", marker.parent, self._keep)

    def _complete_ones(self) -> list[tuple[int, Path]]:
        if not self._directory.is_dir():
            return []
        named = [(match, path) for path in self._directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [(int(match[1]), path) for match, path in named if (path / MARKER).is_file()]


def read_checkpoint(path: Path) -> tuple[int, Frontier]:
    """Version and data position of a complete checkpoint, after checking that its files are all there.

    Raises CheckpointDamaged naming the file.
    """
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        files = {path / name: int(size) for name, size in marker["files"].items()}
        version = int(marker["version"])
        frontier = Frontier(base=int(marker["base"]), beyond=tuple(map(int, marker["beyond"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path / MARKER) from error
    for file, size in files.items():
        if not file.is_file() or file.stat().st_size != size:
            raise _damaged(file)
    return version, frontier


def _damaged(file: Path) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{file} is missing or has changed; restore it, or set learner.checkpoint.resume to another checkpoint"
    )


def _remove(path: Path) -> None:
    (path / MARKER).unlink()  # first: what is being deleted must not look complete
    shutil.rmtree(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

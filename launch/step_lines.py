"""One line a step for a learner that nobody watches: started by hand, or serial."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.messages import RunState
from configs.run import RunConfig
from telemetry.live import Progress, number, step_line

SHOWN = "SLIPSTREAM_STEPS_SHOWN"  # set by a launcher that shows the steps itself


class StepLines:
    """Tells every ``telemetry.log_every_steps``-th step, in the words of the launcher's plain view."""

    def __init__(self, config: RunConfig, *, tell: Callable[[str], None]) -> None:
        self._every_steps, self._tell = config.telemetry.log_every_steps, tell
        self._progress = Progress(
            title="", total_steps=config.learner.total_steps, max_staleness=config.rollout.max_staleness
        )

    def __call__(self, record: Mapping[str, object], state: RunState) -> None:
        """Tells a step by its metrics line and the broker's state after it."""
        self._progress.state = state
        if number(record, "step") % self._every_steps == 0:
            self._tell(step_line(record, self._progress))


def silent(record: Mapping[str, object], state: RunState) -> None:
    """For a learner whose launcher shows the steps."""

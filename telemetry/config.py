"""Settings of what is shown and logged."""

from __future__ import annotations

from pydantic import Field

from broker.config import StrictModel


class TelemetryConfig(StrictModel):
    """The live view and the logs."""

    live: bool = Field(True, description="the live view; off, or not a terminal: one line a step")
    refresh_s: float = Field(0.5, gt=0, description="how often the live view is drawn")
    log_level: str = Field("INFO", description="of the roles' logs: DEBUG, INFO, WARNING or ERROR")
    log_every_steps: int = Field(1, ge=1, description="without the live view: a line every so many steps")

"""Settings of what is shown and logged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from broker.config import Seconds, Steps, StrictModel


class TelemetryConfig(StrictModel):
    """The live view and the logs."""

    live: bool = Field(True, description="the live view; off, or not a terminal: one line a step")
    refresh_s: Seconds = Field(0.5, description="how often the live view is drawn")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = Field(
        "INFO", description="of the roles' logs, from this level on"
    )
    log_every_steps: Steps = Field(1, ge=1, description="without the live view: a line every so many steps")

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

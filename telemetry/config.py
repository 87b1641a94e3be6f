"""Settings of what is shown and logged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from broker.config import Seconds, Steps, StrictModel


class TelemetryConfig(StrictModel):
    """The live view and the logs."""

    live: bool = Field(True, description="the live view; off, or not a terminal: one line a step")
    refresh_s: Seconds = 0.5
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    log_every_steps: Steps = Field(1, ge=1)

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

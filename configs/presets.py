"""The presets that come with the project. Without pydantic, for a help text that costs nothing."""

from __future__ import annotations

from pathlib import Path

PRESETS = Path(__file__).parent
DEFAULT = "quickstart"


def presets() -> list[str]:
    """Their names."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))

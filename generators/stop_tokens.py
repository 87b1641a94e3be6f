"""The tokens that end an answer, as the model's own files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def stop_token_ids(model_path: str) -> tuple[int, ...]:
    """Every end-of-sequence id of generation_config.json and config.json, sorted; either may hold one id or a list."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_path) / name
        if path.is_file():
            found |= _ids(json.loads(path.read_text(encoding="utf-8")))
    return tuple(sorted(found))


def _ids(config: dict[str, Any]) -> set[int]:
    eos = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    if eos is None:
        return set()
    return set(eos) if isinstance(eos, list) else {eos}

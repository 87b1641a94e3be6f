"""Published algorithms by name, as the settings they consist of, and the names that settings may have.

Without torch: this is read where a configuration is checked. docs/algorithms.md has the equations and the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "best_worst")
GAE = "gae"
"""The advantage that a critic makes, token by token; those above are functions of a step's rewards."""
LOSS_NAMES = ("ppo", "gspo", "cispo", "dppo", "topr", "dpo")
CORRECTION_NAMES = ("none", "truncate", "mask")
LOSS_MEAN_NAMES = ("token", "sequence", "constant")

_FROM_BEHAVIOR: dict[str, Any] = {"correction": {"kind": "none"}}  # its ratio is to the behavior policy

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "loss_mean": "constant"},
    "rloo": {"advantage": "rloo", "loss_mean": "constant"},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "dapo": {"clip_high": 0.28, "proximal": "interpolated", "zero_variance_groups": "skip"},
    "gspo": _FROM_BEHAVIOR | {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_mean": "sequence"},
    "cispo": _FROM_BEHAVIOR | {"loss": "cispo", "clip_high": 4.0},
    "dppo": _FROM_BEHAVIOR | {"loss": "dppo", "clip_low": 0.15, "clip_high": 0.15},
    "topr": _FROM_BEHAVIOR | {"loss": "topr", "advantage": "dr_grpo", "loss_mean": "constant"},
    "dpo": _FROM_BEHAVIOR | {"loss": "dpo", "advantage": "best_worst", "loss_mean": "sequence"},
    "ppo": {"advantage": "gae", "critic": {"enabled": True}, "mini_batches": 2, "epochs": 2},
    "icepop": {"correction": {"kind": "mask", "cap": 5.0, "floor": 0.5}},
}


def with_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of the section ``algorithm`` with what its recipe sets beside; what is given stays."""
    recipe = values.get("recipe", "grpo")
    filled = dict(values)
    for name, value in RECIPES.get(recipe, {}).items() if isinstance(recipe, str) else ():
        given = filled.setdefault(name, value)
        if isinstance(value, Mapping) and isinstance(given, Mapping):
            filled[name] = {**value, **given}
    return filled


def known_or_own(name: str, known: tuple[str, ...]) -> str:
    """``name``, if it is a known one or of the form ``file.py:function`` or ``module:function``. Raises ValueError."""
    source, colon, function = name.rpartition(":")
    if name in known or (colon and source and function.isidentifier()):
        return name
    near = get_close_matches(name, known, n=1)
    offered = f"expected {', '.join(known)}, or file.py:function"
    raise ValueError(offered + (f"; did you mean {near[0]}?" if near else ""))

"""``slipstream config show``: the resolved configuration, as it would run."""

from __future__ import annotations

import argparse

from configs import show
from configs.load import load


def run(args: argparse.Namespace) -> int:
    """Prints the configuration as YAML that loads again, with the derived numbers as comments."""
    print(show.render(load(args.config, args.overrides)), end="")
    return 0

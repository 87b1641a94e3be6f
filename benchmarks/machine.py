"""What the figures were measured on."""

from __future__ import annotations

import os
import platform

from benchmarks.processes import cores


def machine() -> dict[str, object]:
    """Cores this process may use, the load before, versions."""
    return {
        "cores": cores(),
        "load": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "system": platform.platform(),
    }

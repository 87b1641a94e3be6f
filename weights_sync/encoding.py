"""How one tensor of an update travels, as the manifest says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GAP_WIDTHS = (1, 2, 4)  # bytes
Kind = Literal["whole", "sparse"]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How one tensor travels.

    Attributes:
        count: elements sent, fillers included; of a whole tensor all of them.
        gap_bytes: width of a gap; 0 for a whole tensor.
        nbytes: on the wire.
    """

    kind: Kind
    count: int
    gap_bytes: int
    nbytes: int

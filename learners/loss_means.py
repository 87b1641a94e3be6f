"""What the mean of the losses is over: a weight for each trained row, from the tokens of all rows of the step.

The step's loss is the sum over rows of the weight times the sum over the row's tokens. The weights are made once, for
the whole step on rank 0, and travel with the rows: whichever micro-batch or rank a row comes to, it weighs the same
(C95, C108). Legend: N trained rows of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

LossMean = Callable[[NDArray[np.int64], int], NDArray[np.float64]]
"""(loss tokens of each row [N], all at least 1; ``rollout.max_response_length``) to weights [N]."""


def token(tokens_N: NDArray[np.int64], max_response_length: int) -> NDArray[np.float64]:
    """1 / all tokens of the step: each weighs the same (DAPO, arXiv 2503.14476, equation 12)."""
    return np.full(len(tokens_N), 1.0 / max(1, int(tokens_N.sum())))


def sequence(tokens_N: NDArray[np.int64], max_response_length: int) -> NDArray[np.float64]:
    """1 / (N |o|): each completion weighs the same (GRPO, arXiv 2402.03300, equation 3)."""
    return np.asarray(1.0 / (max(1, len(tokens_N)) * tokens_N), np.float64)


def constant(tokens_N: NDArray[np.int64], max_response_length: int) -> NDArray[np.float64]:
    """1 / (N · max_response_length): no length in it that the policy could change (Dr. GRPO, arXiv 2503.20783)."""
    return np.full(len(tokens_N), 1.0 / (max(1, len(tokens_N)) * max_response_length))


LOSS_MEANS: Mapping[str, LossMean] = {"token": token, "sequence": sequence, "constant": constant}

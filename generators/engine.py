"""The seam between the generator's loop and what samples tokens.

An engine samples under the version it holds, stages a published version in the background while sampling goes on,
and swaps between two of its steps. generators/vllm_engine.py and generators/hf_engine.py are the two real ones,
generators/fake_engine.py the one for logic tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.messages import Float32Array, Int32Array, Prompt, Publication


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One raw completion. L tokens, R runs; see broker.messages.Completion for the fields."""

    token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_runs: Int32Array
    finish_reason: str


class Engine(Protocol):
    """What the generator's loop asks of an engine; all coroutines run on the loop's event loop."""

    @property
    def policy_version(self) -> int:
        """The version in use; -1 before the first swap."""

    @property
    def swap_stall_s(self) -> float:
        """For how long nothing could be sampled during the last swap; 0 before the first."""

    async def start(self) -> None:
        """Loads the model. The weights it starts with are never sampled from."""

    async def generate(self, prompt: Prompt, *, request_id: str, attempt: int) -> Sequence[Sample]:
        """Samples ``prompt.n`` completions. Raises NonFiniteLogits (weights are garbage) or EngineDead."""

    async def abort(self, request_id: str) -> None:
        """Ends a running request early: ``generate`` returns what is there, finish_reason ``"abort"``."""

    async def stage(self, publication: Publication, *, member_id: str) -> None:
        """Receives a publication into staging and verifies its digests, while sampling goes on.

        Raises SyncFailed (transfer broke, digest differs, names do not fit); the old version goes on serving.
        """

    async def swap(self, publication: Publication) -> None:
        """Puts the staged version into use between two engine steps; running requests go on."""

    async def close(self) -> None:
        """Stops the engine and its processes."""


class EngineDead(Exception):
    """The engine cannot continue; the generator ends and is replaced."""


class NonFiniteLogits(Exception):
    """Log-probabilities are not finite: the weights of this version are garbage."""

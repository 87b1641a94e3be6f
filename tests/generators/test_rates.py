from __future__ import annotations

import numpy as np

from broker.messages import Completion, Group, Prompt, Split
from generators.rates import WINDOW_S, Rates


def group(tokens: int, failed: int = 0) -> Group:
    prompt = Prompt(
        item="0",
        position=0,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.zeros(1, np.int32),
        text="",
        reference="",
        n=1,
        temperature=1.0,
        max_tokens=tokens,
        seed=0,
    )
    completion = Completion(
        token_ids=np.zeros(tokens, np.int32),
        behavior_logprobs=np.zeros(tokens, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        version_runs=np.array([[0, tokens]], np.int32),
        finish_reason="stop",
        reward=0.0,
        reward_parts={},
        text="",
    )
    return Group(
        lease_id="l",
        prompt=prompt,
        generator="g",
        incarnation=0,
        completions=(completion,),
        failed_completions=failed,
        generation_s=0.0,
    )


def test_tokens_a_second_are_those_of_the_window() -> None:
    now = [100.0]
    rates = Rates(clock=lambda: now[0])
    rates.pushed(group(50), accepted=True)
    now[0] += 10.0
    rates.pushed(group(50, failed=2), accepted=False)
    stats = rates.stats()
    assert stats["tokens_per_s"] == 10.0
    assert (stats["groups"], stats["groups_refused"], stats["failed_completions"]) == (1.0, 1.0, 2.0)
    now[0] += WINDOW_S + 1.0
    assert rates.stats()["tokens_per_s"] == 0.0

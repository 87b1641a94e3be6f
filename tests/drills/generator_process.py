"""A generator with a fake engine: ``python -m tests.drills.generator_process DIRECTORY NAME START``.

Its tokens say which policy sampled them: the version in ``version_runs``, the life that made it as the token id.
Some attempts fail, some leases go back untried, some groups are pushed twice, hopeless prompts never succeed.
"""

from __future__ import annotations

import os
import random
import sys
import time

import numpy as np

from broker.connect import connect
from broker.contract import PushOutcome
from broker.errors import RunFinished
from broker.messages import Completion, Group, Lease, Member, MemberState, Publication
from tests.drills.setting import HEARTBEAT_S, Setting, enter

WAIT_S = 0.2  # for prompts; then the publication is looked at again
SAMPLE_S = (0.001, 0.008)
FAILS, GIVEN_BACK, TWICE, ABANDONS = 0.04, 0.02, 0.05, 0.5

Run = tuple[int, int, int]  # the life of the learner that made the policy, its version, tokens


class Generator:
    """One thread: follow, lease, answer; heartbeats in between."""

    def __init__(self, setting: Setting, name: str, start: str) -> None:
        self._setting, self._name = setting, name
        self._rng = random.Random(f"{setting.seed}.{name}.{start}")
        self._broker = connect(setting.config(), setting.url)
        self._policy: Publication | None = None
        self._held: list[str] = []
        self._beat_at = 0.0

    def serve(self) -> None:
        """Until the run has finished."""
        while True:
            self._follow()
            self._beat()
            policy = self._policy
            leases = self._broker.lease(
                member_id=self._name,
                policy_version=policy.version if policy else -1,
                incarnation=policy.incarnation if policy else -1,
                max_prompts=3,
                wait_s=WAIT_S,
            )
            self._held = [lease.lease_id for lease in leases]
            for lease in leases:
                self._answer(lease)
                self._held.remove(lease.lease_id)
                self._beat()

    def _follow(self) -> None:
        """Takes the newest version on offer. The fake learner numbers its offers over all its lives."""
        known = self._policy.attempt if self._policy else -1
        self._policy = self._broker.publication(after_attempt=known, wait_s=0.0) or self._policy

    def _beat(self) -> None:
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + HEARTBEAT_S
        policy = self._policy
        self._broker.report(
            Member(
                member_id=self._name,
                role="generator",
                state=MemberState.SERVING if policy else MemberState.SYNCING,
                policy_version=policy.version if policy else -1,
                incarnation=policy.incarnation if policy else -1,
                host="localhost",
                pid=os.getpid(),
                leases=tuple(self._held),
            )
        )

    def _answer(self, lease: Lease) -> None:
        """Samples under one policy, then under the newest: weights arrive in mid-generation."""
        runs, draw = [self._sample()], self._rng.random()
        if self._setting.hopeless(lease.prompt.position):
            return self._broker.release(lease_id=lease.lease_id, error="drill: this prompt always fails")
        if draw < FAILS:
            return self._broker.release(lease_id=lease.lease_id, error="drill: this attempt failed")
        if draw < FAILS + GIVEN_BACK:
            return self._broker.release(lease_id=lease.lease_id, error="")
        self._follow()
        runs.append(self._sample())
        assert self._policy is not None
        if self._policy.incarnation != lease.incarnation and self._rng.random() < ABANDONS:
            return self._broker.release(lease_id=lease.lease_id, error="")
        group = self._group(lease, runs, self._policy.incarnation)
        outcome = self._broker.push(group)
        if self._rng.random() < TWICE:
            again = self._broker.push(group)
            if again is PushOutcome.ACCEPTED:
                raise SystemExit(
                    f"item {lease.prompt.item} under {lease.lease_id}: {outcome}, and pushed again {again}"
                )
        return None

    def _sample(self) -> Run:
        assert self._policy is not None
        time.sleep(self._rng.uniform(*SAMPLE_S))
        return self._policy.epoch, self._policy.version, self._rng.randint(1, 6)

    def _group(self, lease: Lease, runs: list[Run], incarnation: int) -> Group:
        length = sum(count for _, _, count in runs)
        completion = Completion(
            token_ids=np.repeat([life for life, _, _ in runs], [count for _, _, count in runs]).astype(np.int32),
            behavior_logprobs=np.full(length, -1.0, np.float32),
            loss_mask=np.ones(length, np.uint8),
            version_runs=np.array([(version, count) for _, version, count in runs], np.int32),
            finish_reason="stop",
            reward=1.0,
            reward_parts={},
            text="",
        )
        return Group(
            lease_id=lease.lease_id,
            prompt=lease.prompt,
            generator=self._name,
            incarnation=incarnation,
            completions=(completion,) * lease.prompt.n,
            failed_completions=0,
            generation_s=0.01,
        )


def main() -> None:
    setting = enter()
    try:
        Generator(setting, *sys.argv[2:]).serve()
    except RunFinished as finish:
        print(f"the run has finished: {finish}", flush=True)


if __name__ == "__main__":
    main()

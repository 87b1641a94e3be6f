"""A tiny Qwen2 with random weights, and a learner's end of weight sync for engines under test."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from broker.connect import Access
from broker.local import LocalBroker
from broker.messages import Frontier, Member, MemberState, Prompt, Publication, Rules, Split
from generators.engine import Engine
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import SyncFailed
from weights_sync.publisher import Publisher
from weights_sync.staging import declare

EOS = 1
torch.set_num_threads(1)  # the engine under test has the other core


def qwen(tied: bool) -> Qwen2ForCausalLM:
    """The learner's model: 2 layers, 64 wide, a vocabulary that vLLM pads, heads as small as vLLM takes on a CPU."""
    torch.manual_seed(7)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=50,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=tied,
            bos_token_id=2,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    ).eval()


def prompt(tokens: list[int], **fields: Any) -> Prompt:
    """A prompt with one completion of up to 32 tokens unless told otherwise."""
    given = {"n": 1, "temperature": 1.0, "max_tokens": 32, "seed": 5, **fields}
    return Prompt(
        item="0",
        position=0,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.array(tokens, np.int32),
        text="",
        reference="",
        **given,
    )


@torch.no_grad()
def logprobs(model: Any, prompt_ids: list[int], tokens: list[int], temperature: float) -> np.ndarray[Any, Any]:
    """What the model in fp32 says of these tokens, from one pass without any cache."""
    ids = torch.tensor([[*prompt_ids, *tokens]])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].numpy()


@torch.no_grad()
def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest continuations of prompts of one length, from passes without any cache."""
    ids = torch.tensor(prompts)
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    answers = ids[:, len(prompts[0]) :].tolist()
    return [answer[: answer.index(EOS) + 1] if EOS in answer else answer for answer in answers]


class Learner:
    """A model that changes, its publisher, and the member reports that a generator's loop would send.

    ``access``: to a broker that a relay goes over; else there is one in here.
    """

    def __init__(self, model: Any, sync: WeightsSyncConfig, access: Access | None = None) -> None:
        rules = Rules(
            max_staleness=1,
            on_stale="mask",
            groups_per_step=4,
            max_attempts=3,
            lease_timeout_s=60.0,
            member_timeout_s=600.0,
        )
        self.model, self.version, self._used = model, -1, -1
        self._connect = LocalBroker().client if access is None else access
        self.broker = self._connect()
        self.broker.open_run(rules=rules, version=0, frontier=Frontier())
        self._report(MemberState.SYNCING)
        self._known = 0
        self.publisher = Publisher(config=sync, connect=self._connect, declaration=declare(model), incarnation=0)

    def step(self) -> None:
        """Changes every weight a little."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)

    async def publish(self, engine: Engine) -> None:
        """Offers the model as the next version and takes it into use in the engine."""
        await engine.swap(await self.staged(engine))
        await self.in_use()

    async def in_use(self) -> None:
        """Reports the version, and waits until the publisher knows."""
        self.uses(self.version)
        await asyncio.to_thread(self.publisher.flush, 20)

    def uses(self, version: int) -> None:
        """Reports the version that the engine uses."""
        self._used = version
        self._report(MemberState.SERVING)

    async def staged(self, engine: Engine) -> Publication:
        """Offers the next version and stages it as a generator's loop does: a failed attempt is followed by another."""
        self.version += 1
        self.publisher.offer(self.version, self.model.named_parameters())
        for _ in range(3):
            publication = await self.announced(self.version)
            try:
                await engine.stage(publication, member_id="g1")
                return publication
            except SyncFailed as failed:
                self.refused(failed)
        raise SyncFailed(f"version {self.version} was not staged in three attempts")

    async def announced(self, version: int) -> Publication:
        """The next publication of this version."""
        while True:
            publication = await asyncio.to_thread(self._next)
            assert publication is not None
            self._known = publication.attempt
            if publication.version == version:
                return publication

    def refused(self, failed: SyncFailed) -> None:
        """Reports why a version was not staged."""
        self._report(MemberState.SERVING if self._used >= 0 else MemberState.SYNCING, f"SyncFailed: {failed}")

    def close(self) -> None:
        """Ends the publisher."""
        self.publisher.close()
        self.broker.close()

    def _next(self) -> Publication | None:
        """[a thread, so with a client of its own]"""
        client = self._connect()
        try:
            return client.publication(after_attempt=self._known, wait_s=20.0)
        finally:
            client.close()

    def _report(self, state: MemberState, error: str = "") -> None:
        self.broker.report(
            Member(
                member_id="g1",
                role="generator",
                state=state,
                policy_version=self._used,
                incarnation=0 if self._used >= 0 else -1,
                host="127.0.0.1",
                pid=os.getpid(),
                error=error,
            )
        )

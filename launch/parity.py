"""One policy version through the whole path, and the same tokens through both engines.

    learner's model --Publisher--> generator's engine --samples + log-probabilities--> compared with the learner's

This is what a step of a run does, once, on the real broker, with the real engines. T prompt and answer tokens, V
vocabulary.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from broker.contract import Broker
from broker.errors import SlipstreamError
from broker.messages import Float32Array, Frontier, Member, MemberState, Prompt, Rules, Split
from configs.run import RunConfig
from generators.engine import Engine, Sample
from launch import environment
from weights_sync.publisher import Publisher
from weights_sync.staging import declare, persistent_buffers

# Largest difference of one token's log-probability that two correct engines show: measured here for fp32 (tiny model
# 1e-5, 135M parameters 4e-5), and for bf16 by its eight bits of mantissa, where only the mean says something.
FP32_MAX = 2e-4
BF16_MEAN = 0.1
_WAIT_S = 60.0
_MEMBER = "doctor"


class ParityError(SlipstreamError):
    """The two engines do not compute the same."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Differences of log-probabilities over ``tokens`` sampled tokens, in nats."""

    tokens: int
    largest: float
    mean: float

    def check(self, dtype: str) -> None:
        """Raises ParityError where the difference is more than rounding."""
        if dtype == "float32" and not self.largest <= FP32_MAX:
            raise ParityError(f"log-probabilities differ by up to {self.largest:.2g} nats, more than {FP32_MAX:g}")
        if dtype != "float32" and not self.mean <= BF16_MEAN:
            raise ParityError(f"log-probabilities differ by {self.mean:.2g} nats on average, more than {BF16_MEAN:g}")


def measure(config: RunConfig, model_path: str, engine: Engine, broker: Callable[[], Broker]) -> Parity:
    """Publishes the model of ``model_path`` to the engine, samples, and compares. Closes the engine."""
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=dtype, attn_implementation=config.model.attention
    ).to(config.learner.device)
    model.eval()
    _round(model, getattr(torch, config.weights_sync.wire_dtype))
    prompt = _prompt(config, model.config.vocab_size)
    samples = asyncio.run(_sampled(config, model, engine, broker, prompt))
    ours = [_logprobs(model, prompt, sample) for sample in samples]
    gap = np.abs(np.concatenate([s.behavior_logprobs for s in samples]) - np.concatenate(ours))
    return Parity(tokens=gap.size, largest=float(gap.max()), mean=float(gap.mean()))


def _prompt(config: RunConfig, vocabulary: int) -> Prompt:
    length = min(8, config.rollout.max_prompt_length)
    return Prompt(
        item="0",
        position=0,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.int32),
        text="",
        reference="",
        n=4,
        temperature=config.rollout.temperature,
        max_tokens=min(16, config.rollout.max_response_length),
        seed=config.seed,
    )


async def _sampled(
    config: RunConfig, model: torch.nn.Module, engine: Engine, broker: Callable[[], Broker], prompt: Prompt
) -> Sequence[Sample]:
    """Samples under version 0 as published. Waits are bounded by ``_WAIT_S`` and by the publisher's own deadlines."""
    await engine.start()
    learner, generator = broker(), broker()
    try:
        incarnation = await asyncio.to_thread(learner.open_run, rules=_rules(config), version=0, frontier=Frontier())
        publisher = Publisher(
            config=environment.synced(config),
            connect=broker,
            declaration=declare(model),
            incarnation=incarnation,
            device=config.learner.device,
        )
        try:
            await asyncio.to_thread(generator.report, _member(MemberState.SYNCING, -1, -1))
            tensors = [*model.named_parameters(), *persistent_buffers(model)]
            await asyncio.to_thread(publisher.offer, 0, tensors)
            publication = await asyncio.to_thread(generator.publication, after_attempt=-1, wait_s=_WAIT_S)
            if publication is None:
                raise ParityError(f"no weights were announced within {_WAIT_S:g} s")
            await engine.stage(publication, member_id=_MEMBER)
            await engine.swap(publication)
            await asyncio.to_thread(generator.report, _member(MemberState.SERVING, 0, incarnation))
            await asyncio.to_thread(publisher.flush, _WAIT_S)
        finally:
            await asyncio.to_thread(publisher.close)
        return await engine.generate(prompt, request_id="doctor", attempt=0)
    finally:
        await engine.close()
        learner.close()
        generator.close()


@torch.no_grad()
def _round(model: torch.nn.Module, wire_dtype: torch.dtype) -> None:
    """Makes the weights what they are after the wire: what is lost there is a choice, not a difference of engines."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(wire_dtype))


def _rules(config: RunConfig) -> Rules:
    return Rules(
        max_staleness=config.rollout.max_staleness,
        on_stale=config.rollout.on_stale,
        groups_per_step=config.rollout.groups_per_step,
        max_attempts=config.broker.max_attempts,
        lease_timeout_s=config.broker.lease_timeout_s,
        member_timeout_s=_WAIT_S,  # the doctor reports once, without a heartbeat
    )


def _member(state: MemberState, version: int, incarnation: int) -> Member:
    return Member(
        member_id=_MEMBER,
        role="generator",
        state=state,
        policy_version=version,
        incarnation=incarnation,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


@torch.no_grad()
def _logprobs(model: torch.nn.Module, prompt: Prompt, sample: Sample) -> Float32Array:
    """[L] of the sampled tokens under the learner's model, at the prompt's temperature."""
    device = next(model.parameters()).device
    tokens_T = torch.from_numpy(np.concatenate([prompt.token_ids, sample.token_ids])).long().to(device)
    logits_TV = model(tokens_T[None]).logits[0].float() / prompt.temperature
    start = len(prompt.token_ids)
    logp_LV = logits_TV[start - 1 : -1].log_softmax(-1)
    logp_L: Float32Array = logp_LV.gather(-1, tokens_T[start:, None])[:, 0].cpu().numpy()
    return logp_L

"""What takes optimizer steps on the same rows: our learner, TRL's GRPO trainer, and a bare loop over packed rows.

Each is a process that is told when to step, so that two can take turns on the same cores.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore

from benchmarks.figures import BenchmarkError
from benchmarks.learner_rows import Setup
from benchmarks.processes import CONTEXT, Worker

READY_S, STEP_S = 300.0, 900.0
LR = 1e-7
TRL_BATCH = 8  # rows, the default of its per_device_train_batch_size

Step = Callable[[], object]


class Side:
    """Processes that step together when they are told."""

    def __init__(self, make: Callable[..., Step], setup: Setup, *, threads: int, ranks: int = 1) -> None:
        self._told: list[Any] = [CONTEXT.Queue() for _ in range(ranks)]
        self._done: Any = CONTEXT.Queue()
        url = None
        if ranks > 1:
            store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=READY_S), wait_for_workers=False)
            self._store, url = store, store.port
        self.workers = [
            Worker(_serve, make, setup, threads, rank, ranks, url, told, self._done)
            for rank, told in enumerate(self._told)
        ]
        self._wait(READY_S)

    def seconds(self) -> float:
        """Time of one step, of the slowest process. Raises BenchmarkError."""
        for told in self._told:
            told.put(True)
        return max(self._wait(STEP_S))

    def _wait(self, timeout_s: float) -> list[float]:
        times: list[float] = []
        deadline = time.monotonic() + timeout_s
        while len(times) < len(self._told):
            try:
                times.append(self._done.get(timeout=1.0))
            except queue.Empty:
                for worker in self.workers:
                    worker.check()
                if time.monotonic() > deadline:
                    raise BenchmarkError(f"a step has not ended within {timeout_s:g} s") from None
        return times


@contextmanager
def sides(*made: Callable[[], Side]) -> Iterator[list[Side]]:
    """Starts them one after the other and ends them together."""
    started: list[Side] = []
    try:
        for make in made:
            started.append(make())
        yield started
    finally:
        for side in started:
            for worker in side.workers:
                worker.stop()


def turns(started: Sequence[Side], rounds: int) -> list[list[float]]:
    """Times of each side's steps, which take turns; a first round is not counted."""
    times = [[side.seconds() for side in started] for _ in range(rounds + 1)][1:]
    return [list(column) for column in zip(*times, strict=True)]


def _serve(
    make: Callable[..., Step], setup: Setup, threads: int, rank: int, ranks: int, port: int | None, told: Any, done: Any
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = make(setup, threads=threads, rank=rank, ranks=ranks, port=port)
    done.put(0.0)
    while told.get():
        start = time.perf_counter()
        step()
        done.put(time.perf_counter() - start)


def ours(setup: Setup, *, threads: int, rank: int, ranks: int, port: int | None) -> Step:
    """A step of the learner at ZeRO stage 3, from rows to new weights."""
    from learners.config import AlgorithmConfig, LearnerConfig, OptimConfig
    from learners.exchange import MiniBatch, Plan
    from learners.packing import packs
    from learners.planning import plan
    from learners.policy import Policy

    store = HashStore() if port is None else TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=STEP_S))
    config = LearnerConfig(
        ranks=ranks, threads=threads, micro_batch_tokens=setup.micro_batch_tokens, optim=OptimConfig(lr=LR)
    )
    policy = Policy(
        model_dir=setup.model_dir, config=config, algorithm=AlgorithmConfig(), temperature=1.0, seed=0,
        rank=rank, world=ranks, local_rank=rank,
    )  # fmt: skip

    def step() -> object:
        lengths = [len(row) for row in setup.rows]
        planned = plan(lengths, ranks=ranks, token_budget=setup.micro_batch_tokens, packed=packs(policy.module))
        mine = [[setup.rows[i] for i in part] for part in planned[rank]]
        batch = MiniBatch(denominator=setup.loss_tokens, micro_batches=mine)
        return policy.step(Plan(mini_batches=[batch], order=[0], completions=len(setup.rows)), np.copy)

    return step


def bare(setup: Setup, *, threads: int, rank: int, ranks: int, port: int | None) -> Step:
    """Forward, backward and AdamW on rows cut from one stream of all tokens, so that no row has any padding.

    As many tokens go through the output layer as carry loss; the loss is their cross entropy.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        setup.model_dir, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    length = max(2, setup.tokens // len(setup.rows))
    stream = np.concatenate([np.concatenate([row.prompt_ids, row.completion_ids]) for row in setup.rows])
    ids_BT = torch.from_numpy(stream[: len(stream) // length * length].astype(np.int64)).view(-1, length)
    parts = torch.split(ids_BT, max(1, setup.micro_batch_tokens // length))
    share = setup.loss_tokens / setup.tokens

    def step() -> None:
        for part_BT in parts:
            hidden_NH: Tensor = model.model(input_ids=part_BT, use_cache=False).last_hidden_state.flatten(0, 1)
            count = int(share * part_BT.numel())
            logits_NV = model.lm_head(hidden_NH[:count])
            loss = nn.functional.cross_entropy(logits_NV, part_BT.flatten()[1 : count + 1], reduction="sum")
            torch.autograd.backward(loss / setup.loss_tokens)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl(setup: Setup, *, threads: int, rank: int, ranks: int, port: int | None) -> Step:
    """A step of TRL's GRPOTrainer on a generation batch that is padded, shuffled and split as its own are."""
    import tempfile

    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad, shuffle_sequence_dict, split_tensor_dict

    from tasks.model import load_tokenizer

    batch = min(TRL_BATCH, len(setup.rows))
    parts = len(setup.rows) // batch
    tokenizer = load_tokenizer(setup.model_dir)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            setup.model_dir, dtype=torch.float32, attn_implementation="sdpa"
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            per_device_train_batch_size=batch, gradient_accumulation_steps=parts, num_generations=batch,
            learning_rate=LR, max_completion_length=512, disable_dropout=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(setup.rows)}),
        processing_class=tokenizer,
    )  # fmt: skip
    torch.set_num_threads(threads)
    optimizer = trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model.train(), optimizer)
    trainer.current_gradient_accumulation_steps = parts
    trainer._prepare_inputs = lambda inputs: inputs

    def padded(arrays: Sequence[Any], side: str) -> tuple[Tensor, Tensor]:
        ids = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
        ones = [torch.ones_like(one) for one in ids]
        return (pad(ids, padding_value=0, padding_side=side), pad(ones, padding_value=0, padding_side=side))

    def step() -> None:
        prompt_ids, prompt_mask = padded([row.prompt_ids for row in setup.rows], "left")
        completion_ids, completion_mask = padded([row.completion_ids for row in setup.rows], "right")
        whole = {
            "prompt_ids": prompt_ids, "prompt_mask": prompt_mask,
            "completion_ids": completion_ids, "completion_mask": completion_mask,
            "advantages": torch.tensor([row.advantage for row in setup.rows]),
            "num_items_in_batch": completion_mask.sum(),
        }  # fmt: skip
        for inputs in split_tensor_dict(shuffle_sequence_dict(whole), parts):
            trainer.training_step(model, inputs, None)
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        model.zero_grad()

    return step

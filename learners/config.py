"""Settings of the learner and of the algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from broker.config import Count, Seconds, Steps, StrictModel

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(StrictModel):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, ge=0, description="learning rate after the warm-up")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="of AdamW")
    eps: float = Field(1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient's norm is clipped to it")
    warmup_steps: Steps = Field(0, ge=0, description="steps of a linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up, until total_steps"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="where linear and cosine end, as a part of lr")


class CorrectionConfig(StrictModel):
    """Off-policy correction: the weight r = exp(logp_proximal - logp_behavior) of decoupled PPO (arXiv 2505.24298)."""

    kind: Literal["decoupled", "none"] = Field(
        "decoupled", description="none: the clip alone, in the ratio to the behavior policy"
    )
    cap: float = Field(2.0, gt=0, description="upper bound of r")


class AlgorithmConfig(StrictModel):
    """What turns rewards and log-probabilities into a gradient."""

    advantage: Literal["grpo", "dr_grpo"] = Field(
        "grpo", description="dr_grpo leaves out the division by the group's deviation"
    )
    clip_low: float = Field(0.2, ge=0, description="the ratio is clipped below 1 minus this")
    clip_high: float = Field(0.2, ge=0, description="the ratio is clipped above 1 plus this")
    correction: CorrectionConfig = CorrectionConfig()
    loss_mean: Literal["token"] = Field("token", description="each token of a step weighs the same")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")


class CheckpointConfig(StrictModel):
    """When to save, how much to keep, and where to go on."""

    every_steps: Steps = Field(0, ge=0, description="0: only at the end")
    keep: Count = Field(2, description="newest checkpoints that are kept, and as many of those given up")
    resume: str = Field("auto", description="auto: newest complete checkpoint, if any; never; or a path with a /")

    @field_validator("resume")
    @classmethod
    def _word_or_path(cls, resume: str) -> str:
        if resume not in ("auto", "never") and "/" not in resume:
            raise ValueError("expected 'auto', 'never', or the path of a checkpoint, with a / in it (./NAME)")
        return resume


class EvalConfig(StrictModel):
    """Validation passes: greedy answers to a held-out set, each under one policy version."""

    every_steps: Steps = Field(0, ge=0, description="0: no passes in between")
    at_start: bool = Field(False, description="a pass before the first step")
    at_end: bool = Field(False, description="a pass after the last step")
    max_prompts: Count = Field(64, description="of the held-out set, the first ones")
    timeout_s: Seconds = Field(600.0, description="after which a pass goes without the missing answers")


class LearnerConfig(StrictModel):
    """The learner: its ranks, its engine and its data path."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="where it computes")
    backend: Literal["gloo", "nccl"] = Field("gloo", description="of the ranks' collectives")
    ranks: int = Field(2, ge=1, le=1024, description="processes that train together")
    zero_stage: int = Field(3, ge=0, le=3, description="of DeepSpeed: what is split over the ranks (3: parameters too)")
    offload_optimizer: bool = Field(False, description="keep the optimizer's state in CPU memory")
    offload_param: bool = Field(False, description="keep the parameters in CPU memory")
    total_steps: Steps = Field(100, ge=1, description="the run is complete at this policy version")
    micro_batch_tokens: int = Field(4096, ge=1, le=1 << 30, description="padded tokens of a rank's micro-batch")
    gradient_checkpointing: bool = Field(False, description="compute activations twice to save memory")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of a rank")
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    max_bad_steps: Count = Field(3, description="steps in a row with non-finite gradients before giving up")
    collective_timeout_s: Seconds = Field(300.0, description="longest wait of a rank for the others")
    delay_s: float = Field(0.0, ge=0, le=1e6, description="artificial time per step, for measuring overlap")

    @model_validator(mode="after")
    def _engine_can_run(self) -> LearnerConfig:
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("learner.backend=nccl needs learner.device=cuda; on cpu set learner.backend=gloo")
        if self.offload_param and self.zero_stage != 3:
            raise ValueError(f"learner.offload_param needs learner.zero_stage=3, which is {self.zero_stage}")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("learner.offload_optimizer needs learner.zero_stage=1, 2 or 3, which is 0")
        return self

"""Settings of the learner and of the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from broker.config import Count, Seconds, Steps, StrictModel
from learners.combinations import check_combination
from learners.recipes import (
    ADVANTAGE_NAMES,
    CORRECTION_NAMES,
    GAE,
    LOSS_MEAN_NAMES,
    LOSS_NAMES,
    known_or_own,
    with_recipe,
)

Beta = Annotated[float, Field(ge=0, lt=1)]


def _where(value: Any) -> Any:
    """``true`` and ``false`` were the values of these keys when there was one place to offload to."""
    return {True: "cpu", False: "none"}[value] if isinstance(value, bool) else value


Offload = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_where)]
OffloadParam = Annotated[Literal["none", "cpu"], BeforeValidator(_where)]  # the generators are sent them from memory


def _one_of(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) + ", or file.py:function"


class OptimConfig(StrictModel):
    """The optimizer and its schedule."""

    optimizer: Literal["adamw", "cpu_adamw", "sgd"] = Field(
        "adamw", description="`cpu_adamw`: DeepSpeed's for `learner.offload_optimizer`, compiled at its first use"
    )
    lr: float = Field(1e-6, ge=0, description="learning rate after the warm-up")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="of AdamW")
    eps: float = Field(1e-8, gt=0, description="of AdamW")
    momentum: float = Field(0.0, ge=0, lt=1, description="of `sgd`")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW decoupled from the gradient, of `sgd` added to it")
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient's norm is clipped to it")
    warmup_steps: Steps = Field(0, ge=0, description="steps of a linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up, until total_steps"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="where linear and cosine end, as a part of lr")


class CorrectionConfig(StrictModel):
    """Off-policy correction: each token's loss is weighed by r = exp(logp_proximal - logp_behavior), without gradient.

    Decoupled PPO (arXiv 2505.24298) is ``truncate`` at the level of tokens; docs/algorithms.md has them all.
    """

    kind: str = Field(
        "truncate",
        description="`truncate`: min(r, cap); `mask`: r from floor to cap, else 0; `none`: the loss's own ratio is to "
        "the behavior policy; or file.py:function",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="r of the token, or of its completion: the product of the tokens' or its geometric mean"
    )
    cap: float = Field(2.0, gt=0, description="upper bound of r")
    floor: float = Field(0.5, ge=0, description="of `mask`: lower bound of r")

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        return known_or_own(kind, CORRECTION_NAMES)


class CriticConfig(StrictModel):
    """PPO's critic: a copy of the model with one number a token in place of its head, for ``advantage: gae``.

    It learns from every step beside the policy and never leaves the learner.
    """

    enabled: bool = Field(False, description="train one; `advantage: gae` needs it, and nothing else can use it")
    lr: float = Field(0.0, ge=0, description="its learning rate, on the policy's schedule; 0: `learner.optim.lr`")
    gamma: float = Field(1.0, gt=0, le=1, description="of GAE: what the reward of a token later is worth")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="of GAE: 1 trusts the rewards alone, 0 the next value")
    value_clip: float = Field(0.2, gt=0, description="values move no further than this from those before the step")
    warmup_steps: Steps = Field(0, ge=0, description="first learner steps, in which the critic trains alone")


class AlgorithmConfig(StrictModel):
    """What turns rewards and log-probabilities into a gradient.

    ``recipe`` sets those of the settings below that are not given; a published algorithm is one setting.
    docs/algorithms.md has every choice with its equation, and how to add one from a file of your own.
    """

    recipe: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo", "dppo", "topr",
        "dpo", "icepop", "ppo",
    ] = Field("grpo", description="a published algorithm; the defaults below are those of `grpo`")  # fmt: skip
    advantage: str = Field("grpo", description=_one_of((*ADVANTAGE_NAMES, GAE)))
    loss: str = Field("ppo", description=_one_of(LOSS_NAMES))
    clip_low: float = Field(0.2, ge=0, description="the ratio is clipped below 1 minus this")
    clip_high: float = Field(0.2, ge=0, description="the ratio is clipped above 1 plus this")
    dual_clip: float = Field(
        0.0, ge=0, description="of `ppo`: bound of the ratio where the advantage is negative; 0: none"
    )
    dpo_beta: float = Field(0.1, gt=0, description="of `dpo`: scale of the difference of log-ratios")
    correction: CorrectionConfig = CorrectionConfig()
    proximal: Literal["start", "interpolated", "recomputed"] = Field(
        "start",
        description="the policy that the clip holds on to: the learner's at the start of the step; that of a step "
        "before, estimated between the behavior and the present one; or as `start`, always by a forward pass",
    )
    mini_batches: Count = Field(1, description="parts of a batch, whole groups, with an optimizer step each")
    epochs: Count = Field(1, description="times that a batch is gone through")
    loss_mean: str = Field("token", description=_one_of(LOSS_MEAN_NAMES))
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL divergence from a reference model")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of that divergence")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="where it acts: added to a token's loss, or taken off the rewards before the advantages"
    )
    reference_reset_steps: Steps = Field(
        0, ge=0, description="the reference becomes the present policy every so many steps; 0: never"
    )
    critic: CriticConfig = CriticConfig()
    overlong_share: float = Field(
        0.0, ge=0, le=1, description="last part of `rollout.max_response_length`, in which the reward falls; 0: none"
    )
    overlong_penalty: float = Field(1.0, gt=0, description="by how much the reward has fallen at its end")
    zero_variance_groups: Literal["train", "skip"] = Field(
        "train", description="groups whose rewards are all equal: `skip` leaves them out of the loss and of its mean"
    )

    @property
    def updates(self) -> int:
        """Optimizer steps of a batch: ``mini_batches`` x ``epochs``."""
        return self.mini_batches * self.epochs

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether the policy says what it thinks of a batch before the first optimizer step."""
        anchored = self.correction.kind != "none" and self.proximal != "interpolated"
        recomputed = anchored and (self.updates > 1 or self.proximal == "recomputed")
        return recomputed or (self.kl_coef > 0 and self.kl_in == "reward")

    @field_validator("advantage", "loss", "loss_mean")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        names = {"advantage": (*ADVANTAGE_NAMES, GAE), "loss": LOSS_NAMES, "loss_mean": LOSS_MEAN_NAMES}
        return known_or_own(name, names[str(info.field_name)])

    @model_validator(mode="before")
    @classmethod
    def _of_the_recipe(cls, values: Any) -> Any:
        return with_recipe(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _make_sense_together(self) -> AlgorithmConfig:
        check_combination(self)
        return self


class CheckpointConfig(StrictModel):
    """When to save, how much to keep, and where to go on."""

    every_steps: Steps = Field(0, ge=0, description="0: only at the end")
    background: bool = Field(
        True, description="write it beside the next steps, from a copy in the memory of rank 0; needs room for the copy"
    )
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
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of matrix products; weights, gradients and the optimizer are float32 in any case"
    )
    offload_optimizer: Offload = Field("none", description="where the optimizer's state is kept between steps")
    offload_param: OffloadParam = Field("none", description="where the parameters are kept between their uses")
    offload_reference: OffloadParam = Field("none", description="where the reference model is kept between its uses")
    offload_dir: str = Field("", description="of `nvme`: a folder on a fast local disk; needs libaio")
    total_steps: Steps = Field(100, ge=1, description="the run is complete at this policy version")
    micro_batch_tokens: int = Field(
        4096, ge=1, le=1 << 30, description="tokens of a rank's micro-batch, padding included"
    )
    packing: Literal["auto", "on", "off"] = Field(
        "auto", description="rows of a micro-batch one after the other, without padding; `auto`: if the model allows it"
    )
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
        for name in ("offload_param", "offload_reference"):
            if getattr(self, name) != "none" and self.zero_stage != 3:
                raise ValueError(f"learner.{name} needs learner.zero_stage=3, which is {self.zero_stage}")
        if self.offload_optimizer != "none" and self.zero_stage == 0:
            raise ValueError("learner.offload_optimizer needs learner.zero_stage=1, 2 or 3, which is 0")
        if self.offload_optimizer == "nvme" and self.zero_stage != 3:
            raise ValueError(f"learner.offload_optimizer=nvme needs learner.zero_stage=3, which is {self.zero_stage}")
        if self.offload_optimizer == "nvme" and not self.offload_dir:
            raise ValueError("learner.offload_dir: name a folder for what is kept on nvme")
        if self.optim.optimizer == "cpu_adamw" and self.device == "cuda" and self.offload_optimizer == "none":
            raise ValueError("learner.optim.optimizer=cpu_adamw needs learner.offload_optimizer=cpu on cuda")
        return self

"""Settings of the algorithm that each make sense and together do not: refused, with the nearest that do.

Most of them would run: with a part that silently does nothing, which is worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from learners.recipes import GAE

if TYPE_CHECKING:
    from learners.config import AlgorithmConfig

_BOUNDED = ("gspo", "cispo", "dppo")  # they bound the ratio, in which there must be something to bound
_GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "best_worst")
_PLAIN_CLIP = (0.2, 0.2)


def check_combination(algorithm: AlgorithmConfig) -> None:
    """Raises ValueError for the first combination that cannot be meant."""
    for problem in (
        *_loss(algorithm),
        *_correction(algorithm),
        *_kl(algorithm),
        *_critic(algorithm),
        *_rest(algorithm),
    ):
        raise ValueError(problem)


def check_group(algorithm: AlgorithmConfig, *, completions_per_group: int) -> None:
    """Raises ValueError when a group is too small for the advantage."""
    if completions_per_group < 2 and algorithm.advantage in _GROUP_RELATIVE:
        raise ValueError(
            f"rollout.completions_per_group={completions_per_group} leaves algorithm.advantage={algorithm.advantage} "
            "nothing to compare with: set it to 2 or more, or algorithm.advantage=reinforce_pp"
        )


def _loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss, correction = algorithm.loss, algorithm.correction.kind
    if loss == "dpo":
        for name, wanted in (("advantage", "best_worst"), ("loss_mean", "sequence")):
            if getattr(algorithm, name) != wanted:
                yield (
                    f"algorithm.{name}={getattr(algorithm, name)}: algorithm.loss=dpo compares two whole completions "
                    f"of a group; set algorithm.{name}={wanted}"
                )
    if loss in ("dpo", "topr") and correction != "none":
        yield (
            f"algorithm.correction.kind={correction}: algorithm.loss={loss} has its own ratio to the behavior policy; "
            "set algorithm.correction.kind=none"
        )
    if loss in _BOUNDED and _ratio_is_one(algorithm):
        yield (
            f"algorithm.correction.kind={correction} with algorithm.proximal={algorithm.proximal} leaves "
            f"algorithm.loss={loss} nothing to bound: a batch is one optimizer step, so the ratio to the start of the "
            "step is 1; set algorithm.correction.kind=none, algorithm.proximal=interpolated, or algorithm.epochs=2"
        )
    if loss == "ppo" and _ratio_is_one(algorithm):
        clip = (algorithm.clip_low, algorithm.clip_high)
        if clip != _PLAIN_CLIP or algorithm.dual_clip:
            name = "dual_clip" if algorithm.dual_clip else "clip_low" if clip[0] != _PLAIN_CLIP[0] else "clip_high"
            yield (
                f"algorithm.{name}={getattr(algorithm, name):g} never acts with algorithm.correction.kind={correction} "
                f"and algorithm.proximal={algorithm.proximal}, where the clipped ratio is always 1: a batch is one "
                "optimizer step; set algorithm.proximal=interpolated, or algorithm.epochs=2"
            )
    if algorithm.dual_clip and (loss != "ppo" or algorithm.dual_clip <= 1):
        nearest = "0" if loss != "ppo" else "3"
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip:g} is for algorithm.loss=ppo (it is {loss}), and above 1; "
            f"set algorithm.dual_clip={nearest}"
        )


def _ratio_is_one(algorithm: AlgorithmConfig) -> bool:
    return algorithm.correction.kind != "none" and algorithm.proximal != "interpolated" and algorithm.updates == 1


def _correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    if correction.kind == "none" and algorithm.proximal != "start":
        yield (
            f"algorithm.proximal={algorithm.proximal} is of no use with algorithm.correction.kind=none, where the "
            "ratio is to the behavior policy; set algorithm.proximal=start, or algorithm.correction.kind=truncate"
        )
    if correction.kind == "mask" and correction.floor >= correction.cap:
        yield (
            f"algorithm.correction.floor={correction.floor:g} leaves nothing below "
            f"algorithm.correction.cap={correction.cap:g}; set it lower, such as {correction.cap / 4:g}"
        )


def _rest(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.zero_variance_groups == "skip" and algorithm.advantage in ("reinforce_pp", GAE):
        yield (
            "algorithm.zero_variance_groups=skip would leave out groups that "
            f"algorithm.advantage={algorithm.advantage} learns from, as it does not compare within a group; set "
            "algorithm.zero_variance_groups=train"
        )


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1 in the loss has a gradient whose mean is zero on-policy; set "
            "algorithm.kl_estimator=k2 or k3, or algorithm.kl_in=reward"
        )
    if algorithm.kl_coef and algorithm.kl_in == "reward" and algorithm.loss == "dpo":
        yield (
            "algorithm.kl_in=reward comes too late for algorithm.loss=dpo, which takes the best and the worst of a "
            "group by their rewards alone; set algorithm.kl_in=loss, or algorithm.kl_coef=0"
        )
    if algorithm.reference_reset_steps and not algorithm.kl_coef:
        yield (
            f"algorithm.reference_reset_steps={algorithm.reference_reset_steps} has no reference model to reset: "
            "algorithm.kl_coef is 0; set algorithm.reference_reset_steps=0, or algorithm.kl_coef above 0"
        )


def _critic(algorithm: AlgorithmConfig) -> Iterator[str]:
    critic, advantage = algorithm.critic, algorithm.advantage
    if critic.enabled and advantage != GAE:
        yield (
            f"algorithm.critic.enabled=true is of no use to algorithm.advantage={advantage}, which has its own "
            "baseline; set algorithm.critic.enabled=false, or algorithm.advantage=gae"
        )
    if advantage == GAE and not critic.enabled:
        yield (
            "algorithm.advantage=gae needs a critic; set algorithm.critic.enabled=true (algorithm.recipe=ppo does), or "
            "algorithm.advantage=grpo"
        )
    defaults = type(critic)(enabled=critic.enabled)
    for name in type(critic).model_fields:
        value, default = getattr(critic, name), getattr(defaults, name)
        if value != default and not critic.enabled:
            yield (
                f"algorithm.critic.{name}={value:g} has no critic to act on; set algorithm.critic.enabled=true, or "
                f"algorithm.critic.{name}={default:g}"
            )
        if name == "value_clip" and value != default and algorithm.updates == 1:
            yield (
                f"algorithm.critic.value_clip={value:g} never acts: a batch is one optimizer step, so no value has "
                f"moved; set algorithm.critic.value_clip={default:g}, or algorithm.epochs=2"
            )

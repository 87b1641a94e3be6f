"""Settings of the algorithm that each make sense and together do not: refused, with the nearest that do.

Most of them would run: with a part that silently does nothing, which is worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learners.config import AlgorithmConfig

_BOUNDED = ("gspo", "cispo", "dppo")  # they bound the ratio, in which there must be something to bound
_GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "best_worst")
_PLAIN_CLIP = (0.2, 0.2)


def check_combination(algorithm: AlgorithmConfig) -> None:
    """Raises ValueError for the first combination that cannot be meant."""
    for problem in (*_loss(algorithm), *_correction(algorithm), *_rest(algorithm)):
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
            f"algorithm.correction.kind={correction} with algorithm.proximal=start leaves algorithm.loss={loss} "
            "nothing to bound: a batch is one optimizer step, so the ratio to the start of the step is 1; set "
            "algorithm.correction.kind=none, or algorithm.proximal=interpolated"
        )
    if loss == "ppo" and _ratio_is_one(algorithm):
        clip = (algorithm.clip_low, algorithm.clip_high)
        if clip != _PLAIN_CLIP or algorithm.dual_clip:
            name = "dual_clip" if algorithm.dual_clip else "clip_low" if clip[0] != _PLAIN_CLIP[0] else "clip_high"
            yield (
                f"algorithm.{name}={getattr(algorithm, name):g} never acts with algorithm.correction.kind={correction} "
                "and algorithm.proximal=start, where the clipped ratio is always 1; set algorithm.proximal=interpolated"
            )
    if algorithm.dual_clip and (loss != "ppo" or algorithm.dual_clip <= 1):
        nearest = "0" if loss != "ppo" else "3"
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip:g} is for algorithm.loss=ppo (it is {loss}), and above 1; "
            f"set algorithm.dual_clip={nearest}"
        )


def _ratio_is_one(algorithm: AlgorithmConfig) -> bool:
    return algorithm.correction.kind != "none" and algorithm.proximal == "start"


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
    if algorithm.zero_variance_groups == "skip" and algorithm.advantage == "reinforce_pp":
        yield (
            "algorithm.zero_variance_groups=skip would leave out groups that algorithm.advantage=reinforce_pp learns "
            "from, as it compares over the whole batch; set algorithm.zero_variance_groups=train"
        )
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1 in the loss has a gradient whose mean is zero on-policy; set "
            "algorithm.kl_estimator=k2 or k3, or algorithm.kl_in=reward"
        )
    if algorithm.kl_coef:
        yield (
            f"algorithm.kl_coef={algorithm.kl_coef:g} needs a reference model, which the learner does not have yet; "
            "set algorithm.kl_coef=0"
        )

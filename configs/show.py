"""A configuration as people read it: resolved, with the derived numbers, and without secrets."""

from __future__ import annotations

from broker.address import without_password
from configs import dialect
from configs.run import RunConfig


def derived(config: RunConfig) -> dict[str, str]:
    """What follows from the settings, each with its formula; nothing here is a setting of its own."""
    rollout, ranks = config.rollout, config.learner.ranks
    samples = rollout.samples_per_step
    share = f"{samples // ranks}" if samples % ranks == 0 else f"{samples // ranks} or {samples // ranks + 1}"
    return {
        "samples a step": f"{samples} = {rollout.groups_per_step} groups x {rollout.completions_per_group} completions",
        "samples per rank": f"{share} = {samples} / {ranks} ranks",
        "window": f"{rollout.window} outstanding groups = (max_staleness {rollout.max_staleness} + 1)"
        f" x {rollout.groups_per_step}",
        "longest sequence": f"{rollout.max_prompt_length + rollout.max_response_length} tokens"
        f" = {rollout.max_prompt_length} + {rollout.max_response_length}",
        "prompts in the run": f"{config.learner.total_steps * rollout.groups_per_step}"
        f" = {config.learner.total_steps} steps x {rollout.groups_per_step} groups",
    }


def render(config: RunConfig) -> str:
    """The resolved configuration as YAML that loads again, the derived numbers as comments, no password."""
    broker = config.broker.model_copy(update={"url": without_password(config.broker.url)})
    values = config.model_copy(update={"broker": broker}).model_dump(mode="json")
    notes = "".join(f"# {name}: {text}\n" for name, text in derived(config).items())
    return notes + dialect.render(values)

"""The example of docs/tasks.md is what it says, and works."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.config import RolloutConfig
from configs.load import load
from generators.scoring import Scorer
from tasks.prompts import PromptFeed
from tasks.tiny_model import CHARACTERS, character_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "language"), [("sums.py", "python"), ("sums.yaml", "yaml")])
def test_the_page_shows_the_files_as_they_are(name: str, language: str) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    assert f"```{language}\n{(ROOT / 'docs' / 'examples' / name).read_text()}```" in page
    assert f"`{CHARACTERS}`" in page


def test_the_example_feeds_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load("docs/examples/sums.yaml")
    feed = PromptFeed(
        task=config.task,
        rollout=RolloutConfig.model_validate(config.rollout.model_dump()),
        tokenizer=character_tokenizer(),
        seed=0,
    )
    assert len(feed) == 80
    assert len(feed.eval_prompts(0)) == 20
    prompt = feed.at(0)
    scorer = Scorer(config.task, timeout_s=5.0)

    async def scores() -> list[tuple[float, dict[str, float]]]:
        answers = (prompt.reference, "?" * len(prompt.reference), "")
        found = [await scorer.score(prompt=prompt, answer=answer) for answer in answers]
        return [(score.reward, score.parts) for score in found]

    assert asyncio.run(scores()) == [
        (1.2, {"right": 1.0, "length": 1.0}),
        (0.2, {"right": 0.0, "length": 1.0}),
        (0.0, {"right": 0.0, "length": 0.0}),
    ]

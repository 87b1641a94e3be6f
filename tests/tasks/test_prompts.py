from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split as Cut
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from broker.config import RolloutConfig
from broker.messages import Frontier, Split
from tasks.config import TaskConfig
from tasks.loading import TaskError
from tasks.prompts import PromptFeed
from tasks.tiny_model import CHARACTERS, character_tokenizer

SET = """
from tasks.prompts import Item

MARK = {"train": ">", "eval": "?"}

def prompts(split, seed, options):
    more = {3: "9" * 40, 5: "9" * 40}
    return [Item(text=f"{i}{MARK[split]}{more.get(i, '')}", reference=str(i)) for i in range(options["count"])]

def wrong(split, seed, options):
    return ["text"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "set.py"
    path.write_text(SET)
    return path


def feed(file: Path, *, count: int = 10, tokenizer: Any = None, seed: int = 0, **task: Any) -> PromptFeed:
    return PromptFeed(
        task=TaskConfig(prompts=f"{file}:prompts", options={"count": count}, **task),
        rollout=RolloutConfig(groups_per_step=4, completions_per_group=3, max_prompt_length=20, temperature=0.7),
        tokenizer=tokenizer or character_tokenizer(),
        seed=seed,
    )


def test_a_prompt_carries_its_item_and_how_to_sample_it(file: Path) -> None:
    tokenizer, subject = character_tokenizer(), feed(file)
    for prompt in islice(subject.from_frontier(Frontier()), 8):
        assert prompt.text == f"{prompt.reference}>"
        assert tokenizer.decode(prompt.token_ids) == "<bos>" + prompt.text
        assert (prompt.n, prompt.temperature, prompt.max_tokens, prompt.split) == (3, 0.7, 16, Split.TRAIN)
        assert prompt.item == str(prompt.position)


def test_every_epoch_has_every_item_once_in_an_order_of_its_own(file: Path) -> None:
    subject = feed(file)
    epochs = [[subject.at(e * 8 + i).reference for i in range(8)] for e in range(3)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple("01246789")}
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [subject.at(e * 8).epoch for e in range(3)] == [0, 1, 2]


def test_a_position_means_the_same_whoever_asks_and_a_seed_changes_it(file: Path) -> None:
    one, same, other = feed(file), feed(file), feed(file, seed=1)
    positions = [17, 3, 40, 3]

    def shown(subject: PromptFeed) -> list[tuple[str, int, list[int]]]:
        return [((p := subject.at(i)).text, p.seed, p.token_ids.tolist()) for i in positions]

    assert shown(one) == shown(same)
    assert shown(one) != shown(other)
    assert len({one.at(i).seed for i in range(200)}) == 200


def test_a_run_resumes_behind_its_frontier_without_what_ended_beyond(file: Path) -> None:
    found = islice(feed(file).from_frontier(Frontier(base=5, beyond=(6, 9))), 4)
    assert [prompt.position for prompt in found] == [5, 7, 8, 10]


def test_c43_epochs_go_on_or_end_where_the_setting_says(file: Path) -> None:
    endless = feed(file)
    assert endless.positions is None
    assert [p.epoch for p in islice(endless.from_frontier(Frontier()), 25)][-1] == 3
    two = feed(file, total_epochs=2)
    assert two.positions == 16
    assert [p.position for p in two.from_frontier(Frontier())] == list(range(16))


def test_c68_a_run_stopped_on_an_epoch_boundary_still_has_the_next_epoch(file: Path) -> None:
    subject = feed(file, total_epochs=2)
    rest = list(subject.from_frontier(Frontier(base=8)))
    assert [p.position for p in rest] == list(range(8, 16))
    assert {p.epoch for p in rest} == {1}
    assert list(subject.from_frontier(Frontier(base=16))) == []


def test_c86_fewer_prompts_than_a_step_needs_are_refused_with_both_numbers(file: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.prompts: 3 usable prompts of 4 .* the 4 of one step.*raise it$"):
        feed(file, count=4)


def test_prompts_too_long_or_not_spellable_are_left_out_and_counted(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(SET.replace('5: "9" * 40', '5: "é"'))
    with caplog.at_level(logging.WARNING):
        subject = feed(file)
    assert len(subject) == 8
    assert "8 of 10 usable; 1 have characters that the model's tokenizer does not know (é)" in caplog.text
    assert "1 are longer than rollout.max_prompt_length=20, of which the shortest has 43 tokens" in caplog.text


def test_too_few_prompts_are_explained_by_their_cause_and_by_nothing_else(file: Path) -> None:
    def refusal(items: str, count: int = 10) -> str:
        own = file.with_name(f"own{abs(hash(items))}.py")  # a file is loaded once a process
        own.write_text(SET.replace("f\"{i}{MARK[split]}{more.get(i, '')}\"", items))
        with pytest.raises(TaskError) as caught:
            feed(own, count=count)
        return str(caught.value)

    unknown = refusal('"was ist "')
    assert "10 have characters that the model's tokenizer does not know (aistw)" in unknown
    assert f"which knows '{CHARACTERS}'" in unknown
    assert "model.path" in unknown
    assert "max_prompt_length" not in unknown
    long = refusal('"1" * (30 + i)')
    assert "raise it" in long and "the shortest has 31 tokens" in long
    assert "characters" not in long
    few = refusal('"1"', count=2)
    assert few.endswith("(rollout.groups_per_step): lower it, or give more prompts")


@pytest.mark.parametrize("body", ["return options['path']", "raise ValueError('no')", "import no_such_thing"])
def test_a_prompts_function_that_raises_is_told_with_its_line(body: str, file: Path) -> None:
    file.write_text(f"def prompts(split, seed, options):\n    {body}\n")
    with pytest.raises(TaskError, match=r"task\.prompts=.*set\.py:prompts: \w+Error: .* \(set\.py:2\)"):
        feed(file)


def test_an_evaluation_round_is_greedy_and_named_by_its_version(file: Path) -> None:
    subject = feed(file)
    first, again = subject.eval_prompts(7), subject.eval_prompts(8)
    assert [p.item for p in first[:2]] == ["eval7.0", "eval7.1"]
    assert [p.item for p in again[:2]] == ["eval8.0", "eval8.1"]
    assert {(p.n, p.temperature, p.split) for p in first} == {(1, 0.0, Split.EVAL)}
    assert [p.text for p in first] == [p.text for p in again] == [f"{p.reference}?" for p in first]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ('["text"]', "item 0 of .* is str, where tasks.prompts.Item"),
        ('"text"', "returned str, where a list of Item"),
        ("iter([])", "where a list of Item"),
        ("None", "returned NoneType, where a list"),
    ],
)
def test_something_else_than_items_is_refused(returned: str, told: str, file: Path) -> None:
    file.write_text(SET.replace('["text"]', returned))
    with pytest.raises(TaskError, match=rf"task\.prompts: .*{told}"):
        PromptFeed(
            task=TaskConfig(prompts=f"{file}:wrong"), rollout=RolloutConfig(), tokenizer=character_tokenizer(), seed=0
        )


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    ("item", "told"),
    [
        ('text="5\\ud800", reference="5"', "text of item 5 .* has half a surrogate pair at character 1"),
        ('text="5", reference="\\udfff"', "reference of item 5 .* has half a surrogate pair at character 0"),
        ('text=5, reference="5"', "text of item 5 .* is int, where str is expected: 5"),
        ('text=None, reference="5"', "text of item 5 .* is NoneType, where str is expected"),
        ('text=b"5", reference="5"', "text of item 5 .* is bytes, where str is expected"),
        ('text="5", reference=5', "reference of item 5 .* is int, where str is expected"),
        ('text="5", reference=None', "reference of item 5 .* is NoneType, where str is expected"),
    ],
)
def test_one_bad_prompt_is_named_by_its_place_and_its_field(item: str, told: str, split: str, file: Path) -> None:
    file.write_text(
        f"{SET}\n_good = prompts\n\ndef prompts(split, seed, options):\n"
        f"    items = _good(split, seed, options)\n"
        f"    if split == {split!r}:\n        items[5] = Item({item})\n    return items\n"
    )
    with pytest.raises(TaskError, match=rf"task\.prompts: {told}") as caught:
        feed(file).eval_prompts(0)
    assert split in str(caught.value)
    str(caught.value).encode()


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


def words(*, adds_bos: bool, template: str | None) -> PreTrainedTokenizerFast:
    ids: Mapping[str, int] = {token: i for i, token in enumerate(["<s>", "</s>", *"0123456789>?:"])}
    tokenizer = Tokenizer(WordLevel(dict(ids)))
    tokenizer.pre_tokenizer = Cut("", "isolated")
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("adds_bos", "template", "chat", "expected"),
    [
        (True, TEMPLATE, True, 1),  # both the template and the tokenizer have one to give
        (False, TEMPLATE, True, 1),
        (True, TEMPLATE.removeprefix("{{ bos_token }}"), True, 1),
        (True, None, False, 1),
        (False, None, False, 0),  # a tokenizer that never puts one is left alone
    ],
)
def test_c81_a_prompt_has_exactly_one_bos_where_its_model_has_one(
    file: Path, adds_bos: bool, template: str | None, chat: bool, expected: int
) -> None:
    subject = feed(file, tokenizer=words(adds_bos=adds_bos, template=template), chat_template=chat)
    token_ids = subject.at(0).token_ids
    assert np.count_nonzero(token_ids == 0) == expected
    assert not expected or token_ids[0] == 0


def test_a_chat_template_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.chat_template"):
        feed(file, chat_template=True)

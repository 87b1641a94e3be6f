"""The resolved configuration as people read it."""

from pathlib import Path

from configs import show
from configs.load import load


def test_c104_derived_numbers_are_printed_in_one_unit_and_change_nothing() -> None:
    config = load(
        "quickstart", ["rollout.groups_per_step=4", "rollout.completions_per_group=8", "learner.ranks=2", "seed=3"]
    )
    before = config.model_dump()
    numbers = show.derived(config)
    assert numbers["samples a step"].startswith("32 = 4 groups x 8")
    assert numbers["samples per rank"].startswith("16 = 32 / 2")
    assert numbers["window"].startswith("8 outstanding groups = (max_staleness 1 + 1) x 4")
    assert config.model_dump() == before


def test_ranks_that_do_not_divide_the_samples_get_one_more_or_less() -> None:
    config = load("quickstart", ["rollout.groups_per_step=1", "rollout.completions_per_group=5", "learner.ranks=2"])
    assert show.derived(config)["samples per rank"].startswith("2 or 3 = 5 / 2")


def test_what_is_shown_loads_again_equal(tmp_path: Path) -> None:
    config = load("smollm2_gsm8k_cpu", ["learner.optim.lr=2e-5", "task.options.answer='1e5'", "broker.namespace='on'"])
    file = tmp_path / "config.yaml"
    file.write_text(show.render(config))
    assert load(file) == config


def test_c122_no_password_is_shown() -> None:
    text = show.render(load("quickstart", ["broker.url=redis://user:hunter2@10.0.0.5:6379/0"]))
    assert "hunter2" not in text
    assert "redis://10.0.0.5:6379/0" in text

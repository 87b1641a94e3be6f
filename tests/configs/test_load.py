"""Configuration files and overrides."""

from pathlib import Path

import pytest

from configs.load import ConfigError, find, keys, load, nearest, presets
from configs.run import RunConfig


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads(name: str) -> None:
    assert isinstance(load(name), RunConfig)


def test_an_override_wins_over_the_file() -> None:
    config = load("quickstart", ["learner.total_steps=7", "experiment=a-b", "generator.extra_engine_args.x=true"])
    assert config.learner.total_steps == 7
    assert config.experiment == "a-b"
    assert config.generator.extra_engine_args == {"x": True}


@pytest.mark.parametrize("text", ["2e-5", "0.00002", "2.0e-5"])
def test_a_learning_rate_in_any_notation_is_a_float(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"learner:\n  optim:\n    lr: {text}\n")
    assert load(file).learner.optim.lr == 2e-5
    assert load("quickstart", [f"learner.optim.lr={text}"]).learner.optim.lr == 2e-5


def test_an_integer_is_taken_where_a_float_is_declared() -> None:
    lr = load("quickstart", ["learner.optim.lr=1"]).learner.optim.lr
    assert lr == 1.0
    assert isinstance(lr, float)


def test_an_empty_value_is_the_empty_text() -> None:
    assert load("quickstart", ["broker.url="]).broker.url == ""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.optim.lrr=1", ["learner.optim.lrr=1", "unknown key", "learner.optim.lr?"]),
        ("learner.learnig_rate=1", ["learner.learnig_rate=1", "unknown key", "learner.optim.lr?"]),
        ("rollot.max_staleness=1", ["rollot", "unknown key", "rollout?"]),
        ("rollout.max_new_tokens=1", ["rollout.max_new_tokens", "rollout.max_response_length?"]),
        ("algorithm.adv_estimator=gae", ["algorithm.adv_estimator", "algorithm.advantage?"]),
        ("algorithm.loss_agg_mode=x", ["algorithm.loss_agg_mode", "algorithm.loss_mean?"]),
        ("generator.dtype=x", ["generator.dtype", "model.dtype?"]),
        ("learner.ranks=two", ['learner.ranks="two"', "expected an integer"]),
        ("learner.ranks='2'", ['learner.ranks="2"', "expected an integer"]),
        ("seed=1.5", ["seed=1.5", "expected an integer"]),
        ("learner.ranks=true", ["learner.ranks=true", "expected an integer"]),
        ("learner.optim.lr=fast", ["learner.optim.lr", "expected a number"]),
        ("learner.optim.lr=.nan", ["learner.optim.lr", "expected a finite number"]),
        ("model.tie_word_embeddings=yes", ["model.tie_word_embeddings", "expected true or false"]),
        ("rollout.on_stale=keep", ["rollout.on_stale", "'mask' or 'drop'"]),
        ("broker.host=::", ["broker.host=", "expected a text; quote it: "]),
        ("experiment=5", ["experiment=5: expected a text; quote it: "]),
        ("rollout=3", ["rollout=3", "expected a section"]),
        ("task.options.x=[1]", ["task.options.x=[1]", "expected a text or an integer or a number or true or false"]),
        ("generator.count=-1", ["generator.count=-1", "greater than or equal to 0"]),
        ("rollout.top_p=0.5", ["rollout.allow_truncated_sampling"]),
        ("weights_sync.host=0.0.0.0", ["weights_sync.host", "wildcard"]),
        ("learner.ranks", ["expected key=value"]),
        ("=3", ["expected key=value"]),
        ("seed=[1", ["seed=[1"]),
    ],
)
def test_c102_a_wrong_setting_is_refused_by_name_with_the_way_out(override: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [override])
    assert "\n" not in str(caught.value)
    for part in expected:
        assert part in str(caught.value)


def test_all_problems_are_told_at_once_one_line_each() -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", ["seed=x", "learner.optim.lrr=1", "task.options.x=[1]"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"seed: 1\nseed: 2",
        b"- 1",
        b"[]",
        b"0",
        b"a: [",
        b"seed: \x00",
        b"experiment: \xff\xfe",
        b"task: &x {options: *x}",
        b"seed: !!binary aGVsbG8=",
        b"seed: !!int abc",
        b"seed: " + b"9" * 5000,
        b"[" * 3000,
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.yaml: .") as caught:
        load(file)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "override",
    [
        "seed=&x [*x]",
        "seed=!!binary aGVsbG8=",
        "seed=!!int abc",
        "seed=" + "[" * 3000 + "]" * 3000,
        "seed=" + "9" * 5000,
        "experiment=\udcff",
        "experiment\udcff=1",
        "a." * 3000 + "b=1",
        "task.options.x=" + "[" + "x, " * 3000 + "]",
    ],
)
def test_an_override_that_cannot_be_read_is_named_with_the_reason(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [override])
    told = str(caught.value)
    assert override.partition("=")[0][:30].partition("\udcff")[0] in told
    assert "\n" not in told
    assert len(told) < 900
    told.encode()


def test_a_path_that_no_file_can_have_is_refused_and_clipped(tmp_path: Path) -> None:
    for path in ("x" * 5000, f"{tmp_path}/{'x' * 5000}", "a/" * 5000):
        with pytest.raises(ConfigError, match="configuration file '") as caught:
            load(path)
        assert len(str(caught.value)) < 500


def test_an_empty_file_means_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing set\n")
    assert load(file) == RunConfig()


def test_a_missing_file_names_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"no configuration file 'nowhere'.*quickstart"):
        load("nowhere")


def test_a_preset_is_found_by_name_and_by_its_path_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find("quickstart") == find("configs/quickstart.yaml")
    (tmp_path / "quickstart").write_text("seed: 5\n")
    assert load("quickstart").seed == 5  # a real file wins


def test_every_key_is_its_own_nearest() -> None:
    for key in keys(RunConfig):
        assert nearest(key) == key

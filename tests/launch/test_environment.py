"""What a process of a run learns from whoever started it."""

import argparse
import os
from pathlib import Path

import pytest

from configs.load import ConfigError, load
from launch import environment


def url_given(tmp_path: Path, *overrides: str) -> str:
    args = argparse.Namespace(overrides=[f"output_dir={tmp_path}", *overrides])
    return environment.broker_url(args, load("quickstart", args.overrides))


def test_the_url_is_taken_from_where_it_was_told_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.BROKER_URL, raising=False)
    with pytest.raises(
        ConfigError, match=rf"no broker\.url in {tmp_path}/slipstream/quickstart: is the broker running\?"
    ):
        url_given(tmp_path)
    written = environment.url_file(load("quickstart", [f"output_dir={tmp_path}"]))
    written.parent.mkdir(parents=True)
    written.write_text("tcp://127.0.0.1:1\n")
    assert url_given(tmp_path) == "tcp://127.0.0.1:1"
    monkeypatch.setenv(environment.BROKER_URL, "tcp://127.0.0.1:2")
    assert url_given(tmp_path) == "tcp://127.0.0.1:2"
    assert url_given(tmp_path, "broker.url=tcp://127.0.0.1:3") == "tcp://127.0.0.1:3"


def test_the_launchers_word_with_the_password_wins_over_the_file_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("broker:\n  url: redis://h:1/0\n")
    monkeypatch.setenv(environment.BROKER_URL, "redis://:secret@h:1/0")
    args = argparse.Namespace(overrides=[])
    assert environment.broker_url(args, load(file)) == "redis://:secret@h:1/0"


def test_a_launcher_starts_no_broker_beside_the_one_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    args, config = argparse.Namespace(overrides=[]), load("quickstart")
    monkeypatch.delenv(environment.BROKER_URL, raising=False)
    assert environment.told(args, config) == config
    monkeypatch.setenv(environment.BROKER_URL, "redis://:secret@h:1/0")
    broker = environment.told(args, config).broker
    assert (broker.url, broker.backend) == ("redis://:secret@h:1/0", "redis")


def test_the_brokers_keys_are_named_after_the_run_unless_they_have_a_name() -> None:
    assert environment.placed(load("quickstart", ["project=p", "experiment=e"])).namespace == "p/e"
    assert environment.placed(load("quickstart", ["broker.namespace=n"])).namespace == "n"


def test_what_the_user_has_set_stays_but_for_the_threads_which_are_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    environment.apply({"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "2", "VLLM_NO_USAGE_STATS": "1"})
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ.pop("VLLM_NO_USAGE_STATS") == "1"


def test_c105_the_generators_threads_reach_the_engine() -> None:
    settings = environment.engine_environment(load("quickstart", ["generator.threads=3"]))
    assert settings["OMP_NUM_THREADS"] == "3"

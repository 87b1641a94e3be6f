import json
from pathlib import Path

from generators.stop_tokens import stop_token_ids


def write(directory: Path, **files: dict[str, object]) -> str:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return str(directory)


def test_c84_every_end_of_sequence_id_of_both_files_ends_an_answer(tmp_path: Path) -> None:
    path = write(tmp_path, config={"eos_token_id": 1}, generation_config={"eos_token_id": [1, 106]})
    assert stop_token_ids(path) == (1, 106)


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    assert stop_token_ids(write(tmp_path, config={"text_config": {"eos_token_id": 3}})) == (3,)


def test_a_model_without_an_end_token_has_none(tmp_path: Path) -> None:
    assert stop_token_ids(write(tmp_path, config={"eos_token_id": None})) == ()

"""ServerConfig: every option of the server is checked, whether it comes from a flag, a file or Python."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.config import HttpStart, ServerConfig


def test_the_defaults_are_valid_and_listen_on_this_machine_only() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.api_key) == ("127.0.0.1", 8000, ())
    assert not config.admin


def test_no_option_has_the_name_of_an_engine_option() -> None:
    engine = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not engine & {field.name for field in dataclasses.fields(ServerConfig)}


def test_every_option_has_a_help_text() -> None:
    assert all(field.metadata["help"] for field in dataclasses.fields(ServerConfig))


@pytest.mark.parametrize(
    "name, value",
    [
        ("host", ""),
        ("host", "http://localhost"),
        ("host", "[::1]"),
        ("host", "a b"),
        ("host", 5),
        ("port", -1),
        ("port", 65536),
        ("port", "80"),
        ("port", True),
        ("api_workers", 0),
        ("tokenizer_workers", 0),
        ("tokenizer_deadline", math.nan),
        ("tokenizer_deadline", 0.0),
        ("max_queued_requests", 0),
        ("max_queued_tokens", 0),
        ("request_timeout", 0.0),
        ("request_timeout", math.inf),
        ("drain_timeout", -1.0),
        ("drain_timeout", math.nan),
        ("restart_limit", -1),
        ("stall_restart_s", 1.0),
        ("max_body_bytes", 10),
        ("admin", 1),
        ("debug", "yes"),
        ("log_format", "xml"),
        ("served_model_name", ("",)),
        ("served_model_name", ("a\nb",)),
        ("served_model_name", ("a", "a")),
        ("served_model_name", "bare"),
        ("cors_origin", ("example.org",)),
        ("cors_origin", ("https://example.org/path",)),
        ("allowed_host", ("example.org:8000",)),
        ("allowed_host", ("http://example.org",)),
        ("allowed_host", ("",)),
        ("allowed_host", ("a", "a")),
        ("metrics_key", ("scrape",)),  # without an api_key
        ("join", "router:8080"),
        ("join", "http://router:8080"),  # without an api_key
        ("api_key", "bare"),
        ("api_key", (5,)),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'drain_timeout'"):
        ServerConfig.from_options({"drain_time": 3})


@pytest.mark.parametrize("key", ["", "two words", "tab\t", "n\u00e4", "line\n", "x" * 513])
def test_a_key_that_no_header_could_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key 2") as caught:
        ServerConfig(api_key=("fine", key))
    assert not key or key not in str(caught.value)


def test_a_key_that_is_given_twice_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match="api_key 3 was given before") as caught:
        ServerConfig(api_key=("secret-one", "secret-two", "secret-one"))
    assert "secret-one" not in str(caught.value)


def test_keys_are_not_in_the_representation() -> None:
    assert "secret" not in repr(ServerConfig(api_key=("secret",), metrics_key=("secret-too",)))


def test_a_metrics_key_is_not_an_api_key_too() -> None:
    with pytest.raises(ConfigError, match="metrics_key is also an api_key") as caught:
        ServerConfig(api_key=("secret", "other"), metrics_key=("other",))
    assert "other;" not in str(caught.value)


def test_metrics_keys_come_from_files_as_api_keys_do(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("scrape\n")
    config = ServerConfig.from_options({"api_key": "a", "metrics_key": f"@{tmp_path / 'keys'}"})
    assert config.metrics_key == ("scrape",)
    with pytest.raises(ConfigError, match="--metrics-key @"):
        ServerConfig.from_options({"api_key": "a", "metrics_key": f"@{tmp_path}"})


def test_keys_come_from_flags_and_files_in_order(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team's\n\n two \nthree\r\n")
    config = ServerConfig.from_options({"api_key": ["one", f"@{file}", "four"]})
    assert config.api_key == ("one", "two", "three", "four")
    assert ServerConfig.from_options({"api_key": f"@{file}"}).api_key == ("two", "three")


def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    empty, binary, large = tmp_path / "empty", tmp_path / "binary", tmp_path / "large"
    empty.write_text("# nothing\n")
    binary.write_bytes(b"\xff\xfe")
    large.write_text("x" * (1 << 20) + "y")
    for path, reason in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "directory"),
        (empty, "has no keys"),
        (binary, "cannot be read"),
        (large, "is it a file with keys"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ServerConfig.from_options({"api_key": [f"@{path}"]})


@pytest.mark.parametrize("value", [12345, None, {"a": 1}, [5]])
def test_keys_of_another_type_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        ServerConfig.from_options({"api_key": value})


def test_one_text_or_a_list_may_be_given_where_several_are_allowed() -> None:
    assert ServerConfig.from_options({"served_model_name": "a"}).served_model_name == ("a",)
    assert ServerConfig.from_options({"served_model_name": ["a", "b"]}).served_model_name == ("a", "b")


def test_the_model_is_called_by_its_hub_name_or_the_last_part_of_its_folder(tmp_path: Path) -> None:
    config = ServerConfig()
    assert config.model_names("demo") == ("demo",)
    assert config.model_names("org/name") == ("org/name",)
    assert config.model_names(str(tmp_path / "Qwen3-0.6B") + "/") == ("Qwen3-0.6B",)
    assert ServerConfig(served_model_name=("mine", "other")).model_names("demo") == ("mine", "other")


def test_a_start_message_survives_the_way_to_an_http_process() -> None:
    start = HttpStart(
        directory="/tmp/quire-x",
        worker=3,
        fd=7,
        server=ServerConfig(api_key=("a", "b"), metrics_key=("c",), request_timeout=2, cors_origin=("*",)),
        model_names=("demo",),
        engine_options={"model": "demo", "threads": None},
        origins={"model": "flag"},
    )
    assert msgspec.json.decode(msgspec.json.encode(start), type=HttpStart) == start

"""Flags, configuration files and presets: made from the dataclasses, with nearest names and one order of precedence."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import quire.__main__
from quire.cli.main import main
from quire.cli.options import (
    CommandParser,
    Given,
    add_engine_options,
    add_sampling_options,
    add_server_options,
    given_options,
    option_names,
    parse_value,
    read_environment,
    sampling_params,
    unknown_variables,
)
from quire.config import PRESETS, EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import ConfigError, QuireError, SamplingParamsError
from quire.other_options import OTHER_OPTIONS
from quire.server.config import ServerConfig
from quire.speculative_config import SpeculativeConfig
from quire.vllm_options import VLLM_OPTIONS


def parse(*arguments: str) -> argparse.Namespace:
    parser = CommandParser("quire generate", "")
    parser.add_argument("words", nargs="*")
    add_engine_options(parser)
    add_sampling_options(parser)
    return parser.parse(arguments)


def given(*arguments: str, model: str | None = "demo") -> Given:
    return given_options(parse(*arguments), model, sampling=True)


ENGINE_VALUES: dict[str, tuple[str, Any]] = {
    "model": ("some/folder", "some/folder"),
    "revision": ("main", "main"),
    "tokenizer": ("org/name", "org/name"),
    "tokenizer_revision": ("main", "main"),
    "dtype": ("float32", "float32"),
    "device": ("cpu", "cpu"),
    "kv_cache_dtype": ("int8", "int8"),
    "quantization": ("int4", "int4"),
    "cpu_kernels": ("torch", "torch"),
    "threads": ("2", 2),
    "tensor_parallel_size": ("2", 2),
    "pipeline_parallel_size": ("1", 1),
    "data_parallel_size": ("1", 1),
    "distributed_executor_backend": ("mp", "mp"),
    "nnodes": ("1", 1),
    "master_addr": ("10.0.0.1", "10.0.0.1"),
    "master_port": ("29502", 29502),
    "token_file": ("some/file", "some/file"),
    "join_timeout_s": ("60", 60.0),
    "collective_timeout_s": ("5.5", 5.5),
    "max_model_len": ("512", 512),
    "num_redundant_experts": ("4", 4),
    "eplb_interval": ("100", 100),
    "block_size": ("32", 32),
    "num_kv_blocks": ("100", 100),
    "kv_cache_memory": ("1GiB", "1GiB"),
    "host_kv_memory": ("16GiB", "16GiB"),
    "disk_kv_path": ("some/folder", "some/folder"),
    "disk_kv_memory": ("100GiB", "100GiB"),
    "kv_role": ("prefill", "prefill"),
    "prefill_url": ("http://a:8000,b:29600", "http://a:8000,b:29600"),
    "prefill_min_tokens": ("64", 64),
    "kv_directory": ("redis://a:6379/0", "redis://a:6379/0"),
    "kv_connector": ("mine", "mine"),
    "kv_connector_extra_config": ('{"blocks": 64}', {"blocks": 64}),
    "kv_events_config": ('{"topic": "kv"}', {"topic": "kv"}),
    "kv_transport": ("socket", "socket"),
    "kv_host": ("0.0.0.0", "0.0.0.0"),
    "kv_port": ("29600", 29600),
    "cluster_key_file": ("key", "key"),
    "gpu_memory_utilization": ("0.5", 0.5),
    "cuda_graphs": ("off", "off"),
    "profile": ("some/folder", "some/folder"),
    "prefix_cache": ("off", "off"),
    "max_num_seqs": ("8", 8),
    "max_num_batched_tokens": ("256", 256),
    "min_chunk": ("4", 4),
    "max_num_partial_prefills": ("2", 2),
    "long_prefill_token_threshold": ("64", 64),
    "scheduling_policy": ("priority", "priority"),
    "target_itl_ms": ("50.5", 50.5),
    "generation_config": ("off", "off"),
    "tool_format": ("hermes", "hermes"),
    "chat_template": ("Say {{ messages }}", "Say {{ messages }}"),
    "speculative_config": ('{"method": "ngram"}', {"method": "ngram"}),
    "speculative_acceptance": ("rejection", "rejection"),
}
SAMPLING_VALUES: dict[str, tuple[str, Any]] = {
    "thinking_token_budget": ("64", 64),
    "truncate_prompt_tokens": ("-1", -1),
    "n": ("3", 3),
    "temperature": ("0.7", 0.7),
    "top_p": ("0.9", 0.9),
    "top_k": ("40", 40),
    "min_p": ("0.05", 0.05),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("-0.5", -0.5),
    "repetition_penalty": ("1.1", 1.1),
    "seed": ("7", 7),
    "stop": ("END", ("END",)),
    "stop_token_ids": ("1,2,3", (1, 2, 3)),
    "min_tokens": ("2", 2),
    "max_tokens": ("20", 20),
    "logit_bias": ("5:-100,6:2.5", {5: -100.0, 6: 2.5}),
    "allowed_token_ids": ("4,5", (4, 5)),
    "bad_words": ("eval", ("eval",)),
    "logprobs": ("2", 2),
    "prompt_logprobs": ("0", 0),
    "priority": ("-1", -1),
    "cache_salt": ("tenant", "tenant"),
    "kv_transfer_params": ('{"do_remote_decode": true}', {"do_remote_decode": True}),
    "structured_outputs": ('{"choice": ["a", "b"]}', StructuredOutputsParams(choice=("a", "b"))),
}
ENGINE_SWITCHES = (
    "enable_chunked_prefill",
    "async_scheduling",
    "enforce_eager",
    "deterministic",
    "enable_expert_parallel",
    "check_invariants",
)
SAMPLING_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculate")
NEEDED = {
    "speculative_acceptance": {"speculative_config": {"method": "ngram"}},
    "num_redundant_experts": {"enable_expert_parallel": True},
    "token_file": {"nnodes": 2, "tensor_parallel_size": 2},
    "disk_kv_path": {"host_kv_memory": "1GiB"},
    "kv_connector_extra_config": {"kv_connector": "mine"},
    "disk_kv_memory": {"host_kv_memory": "1GiB", "disk_kv_path": "some/folder"},
    "prefill_url": {"kv_role": "decode"},
    "kv_directory": {"kv_role": "decode"},
    "cluster_key_file": {"kv_role": "prefill"},
    "tokenizer_revision": {"tokenizer": "org/name"},
}
"""What an option is valid with."""


def test_the_cases_below_cover_every_field() -> None:
    assert {*ENGINE_VALUES, *ENGINE_SWITCHES} == {field.name for field in dataclasses.fields(EngineConfig)}
    assert {*SAMPLING_VALUES, *SAMPLING_SWITCHES} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", ENGINE_VALUES)
@pytest.mark.parametrize("spelling", ["dashes", "underscores", "equals"])
def test_every_engine_option_is_a_flag(name: str, spelling: str) -> None:
    text, value = ENGINE_VALUES[name]
    flag = "--" + (name if spelling == "underscores" else name.replace("_", "-"))
    options = given(*([f"{flag}={text}"] if spelling == "equals" else [flag, text])).engine
    assert options == {"model": "demo"} | {name: value}
    EngineConfig.from_options({"max_num_seqs": 8} | NEEDED.get(name, {}) | options)  # valid there too


@pytest.mark.parametrize("name", SAMPLING_VALUES)
def test_every_sampling_parameter_is_a_flag(name: str) -> None:
    text, value = SAMPLING_VALUES[name]
    assert getattr(sampling_params(given(f"--{name}={text}").sampling), name) == value


@pytest.mark.parametrize("name", [*ENGINE_SWITCHES, *SAMPLING_SWITCHES])
def test_a_switch_has_a_flag_for_on_and_one_for_off(name: str) -> None:
    for flag, value in ((f"--{name}", True), (f"--no-{name}", False), (f"--no_{name}", False)):
        both = given(flag)
        assert (both.engine | both.sampling)[name] is value


def test_options_that_are_not_given_are_left_to_the_dataclass() -> None:
    assert given() == Given(engine={"model": "demo"}, sampling={}, preset=None)


def test_texts_may_be_repeated_and_kept_as_they_are() -> None:
    assert given("--stop", "a,b", "--stop", '["c"]').sampling == {"stop": ["a,b", '["c"]']}


def test_none_unsets_an_optional_value() -> None:
    assert given("--target-itl-ms", "none").engine["target_itl_ms"] is None


def test_flags_and_prompts_may_be_mixed() -> None:
    args = parse("demo", "--max-tokens", "5", "one", "--seed", "1", "two")
    assert args.words == ["demo", "one", "two"]


def test_what_follows_two_dashes_is_no_flag() -> None:
    assert parse("demo", "--", "--max-tokns").words == ["demo", "--max-tokns"]


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--max-num-seq", "--max-num-seqs"), ("--temprature", "--temperature"), ("--blocksize", "--block-size")],
)
def test_an_unknown_flag_is_refused_with_the_nearest_one(flag: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option {flag}; did you mean {near}\\?"):
        parse("demo", flag, "4")


def test_a_flag_that_resembles_nothing_points_to_the_help() -> None:
    with pytest.raises(ConfigError, match="unknown option --qqqq; see 'quire generate --help'"):
        parse("--qqqq")


def test_a_shortened_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown option --max-num-batched"):
        parse("--max-num-batched", "64")


def test_trust_remote_code_is_refused_by_name() -> None:
    for flag in ("--trust-remote-code", "--trust_remote_code"):
        with pytest.raises(ConfigError, match="never runs code from a checkpoint"):
            given(flag)


def test_vllms_names_are_flags_and_yaml_keys_and_what_is_given_still_wins_in_order(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "enable-prefix-caching: off\ndecode_context_parallel_size: 1\nkv_cache_dtype: fp8_e4m3\nswap_space: 0\n"
    )
    assert given("--config", str(file), model=None).engine == {"prefix_cache": "off", "kv_cache_dtype": "fp8"}
    both = given("--config", str(file), "--enable-prefix-caching", "--kv_cache_dtype=int8")
    assert both.engine == {"model": "demo", "prefix_cache": "radix", "kv_cache_dtype": "int8"}
    assert both.origins["prefix_cache"] == "flag"
    assert given("--config", str(file), "--prefix-cache", "hash").engine["prefix_cache"] == "hash"
    with pytest.raises(ConfigError, match="decode_context_parallel_size=2 is not supported: set tensor_parallel_size"):
        given("--decode-context-parallel-size", "2")
    with pytest.raises(ConfigError, match="prefix_cache and enable_prefix_caching are the same option"):
        given("--prefix-cache", "hash", "--no-enable-prefix-caching")


def test_vllms_short_flags_are_taken() -> None:
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    assert given("-tp", "2", "-pp=1", "-dp", "1").engine == {"model": "demo"} | ranks
    with pytest.raises(ConfigError, match="decode_context_parallel_size=2 is not supported: set tensor_parallel_size"):
        given("-dcp", "2")
    assert given("-tp", "2", "-ep").engine["enable_expert_parallel"] is True


@pytest.mark.parametrize("name", [name for name in VLLM_OPTIONS if name not in SAMPLING_VALUES])
def test_every_name_of_vllms_is_a_flag_that_the_help_does_not_show(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option, flag = VLLM_OPTIONS[name], "--" + name.replace("_", "-")
    parser = CommandParser("quire serve", "")
    add_server_options(parser)
    add_engine_options(parser)
    if name not in ENGINE_VALUES and name != "served_model_name":  # that is the server's own
        assert not re.search(flag + r"(?![\w-])", parser.format_help().replace("--no-enable-prefix-caching", ""))
    values = [*option.values, *(option.same or ())]
    texts = [
        [flag if value else f"--no-{flag[2:]}"]
        if value in (True, False) and option.kind is bool
        else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        for value in values
    ]
    for words in texts:
        options = given_options(parser.parse(words), "demo", server=True)
        EngineConfig.from_options(options.engine)
        ServerConfig.from_options(options.server)


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("--max-num-seqs=many", "'many' is not a whole number"),
        ("--target-itl-ms=soon", "'soon' is not a number"),
        ("--block-size=x", "'x' is not a whole number"),
        ("--stop-token-ids=1;2", "'1;2' is not a list of whole numbers"),
        ("--logit-bias=5", "'5' is not a list of token ids with biases"),
        ("--speculative-config={method: ngram}", r"'{method: ngram}' is not a JSON object, as in '{\"method\""),
        ('--speculative-config=["ngram"]', "is not a JSON object"),
        ("--speculative-config=ngram", "'ngram' is not a JSON object"),
        ("--preset=fast", "invalid choice: 'fast'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(flag: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse(flag)


def test_a_value_out_of_range_is_refused_by_the_dataclass() -> None:
    with pytest.raises(ConfigError, match=r"block_size=17 is not supported; allowed: 16, 32"):
        EngineConfig.from_options(given("--block-size", "17").engine)


def test_flag_wins_over_yaml_over_preset_over_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_num_seqs: 5\nmax_num_batched_tokens: 300\n")
    options = given("--preset", "chat", "--config", str(file), "--max-num-seqs", "4")
    config = EngineConfig.from_options(options.engine, options.preset)
    assert config.max_num_seqs == 4  # flag
    assert config.max_num_batched_tokens == 300  # file
    assert config.target_itl_ms == PRESETS["chat"]["target_itl_ms"]  # preset
    assert config.block_size == EngineConfig(model="demo").block_size  # default
    assert options.preset_options == {"target_itl_ms": PRESETS["chat"]["target_itl_ms"]}


@pytest.mark.parametrize("name", ENGINE_VALUES)
def test_every_engine_option_is_a_yaml_key(name: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    text, value = ENGINE_VALUES[name]
    file.write_text(f"{name.replace('_', '-')}: {text}\n")
    assert given("--config", str(file), model=None).engine == {name: value}


def test_a_yaml_file_may_name_a_preset_and_sampling_parameters(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("preset: batch\ntemperature: 0.5\nstop: [a, b]\nlogit_bias: {7: -1}\n")
    options = given("--config", str(file))
    assert options.preset == "batch"
    params = sampling_params(options.sampling)
    assert (params.temperature, params.stop, params.logit_bias) == (0.5, ("a", "b"), {7: -1.0})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("max_num_seq: 4", "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"),
        ("trust_remote_code: true", "never runs code from a checkpoint"),
        ("preset: fast", "unknown preset 'fast'"),
        ("preset: []", r"unknown preset \[\]"),
        ("- a\n- b", "must have 'name: value' lines, but it is a list"),
        ("1: 2", "must have 'name: value' lines"),
        ("a: [", "is not YAML"),
        ("min_chunk: 1\nmin-chunk: 2", "has min_chunk twice"),
        ("min_chunk: 1\nmin_chunk: 2", "has min_chunk twice"),
        ("logit_bias: {7: 1, 7: 2}", "has 7 twice"),
        ("seed: 2020-99-99", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("model: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_bad_configuration_file_is_refused(content: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=what):
        given("--config", str(file))


def test_a_configuration_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml cannot be read: No such file"):
        given("--config", str(tmp_path / "gone.yaml"))


def test_a_configuration_file_says_how_to_speculate_in_a_mapping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("speculative_config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    config = EngineConfig.from_options(given("--config", str(file)).engine)
    assert config.speculation == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    for wrong in ("ngram", "[method, ngram]"):
        file.write_text(f"speculative_config: {wrong}\n")
        assert main(["generate", "demo", "x", "--config", str(file)]) == 2
        error = capsys.readouterr().err
        assert "speculative_config=" in error and "it must be a mapping" in error and error.count("\n") == 1


def test_an_empty_configuration_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\n")
    assert given("--config", str(file)).engine == {"model": "demo"}


def test_sampling_parameters_from_json_may_have_ids_as_strings() -> None:
    assert sampling_params({"logit_bias": {"12": 1}}).logit_bias == {12: 1.0}
    with pytest.raises(SamplingParamsError, match="a key of logit_bias"):
        sampling_params({"logit_bias": {"twelve": 1}})
    with pytest.raises(SamplingParamsError, match="did you mean 'temperature'"):
        sampling_params({"temprature": 1})


@pytest.mark.parametrize(("text", "value"), [("on", True), ("TRUE", True), ("no", False), ("0", False)])
def test_a_switch_can_be_said_in_words(text: str, value: bool) -> None:
    assert parse_value("ignore_eos", bool, text) is value


def test_a_text_that_is_no_json_list_is_refused_where_it_looks_like_one() -> None:
    hint = get_type_hints(SamplingParams)["bad_words"]
    with pytest.raises(ConfigError, match="not a JSON list of texts"):
        parse_value("bad_words", hint, '["a", 1]')
    assert parse_value("bad_words", hint, '["a\\n", "b"]') == ["a\n", "b"]


def test_help_describes_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in (*ENGINE_VALUES, *ENGINE_SWITCHES, *SAMPLING_VALUES, *SAMPLING_SWITCHES):
        assert f"--{name.replace('_', '-')}" in text
    assert "tokens per KV block (default: 16)" in text
    assert "from 0, which is greedy decoding" in text
    assert "None" not in text  # a word of Python


def test_help_and_version_need_no_torch() -> None:
    code = (
        "import sys; from quire.cli.main import main; "
        "codes = [main(a) for a in (['--help'], ['--version'], ['generate', '--help'], ['chat', '--help'])]; "
        "sys.exit(codes != [0] * 4 or 'torch' in sys.modules or 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "quire 0." in done.stdout


def test_ctrl_c_while_the_command_line_is_imported_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "quire.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "quire.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert quire.__main__.main() == 130


def test_nothing_is_imported_before_that_is_seen_to() -> None:
    code = "import sys, quire.__main__; print(*(name for name in sys.modules if name.startswith('quire')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["quire", "quire.__main__"]
    assert set(quire.__all__) == set(quire._LAZY)


def test_python_m_quire_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", "--version"])
    assert quire.__main__.main() == 0
    assert capsys.readouterr().out == f"quire {quire.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generte"], 2, "unknown command 'generte'; did you mean 'generate'?"),
        (["trace", "a", "--max-tokens", "x"], 2, "argument --max-tokens: 'x' is not a whole number"),
        (["down", "f.yaml", "--timeout", "x"], 2, "argument --timeout: 'x' is not a number"),
        (["generate", "demo", "x", "--temperature", "-1"], 2, "temperature is -1.0; it must be"),
        (["generate", "demo", "x", "--min-chunk", "5000"], 2, "max_num_batched_tokens=2048 is below"),
        (["generate", "/no/such/folder", "x"], 2, "/no/such/folder"),
        (["generate", "demo", "x", "--input", "f"], 2, "both given"),
        (["generate", "demo", "x", "--lines"], 2, "--lines is for standard input"),
        (["generate", "demo", "--input", ""], 2, "--input is empty"),
        (["generate", "demo", "x", "--output", ""], 2, "--output is empty"),
        (["generate", "Once upon a time"], 2, "the first argument must be the model"),
        (["generate", "long " * 1000], 2, "the first argument must be the model"),
        (["chat", "demo", "--model", "demo"], 2, "two models were given"),
        (["chat", "demo", "--n", "2"], 2, "n=2 is not possible in a chat"),
        (["chat"], 2, "no model was given"),
        (["generate", "demo", "x", "--speculative-config", "ngram"], 2, "'ngram' is not a JSON object"),
        (["generate", "demo", "x", "--speculative-config", "{}"], 2, "has no method; give one of ngram, draft_model"),
        (["generate", "demo", "x", "--speculative-config", '{"methd": "ngram"}'], 2, "did you mean 'method'?"),
        (["serve", "demo", "--speculative-config", '{"method": "ngrams"}'], 2, "method is 'ngrams'; allowed: ngram,"),
        (["chat", "demo", "--speculative-acceptance", "rejection"], 2, "set speculative_config"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ") and error.count("\n") == 1
    assert message in error


def test_no_command_shows_the_commands_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


def test_an_error_of_the_engine_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise QuireError("it broke")

    monkeypatch.setattr("quire.cli.main._dispatch", fail)
    assert main(["x"]) == 1


# -- short help, completion, the environment ------------------------------------------------------------------


def test_help_of_a_command_has_two_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench", "kv"], ["run"]):
        assert main([*arguments, "--help"]) == 0 and (shown := capsys.readouterr().out)
        assert main(["help", *arguments]) == 0 and capsys.readouterr().out == shown
    assert main(["help", "nothing"]) == 2


def test_help_shows_a_few_options_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["serve", "demo", "--help-all"]) == 0
    long = capsys.readouterr().out
    assert "--max-model-len" in short and "--min-chunk" not in short and "--min-chunk" in long
    assert "more options: quire serve --help-all" in short
    assert short.count("\n") < 80 < long.count("\n")


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = 'COMP_WORDS=({}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _quire; echo "${{COMPREPLY[@]}}"'
    for line, found in (("quire gene", "generate"), ("quire serve --max-mo", "--max-model-len")):
        done = subprocess.run(["bash", "-c", script + "\n" + ask.format(line)], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (found, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("generate", "inspect", "doctor", "max-model-len"))
    assert main(["completion", "csh"]) == 2


def test_variables_of_the_environment_are_options_below_the_file_and_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("max_num_seqs: 5\n")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "256")
    monkeypatch.setenv("QUIRE_ASYNC_SCHEDULING", "off")
    monkeypatch.setenv("QUIRE_API_KEY", '["a", "b"]')
    monkeypatch.setenv("QUIRE_PORT", "9000")
    parser = CommandParser(prog="quire serve", description="")
    add_server_options(parser)
    add_engine_options(parser)
    given = given_options(parser.parse(["--port", "8080", "--config", str(file)]), "demo", server=True)
    assert (given.engine["max_num_seqs"], given.origins["max_num_seqs"]) == (5, "file")
    assert (given.engine["max_model_len"], given.origins["max_model_len"]) == (256, "environment")
    assert given.engine["async_scheduling"] is False
    assert (given.server["port"], given.origins["port"]) == (8080, "flag")
    assert given.server["api_key"] == ("a", "b")
    assert "max_num_seqs" not in given_options(parser.parse([]), "demo").engine  # for servers alone
    for name, value, told in (
        ("QUIRE_MAX_MODEL_LEN", "long", "QUIRE_MAX_MODEL_LEN: .*'long' is not a whole number"),
        ("QUIRE_PORT", "tcp://10.0.0.1:80", "enableServiceLinks"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_environment(["max_model_len", "port"], {name: value})


def test_variables_are_options_of_a_router_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from quire.cli import route

    file = tmp_path / "route.yaml"
    file.write_text("policy: round-robin\n")
    monkeypatch.setenv("QUIRE_SERVER", '["http://a:1", "http://b:1"]')
    monkeypatch.setenv("QUIRE_POLICY", "least-loaded")
    monkeypatch.setenv("QUIRE_PORT", "9000")
    parser = CommandParser(prog="quire route", description="")
    route.add_arguments(parser)
    config = route.read_options(parser.parse(["--config", str(file), "--port", "9001"]))
    assert (config.server, config.policy, config.port) == (("http://a:1", "http://b:1"), "round-robin", 9001)
    monkeypatch.setenv("QUIRE_DRAIN_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match=r"in the environment, QUIRE_DRAIN_TIMEOUT: .*'soon' is not a number"):
        route.read_options(parser.parse([]))


def test_flags_of_llama_cpp_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-ngl", "--n-gpu-layers", "--gpu-layers"):
        assert main(["serve", "demo", flag, "99"]) == 2
        assert (
            f"unknown option {flag}; llama.cpp's {flag} is --device here: a model is entirely on"
            in capsys.readouterr().err
        )
    assert main(["serve", "demo", "-fa"]) == 2
    assert "llama.cpp's -fa: leave it out" in capsys.readouterr().err
    assert main(["serve", "demo", "--mem-fraction-static", "0.8"]) == 2
    assert "SGLang's --mem-fraction-static is --gpu-memory-utilization here" in capsys.readouterr().err
    assert main(["serve", "demo", "--predict", "5"]) == 2  # of 'quire generate' alone
    assert "llama.cpp" not in capsys.readouterr().err
    assert main(["serve", "demo", "-xyz"]) == 2
    assert "unknown option -xyz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-c", "4096"], {"max_model_len": 4096}),
        (["--ctx-size=4096"], {"max_model_len": 4096}),
        (["--ctx_size", "0"], {"max_model_len": None}),
        (["--num-ctx", "512"], {"max_model_len": 512}),
        (["--context-length", "512", "--max-running-requests=3"], {"max_model_len": 512, "max_num_seqs": 3}),
        (["--tp", "2", "--page-size", "32"], {"tensor_parallel_size": 2, "block_size": 32}),
        (["-t", "3", "-np", "2"], {"threads": 3, "max_num_seqs": 2}),
        (["-n", "-1", "--temp", "0.5"], {"max_tokens": None, "temperature": 0.5}),
        (["--predict=-2"], {"max_tokens": None}),
        (["-n", "7", "-m", "folder"], {"max_tokens": 7, "model": "folder"}),
    ],
)
def test_flags_of_other_engines_that_mean_the_same_are_taken(flags: list[str], expected: dict[str, Any]) -> None:
    args = parse("demo", *flags, "--", "-c", "0")
    assert {name: value for name, value in vars(args).items() if name in expected} == expected
    assert args.words == ["demo", "-c", "0"], "what stands behind -- is no flag"


def test_in_python_options_of_other_engines_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'n_ctx'; llama.cpp's n_ctx is max_model_len here"):
        EngineConfig.from_options({"model": "demo", "n_ctx": 4096})
    with pytest.raises(ConfigError, match=r"llama.cpp's flash_attn: leave it out"):
        EngineConfig.from_options({"model": "demo", "flash_attn": True})


def bench_serve_parser() -> CommandParser:
    from quire.cli import bench_serve

    parser = CommandParser("quire bench serve", "")
    bench_serve.add_arguments(parser)
    return parser


def test_flags_of_vllms_benchmark_are_taken_or_explained(capsys: pytest.CaptureFixture[str]) -> None:
    parser = bench_serve_parser()
    flags = ["--base-url", "http://a", "--num-prompts=20", "--request-rate", "inf", "--random-input-len", "10"]
    args = parser.parse([*flags, "--max-concurrency", "3"])
    assert (args.url, args.num_requests, args.rate, args.input_len) == ("http://a", 20, "inf", "10")
    assert args.concurrency == 3
    assert main(["bench", "serve", "--port", "8000"]) == 2
    assert "vLLM's --port is --url here: the server's whole URL" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", "http://a", "--dataset-name", "random"]) == 2
    assert "vLLM's --dataset-name is --workload here: random, shared-prefix" in capsys.readouterr().err
    assert main(["serve", "demo", "--request-rate", "3"]) == 2
    assert "vLLM" not in capsys.readouterr().err


def test_what_other_options_are_answered_with_is_there() -> None:
    from quire.cli.completion import options_of_commands

    flags = {flag for options in options_of_commands().values() for flag in options}
    flags |= {*bench_serve_parser()._option_string_actions}
    for name, option in OTHER_OPTIONS.items():
        assert option.ours is None or "--" + option.ours.replace("_", "-") in flags, name
        assert option.ours is not None or option.why is not None, name


def test_commands_of_other_engines_are_taken_or_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("quire.cli.chat.run", lambda args: asked.extend(args.words) or 0)
    assert main(["run", "demo"]) == 0 and asked == ["demo"]
    monkeypatch.undo()
    assert main(["run", "demo", "a prompt"]) == 2
    assert "for a single answer use 'quire generate demo --chat PROMPT'" in capsys.readouterr().err
    assert main(["pull", "org/name"]) == 2
    assert "models are downloaded when first used" in capsys.readouterr().err


def test_a_variable_that_is_no_option_is_named_with_the_nearest() -> None:
    environment = {
        "QUIRE_MAX_MODEL_LENGTH": "5",
        "QUIRE_XYZZY": "1",
        "QUIRE_MAX_MODEL_LEN": "5",
        "QUIRE_KERNELS": "native",
        "QUIRE_SERVICE_HOST": "10.0.0.1",
        "QUIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PATH": "",
    }
    first, second = unknown_variables(option_names(), environment)
    assert "QUIRE_MAX_MODEL_LENGTH is no option, and is ignored; did you mean QUIRE_MAX_MODEL_LEN?" in first
    assert "QUIRE_XYZZY is no option, and is ignored; 'quire serve --help-all' lists" in second


def test_a_missing_package_is_one_line_that_names_it():
    code = "import sys; sys.modules['zmq'] = None; from quire.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "serve", "demo"], capture_output=True, text=True, timeout=60)
    wanted = "quire: error: a package is missing: zmq; 'pip install .' in a checkout installs all\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", wanted)

"""The command line: options made from config.py, config files, and errors that help."""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys

import msgspec
import pytest
from command import run

from kvrelay.cli import doctor, serve
from kvrelay.cli import main as cli
from kvrelay.config import (
    ClusterOptions,
    EngineOptions,
    Environment,
    ModelOptions,
    Options,
    RouterOptions,
    TransferOptions,
    WorkerOptions,
)
from kvrelay.errors import ConfigError
from kvrelay.launch.cluster import WorkerSettings, worker_roles
from kvrelay.launch.console import PlainProgress, console_progress
from kvrelay.options import Parser, RoleOptions, add_options, check_roles, collect, flag_of, given, to_flags
from kvrelay.states import Role

GROUPS: list[type[Options]] = [ModelOptions, EngineOptions, RouterOptions, ClusterOptions]


def parse(
    *argv: str, config: pathlib.Path | None = None, groups: list[type[Options]] | None = None
) -> dict[type[Options], Options]:
    parser = Parser(prog="kvrelay test")
    add_options(parser, groups or GROUPS)
    return collect(parser.parse_strictly(argv), groups or GROUPS, config)


def engine(*argv: str, config: pathlib.Path | None = None) -> EngineOptions:
    options = parse(*argv, config=config)[EngineOptions]
    assert isinstance(options, EngineOptions)
    return options


def test_without_flags_every_option_has_its_default() -> None:
    assert parse() == {group: group() for group in GROUPS}


def test_every_field_of_every_group_is_a_flag_with_help() -> None:
    parser = Parser(prog="kvrelay test")
    add_options(parser, [*GROUPS, WorkerOptions])
    text = parser.format_help()
    for group in [*GROUPS, WorkerOptions]:
        for field in group.__struct_fields__:
            assert f"--{field.replace('_', '-')}" in text
    assert "default 64" in text
    assert "default on" in text


@pytest.mark.parametrize("group", [*GROUPS, WorkerOptions], ids=lambda group: group.__name__)
def test_options_survive_the_way_through_flags(group: type[Options]) -> None:
    changed: dict[str, object] = {}
    for field in msgspec.structs.fields(group):
        default = field.default
        if isinstance(default, bool):
            changed[field.name] = not default
        elif isinstance(default, int):
            changed[field.name] = default + 1
        elif isinstance(default, float):
            changed[field.name] = default / 2
    if "model" in group.__struct_fields__:
        changed["model"] = "-odd = name"
    options = group(**changed)
    assert parse(*to_flags(options), groups=[group])[group] == options


def test_bool_options_have_both_spellings() -> None:
    assert engine("--no-prefix-cache").prefix_cache is False
    assert engine("--prefix-cache").prefix_cache is True


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--max-modle-len", "5"], "unknown option --max-modle-len; did you mean --max-model-len?"),
        (["--kv-block=5"], "unknown option --kv-block; did you mean --kv-blocks?"),
        (["-p", "80"], "unknown option -p; did you mean --port?"),
        (["-p80"], "unknown option -p; did you mean --port?"),
        (["-port=80"], "unknown option -port; did you mean --port?"),
        (["-x"], "unknown option -x (see"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key="], "--api-key is empty"),
        (["--api-key-file", ""], "--api-key-file is empty"),
        (["--max-batch=-1"], "--max-batch -1: expected int >= 0"),
        (["--max-batch", "many"], "--max-batch many: expected int"),
        (["--max-batch"], "--max-batch: expected one argument"),
        (["--port", "70000"], "--port 70000: expected int <= 65535"),
        (["--gpu-memory", "1.5"], "--gpu-memory 1.5: expected float <= 1.0"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu' (choose from 'cpu', 'cuda')"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_what_cannot_work_is_named(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert complaint in str(error.value)


def test_a_config_file_sets_options_and_flags_win(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max_batch: 7\nmax-queue: 9\nprefix_cache: false\nport: 0\n")
    options = engine("--max-batch", "8", config=file)
    assert (options.max_batch, options.max_queue, options.prefix_cache) == (8, 9, False)


def per_role(*argv: str, config: pathlib.Path | None = None) -> dict[Role, RoleOptions]:
    """What `kvrelay serve` would tell the workers of each role."""
    namespace = serve.build_parser().parse_strictly(argv)
    said = given(namespace, serve.GROUPS, config, serve.PER_ROLE)
    options = serve.options_per_role(said, worker_roles(said.value(ClusterOptions)))
    check_roles(options)
    return options


@pytest.mark.parametrize("group", serve.PER_ROLE, ids=lambda group: group.__name__)
def test_every_option_of_model_and_engine_is_a_flag_of_each_role(group: type[Options]) -> None:
    known = serve.build_parser().options()
    assert {flag_of(name, role) for name in group.__struct_fields__ for role in Role} <= set(known)


def test_an_option_of_a_role_is_for_its_workers_alone() -> None:
    options = per_role("--max-batch", "8", "--decode-max-batch", "16", "--no-prefill-prefix-cache", "--prefill-threads=3")
    prefill, decode = options[Role.PREFILL], options[Role.DECODE]
    assert (prefill.engine.max_batch, decode.engine.max_batch) == (8, 16)
    assert (prefill.engine.prefix_cache, decode.engine.prefix_cache) == (False, True)
    assert (prefill.model.threads, decode.model.threads) == (3, 0)


def test_each_worker_is_started_with_the_options_of_its_role() -> None:
    options = per_role("--decode-max-batch", "16", "--decode-threads", "5")
    settings = WorkerSettings(
        model=ModelOptions(), engine=EngineOptions(), transfer=TransferOptions(), registration_s=4.0, per_role=options
    )
    prefill, decode = settings.commands([Role.PREFILL, Role.DECODE], "tcp://127.0.0.1:1")
    assert {"--max-batch=16", "--threads=5", "--role=decode"} <= set(decode)
    assert {"--max-batch=0", "--role=prefill"} <= set(prefill)


def test_a_config_file_has_a_block_per_role_and_a_role_wins_over_all(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max_batch: 7\nprefill: 2\ndecode:\n  workers: 1\n  max-batch: 9\nprefill_max_queue: 3\n")
    options = per_role("--max-batch", "8", config=file)
    prefill, decode = options[Role.PREFILL].engine, options[Role.DECODE].engine
    assert (prefill.max_batch, decode.max_batch) == (8, 9)
    assert (prefill.max_queue, decode.max_queue) == (3, 512)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--whole", "1", "--prefill-threads", "2"], "--prefill-threads: no prefill worker is started here"),
        (["--encode-threads", "2"], "--encode-threads: no encode worker is started here"),
        (["--decode-max-batch", "-1"], "--decode-max-batch -1: expected int >= 0"),
        (["--prefill-dtype", "bfloat16"], "--dtype: bfloat16 for prefill, auto for decode"),
        (["--decode-load", "dummy"], "--load: auto for prefill, dummy for decode"),
        (
            ["--decode-device", "cuda"],
            "--device: cpu for prefill, cuda for decode: one command starts both on",
        ),
        (["--decode-weights", "int8"], "--weights: auto for prefill, int8 for decode"),
        (["--prefill-kv-dtype", "fp8"], "--kv-dtype: fp8 for prefill, auto for decode"),
        (["--decode-engine", "vllm"], "--engine: kvrelay for prefill, vllm for decode"),
        (["--prefill-model", "/x"], "--prefill-model /x: the router and all workers serve one model, and --model is smollm2"),
        (["--whole", "1", "--whole-model", "/x"], "--whole-model /x: the router"),
        (["--model", "/y", "--prefill-model", "/x", "--decode-model", "/x"], "--prefill-model /x: the router and all workers"),
        (["--encode", "1", "--encode-tp", "2"], "--encode-tp: encode workers are not split"),
        (["--prefill-thread", "2"], "unknown option --prefill-thread; did you mean --prefill-threads?"),
    ],
)
def test_options_of_roles_that_cannot_work_are_refused(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        per_role(*argv)
    assert complaint in str(error.value)


def test_roles_that_agree_need_not_be_told_what_all_are_told() -> None:
    flags = [f"--{role}-{said}" for role in ("prefill", "decode") for said in ("model=/x", "dtype=bfloat16", "weights=float32")]
    models = [options.model for options in per_role("--model", "/x", *flags).values()]
    assert [(model.model, model.dtype, model.weights) for model in models] == [("/x", "bfloat16", "float32")] * 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("decode: {max_batch: 1}\ndecode_max_batch: 2", "decode_max_batch is given twice"),
        ("decode: {max_bach: 1}", "unknown option 'decode: max_bach'; did you mean decode_max_batch?"),
        ("decode: {port: 1}", "unknown option 'decode: port'"),
    ],
)
def test_a_block_that_cannot_work_is_refused(tmp_path: pathlib.Path, text: str, complaint: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        per_role(config=file)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_bach: 7", "unknown option 'max_bach'; did you mean max_batch?"),
        ("max_batch: -1", "--max-batch -1: expected int >= 0"),
        ("max_batch: [1]", "--max-batch [1]: expected int, got array"),
        ("- max_batch", "`name: value` lines"),
        ("max_batch: 1\nmax-batch: 2", "max_batch is given twice"),
        ("a: [", "not YAML"),
    ],
)
def test_a_config_file_that_cannot_work_is_refused(tmp_path: pathlib.Path, text: str, complaint: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        engine(config=file)
    assert complaint in str(error.value)


def test_a_config_file_that_is_not_there_is_one_line() -> None:
    result = run("serve", "--config", "/does/not/exist.yaml")
    assert result.returncode == 2
    assert result.stderr == "error: cannot read --config /does/not/exist.yaml: No such file or directory\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serv"], "error: unknown command 'serv'; did you mean serve? (see kvrelay --help)"),
        (["serve", "--prt", "1"], "error: unknown option --prt; did you mean --port? (see kvrelay serve --help)"),
        (["serve", "a", "--model", "b"], "error: the model is given twice: as MODEL and with --model"),
        (
            ["serve", "/x", "--prefill-model", "/y"],
            "error: --prefill-model /y: the router and all workers serve one model, and --model is /x",
        ),
        (["serve", "--lora", "smollm2=/x"], "error: --lora smollm2=...: that is a name of the model itself"),
        (["serve", "--decode-lora", "smollm2=/x"], "error: --decode-lora smollm2=...: that is a name of the model itself"),
        (["serve", "--decode-lora", "/x"], "error: --decode-lora /x: must be NAME=PATH"),
        (["serve", "--prefill", "1"], "error: --prefill needs --decode: decode workers take over what prefill workers compute"),
        (["router", "--registry", "etcd://x:1", "--port", "0", "/"], None),
        (["chat", "--url", "http://127.0.0.1:9"], None),
    ],
)
def test_user_errors_are_one_line_and_status_2(argv: list[str], line: str | None) -> None:
    result = run(*argv)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert line is None or result.stderr.rstrip() == line


@pytest.mark.parametrize("command", ["serve", "router", "worker", "chat", "doctor", "version"])
def test_each_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: kvrelay {command}")


def test_help_lists_the_commands_and_loads_nothing_heavy() -> None:
    heavy = {"torch", "zmq", "starlette", "numpy", "rich"}
    script = f"import sys; from kvrelay.cli.main import main; main(['--help']); print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(command in result.stdout for command in cli.COMMANDS)
    assert result.stdout.rstrip().endswith("[]")


def test_version_is_one_line() -> None:
    command = [sys.executable, "-m", "kvrelay", "version"]  # as a user runs it
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("kvrelay ")
    assert result.stdout.count("\n") == 1


def test_worker_counts() -> None:
    assert worker_roles(ClusterOptions()) == [Role.PREFILL, Role.DECODE]
    assert worker_roles(ClusterOptions(whole=3)) == [Role.WHOLE] * 3
    assert worker_roles(ClusterOptions(prefill=1, decode=2)) == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert worker_roles(ClusterOptions(decode=1)) == [Role.DECODE]
    assert worker_roles(ClusterOptions(encode=1, whole=1)) == [Role.ENCODE, Role.WHOLE]
    assert worker_roles(ClusterOptions(encode=2)) == [Role.ENCODE, Role.ENCODE, Role.PREFILL, Role.DECODE]
    assert worker_roles(ClusterOptions(registry="static:tcp://127.0.0.1:1")) == []
    for counts, says in (
        ({"encode": 1, "registry": "static:tcp://127.0.0.1:1"}, "need --registry"),
        ({"prefill": 1}, "--prefill needs --decode"),
        ({"whole": 1, "decode": 1}, "--whole cannot be mixed"),
        ({"whole": 1, "registry": "static:tcp://127.0.0.1:1"}, "need --registry"),
    ):
        with pytest.raises(ConfigError, match=says):
            worker_roles(ClusterOptions(**counts))  # type: ignore[arg-type]


def test_the_doctor_finds_a_port_in_use_and_a_missing_model(tmp_path: pathlib.Path) -> None:
    import socket

    environment = Environment(cache_dir=tmp_path / "none", log_level="info", offline=True, native_kernels=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        findings = doctor.examine(environment, taken.getsockname()[1])
    assert findings["port"].grade is doctor.Grade.WARN
    assert findings["default model"].grade is doctor.Grade.FAIL
    assert findings["compiler"].grade is doctor.Grade.WARN
    assert findings["python"].grade is findings["libraries"].grade is findings["encryption"].grade is doctor.Grade.OK
    assert all(finding.remedy for finding in findings.values() if finding.grade is not doctor.Grade.OK)


def test_the_doctor_says_in_its_status_whether_anything_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    monkeypatch.setenv("KVRELAY_OFFLINE", "1")
    assert cli.main(["doctor"]) == 1
    monkeypatch.setenv("KVRELAY_OFFLINE", "0")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert cli.main(["doctor"]) == 0


def test_progress_without_a_terminal_is_lines() -> None:
    stream = io.StringIO()
    progress = console_progress(stream=stream)
    progress.start("loading weights", 10, unit="tensors")
    progress.advance(10)
    progress.done()
    progress.done()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading weights: ..."
    assert lines[1].startswith("loading weights: done in ")
    assert len(lines) == 2


def test_plain_progress_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.launch.console._LINE_EVERY_S", 0.0)
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start("fetching", 4_000_000, unit="bytes")
    progress.advance(1_000_000)
    assert "1.0 MB (25 %)" in stream.getvalue()

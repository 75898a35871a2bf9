"""`kvrelay completion`: what each shell makes of its script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvrelay.bench.main import SCENARIOS
from kvrelay.cli import main as cli
from kvrelay.cli.completion import SHELLS, script_for


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    made = {shell: folder / shell for shell in SHELLS}
    for shell, path in made.items():
        path.write_text(script_for(shell))
    return made


def completed(script: Path, *words: str) -> set[str]:
    """By bash, of the last word."""
    drive = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvrelay; printf "%s\\n" "${{COMPREPLY[@]}}"'
    command = ["bash", "--norc", "-c", drive, "bash", "kvrelay", *words]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parent).stdout.split())


def test_bash_completes_commands_options_values_and_files(scripts: dict[str, Path]) -> None:
    bash = scripts["bash"]
    assert completed(bash, "") == set(cli.COMMANDS)
    assert completed(bash, "se") == {"serve"}
    assert completed(bash, "serve", "--rout") == {"--routers"}
    assert completed(bash, "serve", "--device", "") == {"cpu", "cuda"}
    assert completed(bash, "worker", "--role", "d") == {"decode"}
    assert completed(bash, "serve", "--no-kv") == {"--no-kv-events"}
    assert completed(bash, "worker", "--port") == set()  # an option of routers
    assert completed(bash, "serve", "ba") == {"bash"}  # a file
    assert completed(bash, "completion", "--h") == {"--help"}
    assert completed(bash, "bench", "") == {*SCENARIOS, "compare"}
    assert completed(bash, "bench", "router", "--str") == {"--streams"}


def test_every_command_and_option_is_in_every_script(scripts: dict[str, Path]) -> None:
    for shell, path in scripts.items():
        text = path.read_text()
        assert all(name in text for name in cli.COMMANDS), shell
        assert ("-l shutdown-wait-s" if shell == "fish" else "--shutdown-wait-s") in text
        assert "--launcher-fd" not in text  # not for users
        assert "-l launcher-fd" not in text


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_its_script(scripts: dict[str, Path], shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    result = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_another_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err

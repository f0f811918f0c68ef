"""What docs/linear-models.md says runs as it stands."""

import re
from pathlib import Path

import pytest

from gtrace.cli import gtrace, main
from gtrace_experiments.linear import TASKS
from gtrace_experiments.linear_command import LINEAR_TASKS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "linear-models.md").read_text()


def test_python_of_the_page_runs(capsys):
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "linear-models.md", "exec"), {})
    runs = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert runs == ["none", "naive:bits=5", "double:bits=5"]


@pytest.mark.parametrize("line", re.findall(r"^\$ gtrace (.+)$", PAGE, re.MULTILINE))
def test_commands_of_the_page_run(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*line.split(), "--data", "synthetic-10x100", "--epochs", "2"])
    assert ended.value.code == 0


def test_every_task_and_option_is_explained():
    assert all(f"| `{name}` |" in PAGE for name in TASKS)
    assert set(LINEAR_TASKS) == set(TASKS)
    explained = {"--data", "--quantize", "--bits", "--sampling", "--levels", "--chebyshev", "--refetch", "--prox"}
    options = {option.opts[0]: option for option in gtrace.get_command(None, "linear").params}
    assert explained <= set(options)
    for option in options.values():
        if option.opts[0] in explained:
            assert f"`{option.opts[0]}" in PAGE, option.name

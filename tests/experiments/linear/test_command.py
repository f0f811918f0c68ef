"""``gtrace linear`` from the outside, and what docs/linear-models.md says, which runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gtrace.cli import main
from gtrace.runlog import read_runlog
from gtrace_experiments.linear import Training

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "linear-models.md").read_text()
SMALL = "--data synthetic-10x200 --epochs 4"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def linear(capsys):
    """Run ``gtrace linear --task`` with a line of words: exit code, stdout, stderr."""

    def run(line, start="linear --task "):
        with pytest.raises(SystemExit) as ended:
            main(f"{start}{line}".split())
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_table_a_log_and_the_next_command(folder, linear):
    code, out, err = linear(f"linear --quantize samples --bits 5 --sampling double {SMALL}")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["precision", "loss", "above", "optimum", "test", "loss", "bits", "smaller"]
    assert re.match(r"none +\d\.\d{4} .* 32/32/32 +1\.0x", lines[1])
    assert re.match(r"double:bits=5 +\d\.\d{4} .* 6/32/32 +1\.4x", lines[2])
    assert "linear on synthetic-10x200: 200 samples of 10 features, 4 epochs, batches of 1, step 0.04" in out
    assert lines[-2:] == ["linear-double-bits5.jsonl", "next: gtrace report linear-double-bits5.jsonl"]
    assert max(map(len, lines[:3])) <= 80
    assert [path.name for path in folder.iterdir()] == ["linear-double-bits5.jsonl"]


@pytest.mark.parametrize(
    "options",
    [
        "--quantize samples,model,gradients --bits 6 --sampling symmetrized --prox l1=0.01",
        "--codec qsgd:bits=4 --quantize samples --bits 5 --batch-size 16 --seeds 2",
        "--compare alq:bits=3,double:bits=3,levels=optimal --lr 0.03 --seed 5 --refit 0,+50",
    ],
)
def test_the_command_in_the_log_repeats_the_run(folder, linear, options):
    assert linear(f"linear {SMALL} {options} -o a.jsonl")[0] == 0
    command = read_runlog(folder / "a.jsonl")[0]["command"]
    assert command.startswith("gtrace linear ")
    assert linear(f"{command} -o b.jsonl".removeprefix("gtrace "), start="")[0] == 0
    first, second = (
        re.sub(r'("\w*seconds": )[0-9.e-]+', r"\1-", (folder / name).read_text()) for name in ("a.jsonl", "b.jsonl")
    )
    assert first == second
    assert ("--refit" in command) == ("--refit" in options or "--codec" in options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("linera", "'linera' is not one of 'linear', 'lssvm', 'logistic', 'svm'"),
        ("linear --steps 9", "No such option '--steps'"),
        ("linear --levels common", "'common' is not one of 'uniform', 'optimal'"),
        ("linear --compare naive --sampling double", "leave out --sampling"),
        ("linear --quantize model --sampling double", "add them to --quantize"),
    ],
)
def test_what_does_not_fit_is_said(options, said, linear):
    code, _, err = linear(options)
    assert code == 2
    assert said in err


def test_an_interrupted_run_shows_what_was_done(folder, linear, monkeypatch):
    done, whole = [], Training.epoch

    def epoch(self):
        done.append(self)
        if len(done) == 4:
            raise KeyboardInterrupt
        return whole(self)

    monkeypatch.setattr(Training, "epoch", epoch)
    code, out, _ = linear(f"linear {SMALL}")
    assert code == 130
    assert "interrupted after 1 of 4 epochs" in out
    kinds = [record["type"] for record in read_runlog(folder / "linear-double-bits5.jsonl")]
    assert kinds == ["study"] + ["step", "eval"] * 3


def test_linear_models_need_no_torch():
    code = "import sys, gtrace_experiments.linear.study; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_python_of_the_page_runs(capsys):
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "linear-models.md", "exec"), {})
    runs = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert runs == ["none", "naive:bits=5", "double:bits=5"]


@pytest.mark.parametrize("line", re.findall(r"^\$ gtrace (.+)$", PAGE, re.MULTILINE))
def test_commands_of_the_page_run(line, linear):
    assert linear(f"{line} --data synthetic-10x100 --epochs 2", start="")[0] == 0

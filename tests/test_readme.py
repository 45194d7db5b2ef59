"""The README promises nothing that the project does not have."""
from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

from conftest import ROOT, TINY
from train_gpt import Config

README = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text())


def test_last_lines_are_a_real_runs():
    logs = [path.read_text().splitlines() for path in ROOT.glob("records/*/*/*/*.txt")]
    final, target = (re.search(rf"^    ({word} .*)$", README, re.MULTILINE)[1] for word in ("final", "target"))
    assert any(final in log and target in log for log in logs)


def test_flags_and_files_exist():
    for command in re.findall(r"^    (?:\./run\.sh|python train_gpt\.py) (--.*?)(?:   |$)", README, re.MULTILINE):
        for flag in re.findall(r"--(\w+)", command):
            assert flag == "help" or flag in {f.name for f in dataclasses.fields(Config)}, flag
    for path in re.findall(r"\w+(?:/\w+)*\.(?:py|sh)\b", README):
        assert (ROOT / path).exists(), path


def test_the_benchmark_of_a_step_runs(tiny_data):
    """Its times are nobody's test; that it still fits the trainer is."""
    command = [sys.executable, ROOT / "tests/bench_step.py", "--rounds=1", *TINY, f"--data={tiny_data}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Muon and Adam +\S+ ms +\S+% of the step", done.stdout) and "of its own products' speed" in done.stdout

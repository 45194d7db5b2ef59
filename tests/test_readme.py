"""The README promises nothing that the project does not have."""
from __future__ import annotations

import dataclasses
import re

from conftest import ROOT
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

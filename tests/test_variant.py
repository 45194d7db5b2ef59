"""A variant of the trainer, as records/README.md says how to write one: a script of its own that trains, is kept with
its log, and resumes; its checkpoints and the trainer's are never mistaken for each other."""
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

import train_gpt
from conftest import ROOT, TINY

VARIANT = f'''
"""What is read of the table is scaled."""
import sys
from dataclasses import dataclass
sys.path.insert(0, {str(ROOT)!r})
import train_gpt

@dataclass(frozen=True)
class ScaledConfig(train_gpt.Config):
    read_scale: float = train_gpt.flag(0.5, "what a read is multiplied by")

class ScaledTable(train_gpt.NgramTable):
    def read(self, fetched, reads, signs):
        return super().read(fetched, reads, signs).mul_(self.config.read_scale)

    def add_grad(self, grads, slots, signs, read_grad, fresh):
        super().add_grad(grads, slots, signs, read_grad * self.config.read_scale, fresh)

if __name__ == "__main__":
    train_gpt.run_command(train_gpt.main, config_class=ScaledConfig, table_class=ScaledTable)
'''


def test_a_variant_trains_is_kept_resumes_and_is_not_mistaken_for_the_trainer(tiny_data, tmp_path, capsys):
    script, out = tmp_path / "scaled.py", tmp_path / "logs"
    script.write_text(VARIANT)
    flags = [*TINY, f"--data={tiny_data}", "--steps=10", "--ngram_update_every=2", "--checkpoint_keep=4",
             f"--out={out}"]
    done = subprocess.run([sys.executable, script, *flags, "--read-scale=3", "--run_id=scaled", "--checkpoint_every=6"],
                          capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    header, log = (out / "scaled.txt").read_text().split("\n", 1)
    header = json.loads(header.removeprefix("run:"))
    assert header["config"]["read_scale"] == 3 and header["sources"].keys() == {"scaled.py", "train_gpt.py"}
    for source in (script, ROOT / "train_gpt.py"):
        digest = header["sources"][source.name]
        assert digest == hashlib.sha256(source.read_bytes()).hexdigest()
        assert (out / f"{source.stem}_{digest[:16]}.py").read_bytes() == source.read_bytes()

    spec = importlib.util.spec_from_file_location("scaled", script)
    scaled = sys.modules["scaled"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scaled)
    classes = dict(config_class=scaled.ScaledConfig, table_class=scaled.ScaledTable)
    losses = [float(loss) for loss in re.findall(r"^step:\S+ val_loss:(\S+)", log, re.MULTILINE)]
    checkpoint = out / "checkpoints" / "scaled_step000006"
    resumed = train_gpt.main([f"--resume={checkpoint}", "--run_id=resumed"], **classes)  # with the run's --read-scale
    assert float(f"{resumed:.5f}") == losses[-1] < losses[0] - 0.3
    with pytest.raises(train_gpt.UserError, match="contradict the checkpoint: --read_scale=2.0 "):
        train_gpt.main([f"--resume={checkpoint}", "--read_scale=2"], **classes)

    plain = train_gpt.main([*flags, "--run_id=plain", "--checkpoint_every=6"])
    theirs = out / "checkpoints" / "plain_step000006"
    assert plain != train_gpt.main([*flags], **classes)
    for resume, options in ((checkpoint, {}), (theirs, classes)):
        with pytest.raises(train_gpt.UserError, match="disagrees on the fields read_scale, expected"):
            train_gpt.main([f"--resume={resume}"], **options)
    ours, its = "train_gpt.py: NgramTable", "scaled.py: ScaledTable"
    for resume, options, found, expected in ((checkpoint, {"config_class": scaled.ScaledConfig}, its, ours),
                                             (theirs, {"table_class": scaled.ScaledTable}, ours, its)):
        with pytest.raises(train_gpt.UserError, match=f"checkpoint of .*{found}, expected one of .*{expected}; "):
            train_gpt.main([f"--resume={resume}"], **options)
    with pytest.raises(SystemExit):
        train_gpt.main(["--help"], **classes)
    shown = r"\nvariant:\n  --read-scale FLOAT +what a read is multiplied by \(default 0.5\)"
    assert re.search(shown, capsys.readouterr().out)

"""What starts a run: the import, the flags, the device and the launch."""
from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt
from conftest import ROOT, run_trainer
from staged import Staged
from train_gpt import Config, UserError, find_device, parse_args


def test_import_has_no_effect(tmp_path):
    """No file written, no socket, no process, no device, no process group, no change of torch's settings."""
    script = f"""
import sys
import numpy, torch, torch.distributed as dist
def settings():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled())
before = settings()
events = []
def watch(name, arguments):
    writes = name == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    writes = writes and "__pycache__" not in str(arguments[0])
    if writes or name.startswith(("socket.", "subprocess.", "os.mkdir", "urllib.")):
        events.append((name, arguments))
sys.addaudithook(watch)
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
assert not events, events
assert not dist.is_initialized() and not torch.cuda.is_initialized()
assert before == settings()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


# ---- flags ----------------------------------------------------------------------------------------------------------

def help_of(capsys, config_class=Config) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"], config_class)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_shows_examples_and_every_flag_in_its_group(capsys):
    text = help_of(capsys)
    examples = text[text.index("examples:"):text.index("options:")].strip().splitlines()[1:]
    assert [re.split(" {3,}| *;", line.strip())[0] for line in examples] == [
        "python train_gpt.py", "torchrun --standalone --nproc_per_node=8 train_gpt.py",
        "python train_gpt.py --ngram_rows=0 --seed=3 --dry_run"]
    assert isinstance(parse_args(["--device=cpu", "--ngram_rows=0", "--seed=3", "--dry_run"]), Config)
    groups = re.split(r"^([\w-][\w -]*):$", text[text.index("options:"):], flags=re.MULTILINE)[1:]
    found = {title: set(re.findall(r"^  --([\w-]+)", part, re.MULTILINE)) for title,
             part in zip(groups[::2], groups[1::2])}
    assert list(found) == ["options", "run", "checkpoints", "data", "evaluation", "model", "n-gram table", "optimizer"]
    assert {"resume", "checkpoint-every"} <= found["checkpoints"] and {"steps", "muon-lr"} <= found["optimizer"]
    assert all(name.startswith("ngram-") for name in found["n-gram table"])
    flags = [f for f in dataclasses.fields(Config) if f.metadata]
    assert {name.replace("-", "_") for names in found.values() for name in names} == {f.name for f in flags}
    for f in flags:
        assert " ".join(f.metadata["help"].split()) in " ".join(text.split())
    assert len(flags) <= 45


def test_a_variants_own_flags_have_a_group(capsys):
    @dataclasses.dataclass(frozen=True)
    class Variant(Staged):
        skips: bool = train_gpt.flag(True, "with skips")
        heat: float = train_gpt.flag(0.5, "how hot, in %")

    text = help_of(capsys, Variant)
    assert "how hot, in % (default 0.5)" in text[text.index("\nvariant:\n"):]
    config = parse_args(["--device=cpu", "--heat=0.7", "--no_skips"], Variant)
    assert (config.heat, config.skips, config.stages) == (0.7, False, Staged.stages)
    with pytest.raises(UserError, match="--skips: found no such flag"):
        parse_args(["--device=cpu", "--skips"])


@pytest.mark.parametrize("arguments, field, value", [
    (["--ngram_rows=5000"], "ngram_rows", 5000), (["--ngram-rows=5000"], "ngram_rows", 5000),
    (["--ngram-rows", "5000"], "ngram_rows", 5000),
    (["--compile"], "compile", True), (["--compile", "--no_compile"], "compile", False),
    (["--no-compile"], "compile", False),
    (["--ngram_orders=2,3,4"], "ngram_orders", (2, 3, 4)), (["--ngram_split=1,3"], "ngram_split", (1, 3)),
    (["--run_id=a-b"], "run_id", "a-b"), (["--track=fineweb"], "model_dim", 768),
    (["--track=fineweb", "--steps=9"], "steps", 9),
    (["--track=fineweb", "--layers=10"], "value_embeds", (0, 1, 2, 9)), (["--layers=2"], "value_embeds", (0,)),
    (["--layers=2", "--value_embeds=1"], "value_embeds", (1,)), ([], "track", "cpu"), ([], "device", "cpu"),
])
def test_flags(arguments, field, value):
    assert getattr(parse_args(["--device=cpu", *arguments]), field) == value


@pytest.mark.parametrize("arguments, message", [
    (["--layer=3"], "--layer=3: found no such flag; did you mean --layers[?]"),
    (["--zzz=1"], "--zzz=1: found no such flag; --help"),
    (["--checkpont-every=3"], "--checkpont-every=3: .* did you mean --checkpoint-every[?]"),
    (["rows"], "rows: found no such flag"),
    (["--ngram_orders=2,x"], "--ngram-orders: found '2,x', expected whole numbers with commas between"),
    (["--layers=two"], "--layers.*two"), (["--layers=0"], "--layers: found 0, expected a finite number, 1 or more"),
    (["--batch_tokens=1000"], "--batch_tokens"), (["--heads=3"], "--heads"), (["--compile=maybe"], "--compile"),
    (["--device=tpu"], "--device"), (["--adam_lr=nan"], "--adam_lr"), (["--seed=-1"], "--seed"),
    (["--run_id=a/b"], "--run_id"),
    (["--ngram_beta2=1"], "--ngram_beta2"), (["--ngram_orders=2,9"], "--ngram_orders"),
    (["--ngram_dim=999"], "--ngram_dim"),
    (["--ngram_split=1"], "--ngram_split"), (["--track=moon"], "--track"), (["--ngram_rows=3"], "--ngram_rows"),
    (["--val_tokens=100"], "--val_tokens"),
    (["--layers=2", "--value_embeds=0,2"], "--value_embeds: .* blocks from 0 to 1"),
    (["--ranks=2"], "--ranks: found 2, expected --dry_run beside it"),
    (["--gpu=H100"], "--gpu: .* --dry_run beside it"),
    (["--gpu=cheap", "--dry_run"], "--gpu: found 'cheap', expected one of H200"),
    (["--new_rates"], "--new_rates: .* --resume"),
    (["--dtype=half"], "--dtype: found 'half', expected one of bfloat16, float32"),
    (["--ngram_device=disk"], "--ngram_device: found 'disk', expected one of auto, cpu"),
])
def test_bad_flags_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        parse_args(["--device=cpu", *arguments])


@pytest.mark.parametrize("stages, message", [
    ((dict(until=0.5),), "the last one to end at 1"), ((dict(until=0.8), dict(until=0.5), {}), "in the order of time"),
    ((dict(batch=2.0),), "batches from one row"), ((dict(windows=(16, 8)),), "windows"),
    ((dict(length=129),), "segments"),
])
def test_stages_that_cannot_be_are_named(stages, message):
    with pytest.raises(UserError, match=f"--stages: .*{message}"):
        Config(stages=stages)


def test_a_bad_flag_ends_all_ranks_with_one_line():
    line = "error: --layer=3: found no such flag; did you mean --layers? --help lists all"
    several, one = run_trainer("--layer=3", ranks=2), run_trainer("--layer=3")
    assert several.returncode == one.returncode == 1
    assert one.stderr.strip() == line and several.stderr.splitlines().count(line) == 1


@pytest.mark.parametrize("track", train_gpt.TRACKS)
def test_presets_are_valid(track):
    assert parse_args(["--device=cpu", f"--track={track}"]).track == track


def test_dtype_goes_by_the_device():
    units = {name for name, has in torch.cpu.get_capabilities().items() if has is True} & {"amx_bf16", "avx512_bf16"}
    assert parse_args(["--device=cpu", "--track=cpu"]).dtype == ("bfloat16" if units else "float32")
    assert parse_args(["--device=cuda"]).dtype == "bfloat16"


# ---- device and launch ----------------------------------------------------------------------------------------------

def test_a_gpu_that_torch_does_not_see_is_no_reason_to_train_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / "nvidia0"] if "nvidia" in pattern else [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match="--device=auto: found an NVIDIA GPU in /dev that torch .* --device=cpu"):
        parse_args([])
    assert parse_args(["--device=cpu"]).device == "cpu"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert find_device() == "cpu"


@pytest.mark.parametrize("environment", [
    dict(WORLD_SIZE="2"), dict(RANK="0"),
    dict(RANK="x", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_PORT="1")])
def test_half_a_launch_is_refused_at_once(environment, monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError,
                       match="environment: found RANK=.*`torchrun --standalone --nproc_per_node=N train_gpt.py`"):
        train_gpt.main(["--device=cpu", f"--out={tmp_path}"])

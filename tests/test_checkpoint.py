"""Checkpoints: what they hold, that a resumed run ends as if it had never stopped, and that a bad one is refused."""
from __future__ import annotations

import base64
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import train_gpt
from conftest import RECIPE, ROOT, TINY, VOCAB, markov_tokens, run_trainer, write_shard
from harness import UserError, manifest_digest, sha256
from tokens import TOKENIZER_FILE, tokenizer_encoding
from train_gpt import GPT, Config, attention_mask, make_batch, ngram_addresses, open_dataset, parse_args, rotary_table, sign_pool

STEPS = 7
SHORT = [*TINY, f"--steps={STEPS}", "--batch_tokens=416", "--val_tokens=512", "--val_every=3", "--log_every=1", "--warmup_steps=0",
         "--sample_tokens=0", "--muon_momentum_steps=5", "--weight_decay=0.1"]
WIDE = ["--ngram_update_every=3", "--ngram_dim=32", "--ngram_dtype=float32", "--ngram_second_moment=element"]
EVERY_STEP = ["--checkpoint_every=1", "--checkpoint_keep=99"]


class Ranks:
    """train_gpt.main on 1 to 4 gloo ranks, in processes that stay warm; torchrun would take seconds a run."""

    def __init__(self, pool):
        self.pool = pool

    def __call__(self, size: int, argv: list, file_limit: int = 0) -> list:
        """Each rank's validation loss, or its error as text. file_limit: bytes of the largest file that the last rank may write."""
        if size == 1 and not file_limit:
            with redirect_stdout(io.StringIO()) as self.screen:
                return [outcome(argv)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        limits = [0] * (size - 1) + [file_limit]
        calls = [self.pool.apply_async(on_rank, (rank, size, port, argv, limits[rank])) for rank in range(size)]
        return [call.get(timeout=60) for call in calls]


def on_rank(rank: int, size: int, port: int, argv: list, file_limit: int) -> float | str:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit or hard, hard))
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the screen may be a file, which the limit would hit
            return outcome(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def outcome(argv: list) -> float | str:
    try:
        return train_gpt.main([str(argument) for argument in argv])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def on():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_gpt"])
    with context.Pool(4) as pool:
        yield Ranks(pool)


class Run:
    """A run's folder, read back: its log (of an evaluation, which has none, the screen) and its checkpoints."""

    def __init__(self, out: Path, outcomes: list, run_id: str, screen: str):
        self.out, self.outcomes, self.run_id, self.folder = out, outcomes, run_id, out / "checkpoints"
        log = out / f"{run_id}.txt"
        self.log = log.read_text() if log.exists() else screen
        self.loss = outcomes[0]

    def checkpoint(self, step: int = STEPS) -> Path:
        return self.folder / f"{self.run_id}_step{step:06d}"

    def losses(self, after: int) -> list[tuple[str, ...]]:
        """Step, kind and value of each loss: training after step `after`, evaluation from there on."""
        found = re.findall(r"^step:(\d+)/\d+ (train|val)_loss:(\S+)", self.log, re.MULTILINE)
        return [entry for entry in found if int(entry[0]) >= after + (entry[1] == "train")]


@pytest.fixture(scope="module")
def go(on, tiny_data, tmp_path_factory):
    """go(*flags, ranks=1, out=None) -> Run; the flags of SHORT unless the run resumes, which inherits them."""
    def go(*flags, ranks: int = 1, out: Path | None = None, run_id: str = "r") -> Run:
        resumes = any(str(flag).startswith("--resume") for flag in flags)
        out = out or tmp_path_factory.mktemp("run")
        outcomes = on(ranks, [*(() if resumes else (*SHORT, f"--data={tiny_data}")), *flags, f"--out={out}", f"--run_id={run_id}"])
        assert all(isinstance(loss, float) for loss in outcomes), outcomes
        return Run(out, outcomes, run_id, on.screen.getvalue() if ranks == 1 else "")
    return go


@pytest.fixture(scope="module")
def alone(go):
    """One rank, a checkpoint at every step, cycles of 3, the table's part soon larger than the model's."""
    return go(*WIDE, *EVERY_STEP)


@pytest.fixture(scope="module")
def pair(go):
    """Two ranks, a checkpoint at every step, cycles of 2."""
    return go("--ngram_update_every=2", *EVERY_STEP, ranks=2)


def manifest_of(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_text())


def sign(path: Path, manifest: dict) -> None:
    """Write a manifest as the trainer would, its checksum in order."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    (path / "manifest.json").write_text(json.dumps(body | {"sha256": manifest_digest(body)}))


def contents(path: Path, by_rank: bool = True) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by name, the table's parts put together; `by_rank` with what depends on the number of ranks."""
    manifest = manifest_of(path)
    files = {name: torch.load(path / name, weights_only=True) for name in sorted(manifest["files"])}
    found = {"counts": torch.tensor([manifest[key] for key in ("step", "updates", "table_updates")])}
    found |= {f"{kind} {name}": tensor for kind, named in files["dense.pt"].items() for name, tensor in named.items()}
    parts = [part for name, part in files.items() if name.startswith("table")]
    found |= {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    if by_rank:
        parts = [(file, part) for file, part in files.items() if file.startswith("rank")]
        found |= {f"{file} {name}": tensor for file, part in parts for name, tensor in part.items()}
    return found


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    found, expected = contents(found), contents(expected)
    assert found.keys() == expected.keys()
    same = {name: found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in found}
    assert [name for name in same if not same[name]] == []


def tree(folder: Path) -> dict[str, tuple]:
    """Every file under a folder, with what changes when it is written."""
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
            for path in sorted(folder.rglob("*"))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- what is in a checkpoint -----------------------------------------------------------------------------------------------

def test_a_checkpoint_holds_plain_tensors_with_checksums(pair):
    for step in (3, STEPS):
        path = pair.checkpoint(step)
        manifest = manifest_of(path)
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        assert manifest["sha256"] == manifest_digest(body)
        assert names(path) == sorted([*manifest["files"], "manifest.json"])
        assert {"dense.pt", "rank0000.pt", "rank0001.pt", "table0000_0000.pt", "table0001_0000.pt"} == manifest["files"].keys()
        for name, entry in manifest["files"].items():
            assert (entry["bytes"], entry["sha256"]) == ((path / name).stat().st_size, sha256(path / name))
        found = contents(path)
        assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
        size = sum((path / name).stat().st_size for name in manifest["files"])
        assert size < sum(tensor.nbytes for tensor in found.values()) + 6_000 * len(found)  # no tensor drags a larger one along
    config = Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in manifest["config"].items()})
    assert (config.steps, config.batch_tokens, config.ngram_update_every, manifest["world_size"]) == (STEPS, 416, 2, 2)


def test_parameters_and_moments_lie_under_plain_names(pair):
    config = parse_args(SHORT)
    found, model = contents(pair.checkpoint()), GPT(config, VOCAB)
    for name, p in model.named_parameters():
        moments = ["momentum"] if re.search(r"qkv|attn_out|mlp", name) else ["first_moment", "second_moment"]
        for kind in ("weights", *moments):
            assert found[f"{kind} {name}"].shape == p.shape and found[f"{kind} {name}"].dtype == torch.float32
    assert len([name for name in found if name.startswith("weights ")]) == len(list(model.parameters()))


@pytest.mark.parametrize("step", [2, 3, 4, STEPS])
def test_the_tables_part_holds_the_touched_rows_alone(alone, tiny_data, step):
    """Which rows those are and when each was last updated is worked out anew from the tokens."""
    config = parse_args([*SHORT, f"--data={tiny_data}"])
    dataset, expected = open_dataset(config), {}
    updates = math.ceil(step / 3) if step == STEPS else step // 3  # the last cycle is cut short by the run's end
    for update in range(1, updates + 1):
        for at in range(3 * update - 3, min(3 * update, STEPS)):
            batch = make_batch(dataset.train.read(at * 13, 13), 13, 13, dataset.doc_start)
            rows, _ = ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
            expected |= dict.fromkeys(rows.flatten().tolist(), update)
    found = contents(alone.checkpoint(step))
    assert dict(zip(found.get("ids", torch.empty(0)).tolist(), found.get("last", torch.empty(0)).tolist())) == expected
    assert found["counts"].tolist() == [step, step, updates] and len(expected) < 4001
    if expected:
        assert found["ids"].tolist() == sorted(expected) and found["rows"].shape == (len(expected), 32)


def test_a_large_table_is_cut_into_parts(go, alone, monkeypatch):
    monkeypatch.setattr(train_gpt, "CHECKPOINT_PART_ROWS", 100)
    parts = go(*WIDE, "--checkpoint_every=4")
    rows = [len(torch.load(path, weights_only=True)["ids"]) for path in sorted(parts.checkpoint().glob("table*.pt"))]
    assert len(rows) > 10 and set(rows[:-1]) == {100} and 0 < rows[-1] <= 100
    assert_same_checkpoint(parts.checkpoint(), alone.checkpoint())
    for ranks in (1, 2):
        resumed = go(f"--resume={parts.checkpoint(4)}", ranks=ranks)
        assert resumed.loss == pytest.approx(alone.loss, abs=1e-5 * (ranks > 1))


# ---- resume, bit for bit ---------------------------------------------------------------------------------------------------

ROWS = ["--ngram_update_every=2"]
ELEMENTS = [*WIDE, "--micro_batch_tokens=96"]


@pytest.mark.parametrize("flags, ranks, cuts", [
    (ROWS, 1, range(1, STEPS)), (ROWS, 2, (3, 4)), (ELEMENTS, 1, range(1, STEPS)), (ELEMENTS, 2, (3, 4)),
    (["--ngram_rows=0"], 1, (3,)), ([*ROWS, *RECIPE], 1, range(1, STEPS)), ([*ROWS, *RECIPE], 2, (3, 4)),
], ids=["rows", "rows on 2 ranks", "elements", "elements on 2 ranks", "no table", "recipe", "recipe on 2 ranks"])
def test_a_resumed_run_ends_bit_for_bit_as_the_whole_one(go, flags, ranks, cuts):
    """From every step, at the end of an update cycle and inside it, with and without a warm-up."""
    once = ["--checkpoint_every=0", "--checkpoint"]
    whole = go(*flags, *once, ranks=ranks)
    often = go(*flags, *EVERY_STEP, ranks=ranks)
    assert names(whole.folder) == ["latest", f"r_step{STEPS:06d}"]
    assert_same_checkpoint(often.checkpoint(), whole.checkpoint())
    assert len(whole.losses(0)) == STEPS + 4 and often.losses(0) == whole.losses(0)
    for cut in cuts:
        resumed = go(f"--resume={often.checkpoint(cut)}", f"--warmup_steps={cut % 2}", *once, ranks=ranks)
        assert resumed.losses(0) == whole.losses(cut)
        assert resumed.outcomes == whole.outcomes
        assert_same_checkpoint(resumed.checkpoint(), whole.checkpoint())


def test_a_run_resumes_again_and_again_inside_one_cycle(go, alone):
    """Each leg is one step, so that a cycle of 3 is put together from three processes' parts."""
    path = alone.checkpoint(1)
    for cut in range(1, 4):
        path = go(f"--resume={path}").checkpoint(cut + 1)
        assert_same_checkpoint(path, alone.checkpoint(cut + 1))


def test_the_random_state_is_part_of_a_checkpoint(go, tmp_path):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        run, state = go("--checkpoint_every=4"), torch.get_rng_state()
        torch.manual_seed(6)
        go(f"--resume={run.checkpoint(4)}")
        assert torch.equal(torch.get_rng_state(), state)


def test_a_resumed_run_tells_its_past(go, alone):
    resumed = go(f"--resume={alone.checkpoint(5)}", run_id="second")
    header = json.loads(resumed.log.splitlines()[0].removeprefix("run:"))
    assert header["resumed"] == {"run_ids": ["r"], "step": 5}
    assert f"resumed {alone.checkpoint(5)} at step 5" in resumed.log
    assert manifest_of(resumed.checkpoint())["run_ids"] == ["r", "second"]
    past, now = manifest_of(alone.checkpoint(5))["train_time_s"], manifest_of(resumed.checkpoint())["train_time_s"]
    assert 0 < past < now
    assert int(re.search(r"final step:\S+ val_loss:\S+ train_time:(\d+)ms", resumed.log)[1]) == pytest.approx(1e3 * now, abs=1)


def test_the_step_that_met_the_target_survives_a_cut(go):
    """The target is met before the cut; the run that goes on still knows, unless it has another target."""
    run = go("--target_loss=100", "--checkpoint_every=2", "--checkpoint_keep=9")
    met = re.search(r"^target val_loss:100.0 met at step:0 train_time:0ms$", run.log, re.MULTILINE)
    assert met and met[0] in go(f"--resume={run.checkpoint(2)}").log
    assert "target val_loss:0.5 not met" in go(f"--resume={run.checkpoint(2)}", "--target_loss=0.5").log


# ---- another number of ranks -----------------------------------------------------------------------------------------------

def test_4_2_1_3_ranks_in_turn_end_as_one_run(go):
    """Each leg leaves in the middle of a cycle or at its end, and the next has another number of ranks."""
    flags = ["--steps=9", *WIDE, "--checkpoint_every=2", "--checkpoint_keep=99"]
    whole = go(*flags)
    leg = go(*flags, ranks=4)
    assert leg.loss == pytest.approx(whole.loss, abs=1e-5)
    for ranks, cut in ((2, 2), (1, 4), (3, 6)):
        leg = go(f"--resume={leg.checkpoint(cut)}", ranks=ranks)
        assert leg.outcomes == pytest.approx([whole.loss] * ranks, abs=1e-5)
        assert manifest_of(leg.checkpoint(9))["world_size"] == ranks
        found, expected = (contents(run.checkpoint(9), by_rank=False) for run in (leg, whole))
        assert found.keys() == expected.keys()
        assert torch.equal(found["ids"], expected["ids"]) and torch.equal(found["last"], expected["last"])
        for name in found:
            error, scale = (found[name] - expected[name]).float().norm(), expected[name].float().norm()
            assert error <= 1e-3 * scale, name  # float32 sums in another order, over 9 steps of Muon


def test_more_ranks_than_rows(go):
    """Two of four ranks have no row at all, before and behind the cut."""
    flags = ["--ngram_rows=3", "--ngram_orders=2", "--ngram_update_every=2", "--ngram_dtype=float32", "--checkpoint_every=3",
             "--checkpoint_keep=9"]
    whole = go(*flags)
    four = go(*flags, ranks=4)
    assert go(f"--resume={four.checkpoint(3)}").loss == pytest.approx(whole.loss, abs=1e-5)
    assert go(f"--resume={whole.checkpoint(3)}", ranks=4).loss == pytest.approx(whole.loss, abs=1e-5)


# ---- flags -----------------------------------------------------------------------------------------------------------------

# What the weights depend on, with a value that SHORT does not give; the rest may change, as listed behind.
FIXED = dict(track="fineweb", seed=1, spread_rows=False, dtype="bfloat16", seq_len=16, batch_tokens=384, layers=1, model_dim=48, heads=4,
             rotary_base=500.0, ngram_rows=4003, ngram_dim=16, ngram_orders="2,4", ngram_split="1,3", ngram_signs=32,
             ngram_dtype="bfloat16", ngram_second_moment="row", ngram_lr=0.5, ngram_beta2=0.9, ngram_wd=0.0, ngram_update_every=2,
             steps=8, muon_lr=0.5, muon_momentum=0.9, muon_momentum_steps=9, adam_lr=0.5, adam_beta1=0.5, adam_beta2=0.5, weight_decay=0.5,
             cooldown=0.5, final_lr=0.5, stages="0.5:1/2:8-16:1,1:1:16-32:1", attn_gate=False, smear=False, skips=True,
             value_embeds="1", tie_until=0.5, muon_momentum_cooldown=3, muon_beta2=0.9,
             ngram_heads=2, ngram_canonical=True, ngram_combine="concat", ngram_gate="context", ngram_layers="1", fp8_head=True)
FREE = dict(device="cpu", run_id="other", out="other", log_every=9, dry_run=True, table_report=True, compile=True, warmup_steps=1,
            timeout_s=9, checkpoint=True, checkpoint_every=9, checkpoint_keep=9, eval_only=True, data="other", epochs=9,
            micro_batch_tokens=96, val_tokens=64, val_every=9, target_loss=0.5, sample="other", sample_tokens=9, head_chunk_tokens=9,
            ngram_device="cpu", ngram_kernel=False, peak_tflops=1.0, link_gbs=1.0, ranks=3)


def as_flag(name: str, value) -> str:
    return f"--no_{name}" if value is False else f"--{name}" if value is True else f"--{name}={value}"


def test_every_flag_is_fixed_or_free():
    assert sorted([*FIXED, *FREE, "resume"]) == sorted(f.name for f in fields(Config))


@pytest.mark.parametrize("name", FIXED)
def test_a_flag_that_contradicts_the_checkpoint_is_refused_by_name(alone, name):
    there = manifest_of(alone.checkpoint(4))["config"][name]
    flag = re.escape(f"--{name}=") + r".+ \(there " + re.escape(str(tuple(there) if isinstance(there, list) else there)) + r"\)"
    with pytest.raises(UserError, match=f"step000004: found flags that contradict the checkpoint: {flag}; "):
        parse_args(["--device=cpu", f"--resume={alone.checkpoint(4)}", as_flag(name, FIXED[name])])


def test_all_contradictions_are_told_at_once(alone):
    """With what was found and what is there; a flag that repeats what is there contradicts nothing."""
    before = tree(alone.out)
    with pytest.raises(UserError) as error:
        train_gpt.main([f"--resume={alone.checkpoint(4)}", f"--out={alone.out}", "--steps=8", "--layers=2", "--ngram_orders=2",
                        "--seed=3"])
    assert "checkpoint: --seed=3 (there 0), --ngram_orders=(2,) (there (2, 3)), --steps=8 (there 7);" in str(error.value)
    assert "--layers" not in str(error.value) and tree(alone.out) == before


def test_flags_not_given_are_inherited_and_free_ones_change(alone):
    base = ["--device=cpu", f"--resume={alone.checkpoint(4)}"]
    saved, config = manifest_of(alone.checkpoint(4))["config"], parse_args(base)
    assert (config.run_id, config.out, config.resume) == ("", str(alone.out), str(alone.checkpoint(4)))
    for name in [name for name in saved if name not in ("run_id", "out", "resume")]:
        assert json.loads(json.dumps(getattr(config, name))) == saved[name], name
    for name, value in FREE.items():
        needed = ["--warmup_steps=1", *["--dry_run"] * (name == "ranks")]
        assert getattr(parse_args([*base, *needed, as_flag(name, value)]), name) == value
    assert parse_args([*base, "--track=auto"]).track == "cpu"
    repeated = [as_flag(name, saved[name]) for name in ("steps", "seed", "ngram_lr", "spread_rows")]
    assert parse_args([*base, *repeated]) == config


def test_a_resumed_run_heeds_free_flags(go, alone):
    resumed = go(f"--resume={alone.checkpoint(2)}", "--val_every=2", "--log_every=3", "--checkpoint_every=5",
                 "--micro_batch_tokens=96", "--head_chunk_tokens=50", "--val_tokens=1024", "--target_loss=4.5", "--sample_tokens=5",
                 "--ngram_update_every=3")
    assert re.findall(r"^step:(\d+)/7 val_loss", resumed.log, re.MULTILINE) == ["2", "4", "6", "7"]
    assert re.findall(r"^step:(\d+)/7 train_loss", resumed.log, re.MULTILINE) == ["3", "6"]
    assert names(resumed.folder) == ["latest", "r_step000005", "r_step000007"]
    assert re.search(r"^sample:\n  \| \d+( \d+){4}$", resumed.log, re.MULTILINE) and "target val_loss:4.5 " in resumed.log


def other_data(folder: Path, **files) -> Path:
    folder.mkdir()
    for name, tokens in files.items():
        write_shard(folder / f"{name}.bin", tokens)
    return folder


def test_another_data_set_is_refused(alone, tmp_path):
    """Whether its first shard differs, or a later one, or their number, from which spread rows take their order."""
    first, second, val = markov_tokens(30_000, 2), markov_tokens(20_001, 3), markov_tokens(5_000, 4)  # as in tiny_data
    for i, (a, b) in enumerate([(markov_tokens(30_000, 9), second), (first, markov_tokens(20_001, 9)), (first, second[:20_000])]):
        data = other_data(tmp_path / str(i), tiny_train_000001=a, tiny_train_000002=b, tiny_val_000000=val)
        with pytest.raises(UserError, match=rf"{data}.*: found another data set .*expected the one that {alone.checkpoint(4)} was"):
            train_gpt.main([f"--resume={alone.checkpoint(4)}", f"--data={data}", f"--out={tmp_path / 'out'}"])
    data = other_data(tmp_path / "more", tiny_train_000001=first, tiny_train_000002=second, tiny_train_000003=second,
                      tiny_val_000000=val)
    with pytest.raises(UserError, match=f"{data}.*: found another data set"):
        train_gpt.main([f"--resume={alone.checkpoint(4)}", f"--data={data}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_more_shards_are_welcome_where_rows_are_not_spread(go, tiny_data, tmp_path):
    run = go("--no_spread_rows", "--checkpoint_every=4")
    data = shutil.copytree(tiny_data, tmp_path / "more")
    write_shard(data / "tiny_train_000003.bin", markov_tokens(5_000, 9))
    resumed = go(f"--resume={run.checkpoint(4)}", f"--data={data}")
    assert_same_checkpoint(resumed.checkpoint(), run.checkpoint())


def test_the_last_step_resumes_to_nothing_at_all(alone):
    """As a user would call it, for its exit status: the final lines again, in a log of its own, and no checkpoint."""
    before = tree(alone.folder)
    done = run_trainer("--resume=latest", f"--out={alone.out}", "--run_id=again", "--checkpoint_keep=1")
    assert done.returncode == 0 and done.stderr == ""
    final = re.search(r"^final step:7/7 val_loss:(\S+) train_time:\d+ms$", done.stdout, re.MULTILINE)
    assert float(final[1]) == pytest.approx(alone.loss, abs=1e-5)
    assert "train_loss" not in done.stdout and "checkpoint " not in done.stdout.replace(str(alone.checkpoint()), "")
    assert tree(alone.folder) == before


def test_latest_is_what_out_says(go, alone, tmp_path):
    """--resume=latest takes the checkpoint that `latest` names, and follows a folder that was moved."""
    moved = shutil.copytree(alone.out, tmp_path / "moved")
    (moved / "checkpoints/latest").write_text("r_step000004\n")
    assert parse_args(["--device=cpu", "--resume=latest", f"--out={moved}"]).resume == str(moved / "checkpoints/r_step000004")
    resumed = go("--resume=latest", out=moved, run_id="on")
    assert resumed.outcomes == alone.outcomes and "at step 4\n" in resumed.log


@pytest.mark.parametrize("latest", [None, b"", b"r_step000099", b"\0\0\0\0", b"\xff\xfe\x80"])
def test_latest_that_names_no_checkpoint(tmp_path, latest):
    (tmp_path / "checkpoints").mkdir()
    if latest is not None:
        (tmp_path / "checkpoints/latest").write_bytes(latest)
    with pytest.raises(UserError, match=rf"^{tmp_path}/checkpoints.*: found .*, expected .*--resume"):
        parse_args(["--resume=latest", f"--out={tmp_path}"])


def test_evaluation_needs_a_checkpoint():
    with pytest.raises(UserError, match="--eval_only: found True, expected --resume"):
        parse_args(["--eval_only"])


# ---- evaluation and samples ------------------------------------------------------------------------------------------------

def test_a_checkpoint_of_two_ranks_is_evaluated_in_one_process(go, pair):
    """At every step, inside cycles too: the loss of the run's own log, and no trace at all."""
    logged = dict(re.findall(r"^step:(\d+)/7 val_loss:(\S+)", pair.log, re.MULTILINE))
    before = tree(pair.out)
    for step in (3, 6, STEPS):
        evaluated = go(f"--resume={pair.checkpoint(step)}", "--eval_only")
        assert evaluated.loss == pytest.approx(float(logged[str(step)]), abs=1.5e-5)
        assert re.findall(r"^step:(\d+)/7 val_loss", evaluated.log, re.MULTILINE) == [str(step)]
        assert "train_loss" not in evaluated.log and names(evaluated.out) == []
        assert re.search(r"^held out: 512 tokens, loss \S+ \(off \S+\), right", evaluated.log, re.MULTILINE)
        assert re.findall(r"^  order (\d), never met: \d+ tokens, loss \S+ \(off \S+\), right", evaluated.log, re.MULTILINE) == ["2", "3"]
    assert tree(pair.out) == before
    assert go(f"--resume={pair.checkpoint(3)}", "--eval_only", ranks=3).loss == pytest.approx(float(logged["3"]), abs=1.5e-5)


def continued(path: Path, prompt: list[int], count: int, doc_start: int, zeroed: bool = False) -> list[int]:
    """The prompt and `count` tokens more, from a checkpoint's tensors alone: memory summed read by read, a seeded draw."""
    saved, found = manifest_of(path)["config"], contents(path)
    config = Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})
    model, pool, generator = GPT(config, VOCAB), sign_pool(config, torch.float32), torch.Generator().manual_seed(config.seed)
    model.load_state_dict({name.removeprefix("weights "): tensor for name, tensor in found.items() if name.startswith("weights ")})
    table = {} if zeroed else dict(zip(found["ids"].tolist(), found["rows"].float()))
    ids = [doc_start, *prompt]
    for _ in range(count):
        context = torch.tensor(ids[-config.seq_len:])
        starts = context == doc_start
        starts[0] = True
        rows, signs = ngram_addresses(context, starts, config)
        memory = torch.zeros(len(context), config.ngram_dim)
        for t in range(len(context)):
            for c in range(len(rows)):
                memory[t] += table.get(int(rows[c, t]), torch.zeros(config.ngram_dim)) * pool[signs[c, t]]
        with torch.no_grad():
            mask = attention_mask(starts[None], config.seq_len, flex=False)
            x = model.hidden(context[None], starts[None], memory[None], (mask, mask), rotary_table(config, 0))
            logits = 23 * torch.sigmoid((x[0, -1] @ model.head.T + 5) / 7.5)[:VOCAB]
        ids.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
    return ids[1:]


@pytest.fixture(scope="module")
def letters(tiny_data, tmp_path_factory):
    """The data beside a tokenizer of single letters, and that tokenizer."""
    folder = shutil.copytree(tiny_data, tmp_path_factory.mktemp("letters") / "data")
    tokens = [bytes([i]) for i in range(63, 63 + VOCAB - 1)]
    (folder / TOKENIZER_FILE).write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return folder, tokenizer_encoding(tokens)


@pytest.fixture(scope="module")
def learned(go):
    """Two ranks, steps enough for the table to have a say in what is drawn."""
    return go("--steps=30", "--batch_tokens=1536", "--checkpoint", ranks=2).checkpoint(30)


@pytest.mark.parametrize("prompt", ["", "hello", "abcdefghijklmnopqrstuvwxyzabcdefghijklmn"])
def test_a_sample_from_a_checkpoint_sees_the_running_context(go, learned, letters, prompt):
    """A prompt shorter and longer than a row; what the memory adds is read anew for every token drawn."""
    folder, tokenizer = letters
    ids = tokenizer.encode_ordinary(prompt)
    expected, without = (continued(learned, ids, 40, VOCAB - 1, zeroed) for zeroed in (False, True))
    run = go(f"--resume={learned}", "--eval_only", f"--sample={prompt}", "--sample_tokens=40", f"--data={folder}")
    sample = re.search(r"^sample:\n  \| (.*)$", run.log, re.MULTILINE)[1]
    assert sample == tokenizer.decode(expected) and sample.startswith(prompt) and expected != without


def test_a_sample_changes_when_the_table_is_zeroed(go, learned, letters, tmp_path):
    folder, tokenizer = letters
    path = shutil.copytree(learned, tmp_path / "zeroed")
    manifest = manifest_of(path)
    for part in path.glob("table*.pt"):
        content = torch.load(part, weights_only=True)
        torch.save(content | {"rows": torch.zeros_like(content["rows"])}, part)
        manifest["files"][part.name] |= {"bytes": part.stat().st_size, "sha256": sha256(part)}
    sign(path, manifest)
    run = go(f"--resume={path}", "--eval_only", "--sample=hello", "--sample_tokens=40", f"--data={folder}")
    expected = continued(learned, tokenizer.encode_ordinary("hello"), 40, VOCAB - 1, zeroed=True)
    assert re.search(r"^sample:\n  \| (.*)$", run.log, re.MULTILINE)[1] == tokenizer.decode(expected)


def test_a_prompt_is_answered_even_where_the_run_printed_no_samples(go, pair, letters):
    run = go(f"--resume={pair.checkpoint()}", "--eval_only", "--sample=hello", f"--data={letters[0]}")
    assert re.search(r"^sample:\n  \| hello.", run.log, re.MULTILINE)


def test_a_checkpoint_of_another_device_can_be_read(go, alone, tmp_path):
    """The random state of a GPU is no CPU's: it has another size."""
    path = shutil.copytree(alone.checkpoint(4), tmp_path / "gpu")
    manifest, part = manifest_of(path), path / "rank0000.pt"
    torch.save(torch.load(part, weights_only=True) | {"random_state": torch.zeros(16, dtype=torch.uint8)}, part)
    manifest["files"][part.name] |= {"bytes": part.stat().st_size, "sha256": sha256(part)}
    manifest["config"]["device"] = "cuda"
    sign(path, manifest)
    assert go(f"--resume={path}").outcomes == alone.outcomes


# ---- damage ----------------------------------------------------------------------------------------------------------------

KINDS = ["manifest.json", "dense.pt", "rank0000.pt", "rank0001.pt", "table0000_0000.pt", "table0001_0000.pt"]


@pytest.fixture
def damaged(pair, tmp_path):
    """A copy of a checkpoint in the middle of a cycle, for damage; the folder of its run's log is tmp_path / "out"."""
    return shutil.copytree(pair.checkpoint(5), tmp_path / "copy_step000005")


def assert_refused(path: Path, named: str, tmp_path: Path) -> None:
    """Before anything is loaded or written."""
    with pytest.raises(UserError, match=rf"^{path}/{named}: found .*, expected .*older (one|checkpoint)$"):
        train_gpt.main([f"--resume={path}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", KINDS)
def test_one_flipped_byte_is_found_wherever_it_lies(damaged, tmp_path, name):
    whole, draw = (damaged / name).read_bytes(), random.Random(name)
    for position in (0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(6))):
        flipped = whole[position] ^ 1 << draw.randrange(8)
        (damaged / name).write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1:])
        assert_refused(damaged, name, tmp_path)


def test_a_flipped_byte_is_found_by_whichever_rank_reads_the_file(on, damaged, tmp_path):
    for name in KINDS:
        whole = (damaged / name).read_bytes()
        (damaged / name).write_bytes(whole[:99] + bytes([whole[99] ^ 4]) + whole[100:])
        outcomes = on(2, [f"--resume={damaged}", f"--out={tmp_path / 'out'}"])
        assert all(re.match(rf"SharedError: {damaged}/{name}: found", text) for text in outcomes), outcomes
        (damaged / name).write_bytes(whole)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", KINDS)
def test_a_part_cut_short_or_grown_or_missing_is_named(damaged, tmp_path, name):
    whole = (damaged / name).read_bytes()
    for content in (whole[:-1], whole[:len(whole) // 2], b"", whole + b"x"):
        (damaged / name).write_bytes(content)
        assert_refused(damaged, name, tmp_path)
    (damaged / name).unlink()
    with pytest.raises(UserError, match=rf"^{damaged}/{name}: found (no such file|No such file or directory), expected"):
        train_gpt.main([f"--resume={damaged}", f"--out={tmp_path / 'out'}"])


def test_a_part_of_another_checkpoint_is_found(pair, damaged, tmp_path):
    for name in KINDS[1:]:
        whole = (damaged / name).read_bytes()
        shutil.copy(pair.checkpoint(3) / name, damaged / name)
        assert_refused(damaged, name, tmp_path)
        (damaged / name).write_bytes(whole)
    shutil.copy(pair.checkpoint(3) / "manifest.json", damaged / "manifest.json")
    with pytest.raises(UserError, match=rf"^{damaged}/\w+.pt: found"):
        train_gpt.main([f"--resume={damaged}", f"--out={tmp_path / 'out'}"])


@pytest.mark.parametrize("text", [b"{}", b"[]", b"null", b"3", b'"text"', b"not json", b"\xff\xfe\x00", b'{"sha256": 5}',
                                  b'{"format": 1, "sha256": "0"}', b"{" * 100_000])
def test_a_foreign_manifest_is_refused(damaged, tmp_path, text):
    (damaged / "manifest.json").write_bytes(text)
    assert_refused(damaged, "manifest.json", tmp_path)


def test_a_manifest_of_another_version_is_refused_with_what_differs(damaged, tmp_path):
    manifest = manifest_of(damaged)
    sign(damaged, manifest | {"format": 2})
    assert_refused(damaged, "manifest.json", tmp_path)
    kept = {name: value for name, value in manifest["config"].items() if name != "heads"}
    sign(damaged, manifest | {"config": kept | {"new_flag": 1}})
    with pytest.raises(UserError, match="disagrees on the flags heads, new_flag, expected"):
        parse_args([f"--resume={damaged}"])


def test_what_is_no_checkpoint_is_refused(alone, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", alone.checkpoint() / "dense.pt", alone.folder):
        with pytest.raises(UserError, match=rf"^{path}/manifest.json: found (No such file|Not a directory).*, expected a checkpoint's"):
            train_gpt.main([f"--resume={path}", f"--out={tmp_path / 'out'}"])


def test_an_older_checkpoint_goes_on_where_the_newest_is_damaged(go, alone, tmp_path):
    out = shutil.copytree(alone.out, tmp_path / "out")
    (out / "checkpoints/r_step000007/dense.pt").write_bytes(b"")
    with pytest.raises(UserError, match="r_step000007/dense.pt: found 0 bytes"):
        train_gpt.main(["--resume=latest", f"--out={out}"])
    resumed = go(f"--resume={out}/checkpoints/r_step000006", out=out, run_id="on")
    assert resumed.outcomes == alone.outcomes
    assert_same_checkpoint(resumed.checkpoint(), alone.checkpoint())


# ---- what cannot be written ------------------------------------------------------------------------------------------------

def largest_file(path: Path) -> int:
    return max(part.stat().st_size for part in path.iterdir())


def test_a_full_disk_stops_no_training_and_harms_no_older_checkpoint(go, alone, tiny_data, tmp_path):
    """The first checkpoints fit, the later ones do not, for the table grows: warnings, and a clear error at the very end."""
    fits, limit = alone.checkpoint(3), largest_file(alone.checkpoint(6)) - 1
    assert limit > largest_file(fits) + 1000
    command = [sys.executable, ROOT / "train_gpt.py", *SHORT, f"--data={tiny_data}", *WIDE, "--checkpoint_every=3",
               f"--out={tmp_path}", "--run_id=full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    log, part = (tmp_path / "full.txt").read_text(), r"\.full_step000006\.part/table0000_0000\.pt"
    warning = rf"^warning: no checkpoint at step 6: .*{part}: found File too large, .*; training goes on$"
    assert re.search(warning, log, re.MULTILINE)
    assert re.findall(r"^step:(\d+)/7 train_loss", log, re.MULTILINE) == [str(step) for step in range(1, STEPS + 1)]
    error = r"^error: .*\.full_step000007\.part/table0000_0000\.pt: found File too large, expected"
    assert done.returncode == 1 and re.search(error, done.stderr.strip().splitlines()[-1]) and "Traceback" not in done.stderr
    assert re.search(error, log.splitlines()[-1]) and "final step:7/7 val_loss" in log
    folder = tmp_path / "checkpoints"
    assert names(folder) == ["full_step000003", "latest"] and (folder / "latest").read_text() == "full_step000003"
    assert manifest_of(folder / "full_step000003")["step"] == 3
    assert go("--resume=latest", out=tmp_path, run_id="on").outcomes == alone.outcomes


def test_all_ranks_go_on_together_where_one_cannot_write(on, pair, tiny_data, tmp_path):
    """The disk of rank 1 alone is full."""
    limit = (pair.checkpoint(2) / "table0001_0000.pt").stat().st_size + 1
    flags = [*SHORT, f"--data={tiny_data}", "--ngram_update_every=2", "--checkpoint_every=2", f"--out={tmp_path}", "--run_id=r"]
    outcomes = on(2, flags, file_limit=limit)
    log = (tmp_path / "r.txt").read_text()
    assert re.findall(r"^warning: no checkpoint at step (\d):", log, re.MULTILINE) == ["4", "6"]
    assert len(re.findall("^step:.*train_loss", log, re.MULTILINE)) == STEPS
    error = r"SharedError: .*r_step000007\.part/table0001_0000\.pt"
    assert len(outcomes) == 2 and all(re.match(error, text) for text in outcomes), outcomes
    assert names(tmp_path / "checkpoints") == ["latest", "r_step000002"]
    assert_same_checkpoint(tmp_path / "checkpoints/r_step000002", pair.checkpoint(2))


def test_space_that_returns_is_used(on, tiny_data, tmp_path):
    """Inside a cycle its gradients have no room; at the end there are none, and the last checkpoint is whole."""
    flags = [*SHORT, f"--data={tiny_data}", f"--ngram_update_every={STEPS}", "--ngram_dim=32", "--checkpoint_every=3",
             "--run_id=r"]
    first = on(1, [*flags, f"--out={tmp_path / 'a'}"])
    path = tmp_path / "a/checkpoints/r_step000007"
    limit = largest_file(path) + 1
    assert limit < (tmp_path / "a/checkpoints/r_step000006/rank0000.pt").stat().st_size
    assert on(1, [*flags, f"--out={tmp_path / 'b'}"], file_limit=limit) == first
    log = (tmp_path / "b/r.txt").read_text()
    assert re.findall(r"^warning: no checkpoint at step (\d):", log, re.MULTILINE) == ["3", "6"]
    assert names(tmp_path / "b/checkpoints") == ["latest", "r_step000007"]
    assert manifest_of(tmp_path / "b/checkpoints/r_step000007")["step"] == STEPS


def test_a_log_that_cannot_be_written_ends_no_training(on, alone, tiny_data, tmp_path):
    """The disk is full of other things."""
    flags = [*SHORT, f"--data={tiny_data}", "--ngram_update_every=3", f"--out={tmp_path}"]
    first = on(1, [*flags, "--run_id=a"])  # leaves the source there, which is larger than the log
    limit = (tmp_path / "a.txt").read_text().index("step:4/7 train_loss")
    assert on(1, [*flags, "--run_id=b"], file_limit=limit) == first
    log = (tmp_path / "b.txt").read_text()
    assert "step:2/7 train_loss" in log and "step:5/7" not in log


def test_a_folder_that_cannot_be_written_to_is_told_before_training(on, tiny_data, tmp_path):
    """A file in its place, or, since root may write anywhere, a link into nowhere; without checkpoints nobody minds."""
    flags = [*SHORT, f"--data={tiny_data}", f"--out={tmp_path}"]
    for run_id, make in (("a", Path.touch), ("b", lambda folder: folder.symlink_to("/proc/nowhere"))):
        make(tmp_path / "checkpoints")
        outcomes = on(1, [*flags, "--checkpoint", f"--run_id={run_id}"])
        assert re.match(rf"SharedError: {tmp_path}/checkpoints: found .*, expected", outcomes[0]), outcomes
        assert "step:" not in (tmp_path / f"{run_id}.txt").read_text()
        assert isinstance(on(1, [*flags, f"--run_id={run_id}{run_id}"])[0], float)
        (tmp_path / "checkpoints").unlink()


# ---- which checkpoints stay ------------------------------------------------------------------------------------------------

def test_the_newest_are_kept_and_leftovers_swept(go, tmp_path):
    """Those of the run itself; another run's checkpoints, and the folder it may be writing to, are not touched."""
    folder = tmp_path / "checkpoints"
    leftovers = [".r_step000002.part", ".r_step000001.removed.part", ".old_step000002.part"]
    others = ["other_step000001", "other_step000002", "rr_step000001", "r_step000001_mine", ".other_step000003.part"]
    for name in (*leftovers, *others):
        (folder / name).mkdir(parents=True)
        (folder / name / "dense.pt").write_bytes(b"x")
    for name in ("r_step000001.tar", "notes_step"):
        (folder / name).write_bytes(b"x")
    (folder / ".latest.4194999.part").write_text("r_step000001")
    two_hours_ago = time.time() - 7200
    for name in (".old_step000002.part", "other_step000001", ".latest.4194999.part"):
        os.utime(folder / name, (two_hours_ago, two_hours_ago))
    run = go("--checkpoint_every=1", "--checkpoint_keep=3", out=tmp_path)
    kept = [f"r_step00000{step}" for step in (5, 6, 7)]
    assert names(folder) == sorted([*others, *kept, "r_step000001.tar", "notes_step", "latest"])
    assert (folder / "latest").read_text() == "r_step000007"
    assert re.findall(r"^checkpoint (\S+)$", run.log, re.MULTILINE) == [str(run.checkpoint(step)) for step in range(1, STEPS + 1)]
    assert all(names(folder / name) == ["dense.pt"] for name in others)


@pytest.mark.parametrize("run_id", ["a_step000001", ".[x]*", "b.removed"])
def test_a_run_of_any_name_is_swept(go, tmp_path, run_id):
    folder = tmp_path / "checkpoints"
    for name in (f".{run_id}_step000002.part", f".{run_id}_step000001.removed.part"):
        (folder / name).mkdir(parents=True)
    go("--checkpoint_every=3", "--checkpoint_keep=1", out=tmp_path, run_id=run_id)
    assert names(folder) == sorted(["latest", f"{run_id}_step000007"])


def test_a_resumed_run_sweeps_its_predecessors(go, tmp_path):
    go("--checkpoint_every=1", "--checkpoint_keep=3", out=tmp_path)
    go(f"--resume={tmp_path}/checkpoints/r_step000005", "--checkpoint_keep=2", out=tmp_path, run_id="second")
    assert names(tmp_path / "checkpoints") == ["latest", "second_step000006", "second_step000007"]
    assert (tmp_path / "checkpoints/latest").read_text() == "second_step000007"


def test_the_checkpoint_just_written_stays_whatever_the_clock_says(go, tmp_path):
    """Older ones from the future: a clock was set back, or a backup was unpacked."""
    first = go("--checkpoint_every=1", "--checkpoint_keep=3", out=tmp_path)
    for path in first.folder.glob("r_step*"):
        os.utime(path, (time.time() + 9999, time.time() + 9999))
    second = go(f"--resume={first.checkpoint(6)}", "--checkpoint_keep=1", out=tmp_path, run_id="second")
    assert second.checkpoint().is_dir() and (tmp_path / "checkpoints/latest").read_text() == second.checkpoint().name
    assert go("--resume=latest", out=tmp_path, run_id="third").outcomes == first.outcomes


def test_a_checkpoint_of_the_same_name_gives_way(go, tmp_path):
    """The log was deleted and the run started over under its name."""
    first = go("--checkpoint", "--checkpoint_every=3", out=tmp_path)
    (tmp_path / "r.txt").unlink()
    again = go("--checkpoint", "--checkpoint_every=3", "--seed=1", out=tmp_path)
    assert names(tmp_path / "checkpoints") == ["latest", "r_step000006", "r_step000007"]
    assert manifest_of(again.checkpoint())["config"]["seed"] == 1 and again.outcomes != first.outcomes


def test_no_checkpoint_is_written_unasked(go):
    assert not go().folder.exists()


def test_a_checkpoint_may_be_moved_and_renamed(go, alone, tmp_path):
    path = shutil.copytree(alone.checkpoint(4), tmp_path / "the best one")
    assert go(f"--resume={path}/").outcomes == alone.outcomes

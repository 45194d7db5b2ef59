"""Checkpoints: what they hold, that a resumed run ends as if it had never stopped, and that a bad one is refused."""
from __future__ import annotations

import hashlib
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
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

import train_gpt
from conftest import RECIPE, TINY, VOCAB, markov_tokens, write_shard
from staged import Staged
from train_gpt import Config, UserError, build_model, make_batch, ngram_addresses, open_dataset, parse_args

STEPS = 7
SHORT = [*TINY, f"--steps={STEPS}", "--batch_tokens=416", "--val_tokens=512", "--val_every=3", "--sample_tokens=0",
         "--weight_decay=0.1", "--checkpoint_keep=99"]
WIDE = ["--ngram_update_every=3", "--ngram_dim=32", "--ngram_dtype=float32", "--micro_batch_tokens=96"]
OFTEN = ["--checkpoint_every=1"]


@dataclass(frozen=True)
class InOrder(Config):
    """A variant whose rows come as they lie in the shards."""
    spread_rows: bool = False


class Ranks:
    """train_gpt.main on 1 to 4 gloo ranks, in processes that stay warm; torchrun would take seconds a run."""

    def __init__(self, pool):
        self.pool = pool

    def __call__(self, size: int, argv: list, file_limit: int = 0, **options) -> list:
        """Each rank's validation loss, or its error as text. file_limit: bytes that the last may write to a file."""
        if size == 1 and not file_limit:
            return [outcome(argv, options)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        limits = [0] * (size - 1) + [file_limit]
        calls = [self.pool.apply_async(on_rank, (rank, size, port, argv, options, limit))
                 for rank, limit in enumerate(limits)]
        return [call.get(timeout=60) for call in calls]


def on_rank(rank: int, size: int, port: int, argv: list, options: dict, file_limit: int) -> float | str:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit or hard, hard))
    try:
        return outcome(argv, options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def outcome(argv: list, options: dict) -> float | str:
    """With a line in the log for every step, and a silent screen, which may be a file that a limit would hit."""
    train_gpt.LOG_EVERY, usual = 1, train_gpt.LOG_EVERY
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return train_gpt.main([str(argument) for argument in argv], **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        train_gpt.LOG_EVERY = usual


@pytest.fixture(scope="module")
def on():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_gpt"])
    with context.Pool(4) as pool:
        yield Ranks(pool)


class Run:
    """A run's folder, read back: its log and its checkpoints."""

    def __init__(self, out: Path, outcomes: list, run_id: str):
        self.out, self.outcomes, self.run_id, self.folder = out, outcomes, run_id, out / "checkpoints"
        self.log = (out / f"{run_id}.txt").read_text()
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
    def go(*flags, ranks: int = 1, out: Path | None = None, run_id: str = "r", **options) -> Run:
        resumes = any(str(flag).startswith("--resume") for flag in flags)
        base = ["--device=cpu"] if resumes else [*SHORT, f"--data={tiny_data}"]
        out = out or tmp_path_factory.mktemp("run")
        outcomes = on(ranks, [*base, *flags, f"--out={out}", f"--run_id={run_id}"], **options)
        assert all(isinstance(loss, float) for loss in outcomes), outcomes
        return Run(out, outcomes, run_id)
    return go


@pytest.fixture(scope="module")
def alone(go):
    """One rank, cycles of 3: checkpoints of steps 3, 6 and 7. The table's part is soon larger than the model's."""
    return go(*WIDE, *OFTEN)


@pytest.fixture(scope="module")
def pair(go):
    """Two ranks, cycles of 2: checkpoints of steps 2, 4, 6 and 7."""
    return go("--ngram_update_every=2", *OFTEN, ranks=2)


def manifest_of(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_text())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(manifest: dict) -> str:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return sha256(json.dumps(body, sort_keys=True).encode())


def sign(path: Path, manifest: dict) -> None:
    """Write a manifest as the trainer would, its checksum in order."""
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest_of(manifest)}))


def contents(path: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by name, the table's parts put together."""
    manifest = manifest_of(path)
    files = {name: torch.load(path / name, weights_only=True) for name in sorted(manifest["files"])}
    found = {"counts": torch.tensor([manifest[key] for key in ("step", "updates", "table_updates")])}
    dense = files.pop("dense.pt")
    found |= {f"{kind} {name}": tensor for kind, named in dense.items() for name, tensor in named.items()}
    parts = list(files.values())
    return found | {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    found, expected = contents(found), contents(expected)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def tree(folder: Path) -> dict[str, tuple]:
    """Every file under a folder but the lock, with what changes when it is written."""
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# ---- what is in a checkpoint -----------------------------------------------------------------------------------------

def test_a_checkpoint_holds_plain_tensors_with_checksums(pair, alone):
    """Every one that was asked for at every step lies where an update cycle ends."""
    assert names(pair.folder) == ["latest", *(f"r_step{step:06d}" for step in (2, 4, 6, 7))]
    assert names(alone.folder) == ["latest", *(f"r_step{step:06d}" for step in (3, 6, 7))]
    paths = [str(pair.checkpoint(step)) for step in (2, 4, 6, 7)]
    assert re.findall(r"^checkpoint (\S+)$", pair.log, re.MULTILINE) == paths
    for step in (4, STEPS):
        path = pair.checkpoint(step)
        manifest = manifest_of(path)
        assert manifest["sha256"] == digest_of(manifest) and manifest["format"] == 2
        assert {"dense.pt", "table0000_0000.pt", "table0001_0000.pt"} == manifest["files"].keys()
        assert names(path) == sorted([*manifest["files"], "manifest.json"])
        for name, entry in manifest["files"].items():
            content = (path / name).read_bytes()
            assert entry == {"bytes": len(content), "sha256": sha256(content)}
        found = contents(path)
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        least = sum(tensor.nbytes for tensor in found.values())
        assert size < least + 6_000 * len(found)  # no tensor drags a larger one along
    config = manifest["config"].items()
    config = Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in config})
    assert (config.steps, config.batch_tokens, config.ngram_update_every, manifest["world_size"]) == (STEPS, 416, 2, 2)


def test_parameters_and_moments_lie_under_plain_names(pair):
    found, model = contents(pair.checkpoint()), build_model(parse_args(SHORT), VOCAB)
    for name, p in model.named_parameters():
        is_muon = re.search(r"qkv|attn_out|mlp", name)
        for kind in ("weights", *(["momentum"] if is_muon else ["first_moment", "second_moment"])):
            assert found[f"{kind} {name}"].shape == p.shape and found[f"{kind} {name}"].dtype == torch.float32
        if is_muon:
            assert found[f"row_moment {name}"].shape == (*p.shape[:-1], 1)
    assert len([name for name in found if name.startswith("weights ")]) == len(list(model.parameters()))


@pytest.mark.parametrize("step, updates", [(3, 1), (6, 2), (STEPS, 3)])
def test_the_tables_part_holds_the_touched_rows_alone(alone, tiny_data, step, updates):
    """Which rows those are, and when each was last updated, follows from the tokens. The last cycle is cut short."""
    config = parse_args([*SHORT, f"--data={tiny_data}"])
    dataset, expected = open_dataset(config), {}
    for update in range(1, updates + 1):
        for at in range(3 * update - 3, min(3 * update, STEPS)):
            batch = make_batch(dataset.train.read(at * 13, 13), 13, 13, dataset.doc_start)
            rows, _ = ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
            expected |= dict.fromkeys(rows.flatten().tolist(), update)
    found = contents(alone.checkpoint(step))
    assert dict(zip(found["ids"].tolist(), found["last"].tolist())) == expected
    assert found["counts"].tolist() == [step, step, updates] and len(expected) < 4001
    assert found["ids"].tolist() == sorted(expected) and found["rows"].shape == (len(expected), 32)


def test_a_large_table_is_cut_into_parts(go, alone, monkeypatch):
    monkeypatch.setattr(train_gpt.NgramTable, "PART_ROWS", 100)
    parts = go(*WIDE, "--checkpoint_every=5")
    assert names(parts.folder) == ["latest", "r_step000006", "r_step000007"]
    rows = [len(torch.load(path, weights_only=True)["ids"]) for path in sorted(parts.checkpoint().glob("table*.pt"))]
    assert len(rows) > 10 and set(rows[:-1]) == {100} and 0 < rows[-1] <= 100
    assert_same_checkpoint(parts.checkpoint(), alone.checkpoint())
    resumed = go(f"--resume={parts.checkpoint(6)}", ranks=2)
    assert resumed.outcomes == pytest.approx([alone.loss] * 2, abs=1e-5)


# ---- resume, bit for bit ---------------------------------------------------------------------------------------------

def test_saving_changes_nothing(go, alone):
    whole = go(*WIDE, "--checkpoint")
    assert names(whole.folder) == ["latest", f"r_step{STEPS:06d}"]
    assert_same_checkpoint(whole.checkpoint(), alone.checkpoint())
    assert len(whole.losses(0)) == STEPS + 4 and whole.losses(0) == alone.losses(0)
    assert not go(*WIDE).folder.exists()  # unasked


@pytest.mark.parametrize("case, cuts", [("alone", (3, 6)), ("pair", (2, 6)), ("no table", (3,)),
                                        ("staged pair", (2, 4, 6))])
def test_a_resumed_run_ends_bit_for_bit_as_the_whole_one(go, request, case, cuts):
    ranks, options = 1 + ("pair" in case), {"config_class": Staged} if "staged" in case else {}
    if case == "no table":
        whole = go("--ngram_rows=0", *OFTEN)
    elif case == "staged pair":  # its stages change after step 2, and its head is untied after step 4
        whole = go("--ngram_update_every=2", *RECIPE, *OFTEN, ranks=2, **options)
    else:
        whole = request.getfixturevalue(case)
    for cut in cuts:
        resumed = go(f"--resume={whole.checkpoint(cut)}", ranks=ranks, run_id="second", **options)
        assert resumed.losses(0) == whole.losses(cut) and resumed.outcomes == whole.outcomes
        assert_same_checkpoint(resumed.checkpoint(), whole.checkpoint())
    header, past, now = json.loads(resumed.log.splitlines()[0].removeprefix("run:")), *map(manifest_of, (
        whole.checkpoint(cut), resumed.checkpoint()))
    assert header["resumed"] == {"run_ids": ["r"], "step": cut} and now["run_ids"] == ["r", "second"]
    assert f"resumed {whole.checkpoint(cut)} at step {cut}" in resumed.log
    final = re.search(r"final step:\S+ val_loss:\S+ train_time:(\d+)ms", resumed.log)
    assert 0 < past["train_time_s"] < now["train_time_s"] == pytest.approx(1e-3 * int(final[1]), abs=1e-3)


def test_the_step_that_met_the_target_survives_a_cut(go):
    """The target is met before the cut; the resumed run still knows, unless it has another target."""
    run = go("--target_loss=100", "--checkpoint_every=2")
    met = re.search(r"^target val_loss:100.0 met at step:0 train_time:0ms$", run.log, re.MULTILINE)
    assert met and met[0] in go(f"--resume={run.checkpoint(2)}").log
    assert "target val_loss:0.5 not met" in go(f"--resume={run.checkpoint(2)}", "--target_loss=0.5").log


# ---- another number of ranks -----------------------------------------------------------------------------------------

def test_4_2_1_3_ranks_in_turn_end_as_one_run(go):
    flags = ["--steps=9", *WIDE, "--ngram_update_every=2", *OFTEN]
    whole = go(*flags)
    leg = go(*flags, ranks=4)
    for ranks, cut in ((2, 2), (1, 4), (3, 6)):
        leg = go(f"--resume={leg.checkpoint(cut)}", ranks=ranks)
        assert leg.outcomes == pytest.approx([whole.loss] * ranks, abs=1e-5)
        assert manifest_of(leg.checkpoint(9))["world_size"] == ranks
        found, expected = (contents(run.checkpoint(9)) for run in (leg, whole))
        assert found.keys() == expected.keys()
        assert torch.equal(found["ids"], expected["ids"]) and torch.equal(found["last"], expected["last"])
        for name in found:
            error, scale = (found[name] - expected[name]).float().norm(), expected[name].float().norm()
            assert error <= 1e-3 * scale, name  # float32 sums in another order, over 9 steps of Muon


def test_more_ranks_than_rows(go):
    """Two of four ranks have no row at all, when they load and when they save."""
    whole = go("--ngram_rows=3", "--ngram_orders=2", "--ngram_update_every=2", "--ngram_dtype=float32", *OFTEN)
    four = go(f"--resume={whole.checkpoint(2)}", ranks=4)
    one = go(f"--resume={four.checkpoint(4)}")
    assert [*four.outcomes, one.loss] == pytest.approx([whole.loss] * 5, abs=1e-5)


# ---- flags -----------------------------------------------------------------------------------------------------------

# What the weights depend on, with a value that WIDE does not give; rates; the rest may change.
FIXED = dict(track="fineweb", seed=1, dtype="bfloat16", seq_len=16, batch_tokens=384, layers=1, model_dim=48, heads=4,
             ngram_rows=4003, ngram_dim=16, ngram_orders="2,4", ngram_split="1,3", ngram_signs=32,
             ngram_dtype="bfloat16", ngram_beta2=0.9, ngram_update_every=2, steps=8, value_embeds="1", tie_until=0.5)
RATES = dict(muon_lr=0.5, adam_lr=0.5, weight_decay=0.5, ngram_lr=0.5, ngram_wd=0.0)
FREE = dict(compile=True, checkpoint=True, checkpoint_every=9, checkpoint_keep=9, data="other", epochs=9,
            micro_batch_tokens=64, val_tokens=64, val_every=9, target_loss=0.5, sample_tokens=9, head_chunk_tokens=9,
            ngram_device="cpu")
LAUNCH = dict(device="cpu", run_id="other", out="other", dry_run=True, ranks=3, gpu="H100", resume="", new_rates=True)


def as_flag(name: str, value) -> str:
    return f"--no_{name}" if value is False else f"--{name}" if value is True else f"--{name}={value}"


def test_every_flag_is_fixed_or_a_rate_or_free():
    assert sorted([*FIXED, *RATES, *FREE, *LAUNCH]) == sorted(f.name for f in fields(Config) if f.metadata)


def test_flags_that_contradict_the_checkpoint_are_refused_by_name(alone):
    """One by one, with what is there; rates with a hint at what lets them change, which then does."""
    base, saved = ["--device=cpu", f"--resume={alone.checkpoint(3)}"], manifest_of(alone.checkpoint(3))["config"]
    for name, value in (FIXED | RATES).items():
        with pytest.raises(UserError, match="step000003: found flags that contradict the checkpoint:") as error:
            parse_args([*base, as_flag(name, value)])
        there = re.escape(str(saved[name]))
        assert re.search(rf": --{name}=.+ \(there {there}\); .*--new_rates", str(error.value)), name
        with nullcontext() if name in RATES else pytest.raises(UserError, match="contradict"):
            assert getattr(parse_args([*base, "--new_rates", as_flag(name, value)]), name) == value


def test_all_contradictions_are_named_at_once(alone):
    """With what was found and what is there; a flag that repeats what is there contradicts nothing."""
    before = tree(alone.out)
    with pytest.raises(UserError) as error:
        train_gpt.main([f"--resume={alone.checkpoint(3)}", f"--out={alone.out}", "--steps=8", "--layers=2",
                        "--ngram_orders=2", "--seed=3"])
    assert "checkpoint: --seed=3 (there 0), --ngram_orders=[2] (there [2, 3]), --steps=8 (there 7);" in str(error.value)
    assert "--layers" not in str(error.value) and tree(alone.out) == before


def test_flags_not_given_are_inherited_and_free_ones_change(alone):
    base = ["--device=cpu", f"--resume={alone.checkpoint(3)}"]
    saved, config = manifest_of(alone.checkpoint(3))["config"], parse_args(base)
    assert (config.run_id, config.out, config.resume) == ("", str(alone.out), str(alone.checkpoint(3)))
    for name in [name for name in saved if name not in ("run_id", "out", "resume")]:
        assert json.loads(json.dumps(getattr(config, name))) == saved[name], name
    for name, value in (FREE | LAUNCH).items():
        if name != "resume":
            needed = ["--dry_run"] * (name in ("ranks", "gpu"))
            assert getattr(parse_args([*base, *needed, as_flag(name, value)]), name) == value
    assert parse_args([*base, "--track=auto"]).track == "cpu"
    assert parse_args([*base, *(as_flag(name, saved[name]) for name in ("steps", "seed", "ngram_lr"))]) == config


def test_a_resumed_run_heeds_free_flags(go, alone):
    resumed = go(f"--resume={alone.checkpoint(3)}", "--val_every=2", "--checkpoint_every=5", "--micro_batch_tokens=64",
                 "--head_chunk_tokens=50", "--val_tokens=1024", "--target_loss=4.5", "--sample_tokens=5")
    assert re.findall(r"^step:(\d+)/7 val_loss", resumed.log, re.MULTILINE) == ["4", "6", "7"]
    assert names(resumed.folder) == ["latest", "r_step000006", "r_step000007"]
    assert re.search(r"^sample:\n  \| \d+( \d+){4}$", resumed.log, re.MULTILINE)
    assert "target val_loss:4.5 " in resumed.log


def test_another_data_set_is_refused(alone, tmp_path):
    """Whether its first shard differs, or a later one, or their number, from which spread rows take their order."""
    first, second, val = markov_tokens(30_000, 2), markov_tokens(20_001, 3), markov_tokens(5_000, 4)  # as in tiny_data
    cases = [(markov_tokens(30_000, 9), second), (first, markov_tokens(20_001, 9)), (first, second[:20_000]),
             (first, second, second)]
    for i, shards in enumerate(cases):
        data = tmp_path / str(i)
        data.mkdir()
        for number, tokens in enumerate(shards, 1):
            write_shard(data / f"tiny_train_{number:06d}.bin", tokens)
        write_shard(data / "tiny_val_000000.bin", val)
        expected = f"expected the one that {alone.checkpoint(3)} was"
        with pytest.raises(UserError, match=f"{data}.*: found another data set .*{expected}"):
            train_gpt.main([f"--resume={alone.checkpoint(3)}", f"--data={data}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_more_shards_are_welcome_where_rows_are_not_spread(go, tiny_data, tmp_path):
    run = go("--checkpoint_every=4", config_class=InOrder)
    data = shutil.copytree(tiny_data, tmp_path / "more")
    write_shard(data / "tiny_train_000003.bin", markov_tokens(5_000, 9))
    resumed = go(f"--resume={run.checkpoint(4)}", f"--data={data}", config_class=InOrder)
    assert_same_checkpoint(resumed.checkpoint(), run.checkpoint())


def test_a_checkpoint_belongs_to_the_trainer_or_the_variant_that_wrote_it(on, go, alone, tmp_path):
    """Its classes are named with their files, on both sides."""
    ours = "train_gpt.py: Config, train_gpt.py: GPT, train_gpt.py: NgramTable"
    theirs = ours.replace("train_gpt.py: Config", "staged.py: Staged")
    staged = go("--checkpoint_every=4", config_class=Staged)
    resume = [f"--resume={staged.checkpoint(4)}", f"--out={tmp_path / 'out'}"]
    refused, = on(1, resume)
    found = f"UserError: {staged.checkpoint(4)}: found a checkpoint of {theirs}"
    assert refused.startswith(f"{found}, expected one of {ours};")
    refused, = on(1, [f"--resume={alone.checkpoint(3)}", f"--out={tmp_path / 'out'}"], config_class=Staged)
    assert refused.startswith(f"UserError: {alone.checkpoint(3)}: found ")
    assert "Staged" in refused and "Config" in refused
    assert not (tmp_path / "out").exists()


def test_the_last_step_resumes_to_nothing_at_all(go, alone):
    """The final lines again, in a log of its own, and no checkpoint."""
    before = tree(alone.folder)
    again = go("--resume=latest", "--checkpoint_keep=1", out=alone.out, run_id="again")
    assert again.outcomes == alone.outcomes and re.search(r"^final step:7/7 val_loss", again.log, re.MULTILINE)
    assert "train_loss" not in again.log and "checkpoint " not in again.log.replace(str(alone.checkpoint()), "")
    assert tree(alone.folder) == before


def test_latest_is_what_out_says(go, alone, tmp_path):
    """--resume=latest takes the checkpoint that `latest` names, in a folder that was moved too. One may be renamed."""
    moved = shutil.copytree(alone.out, tmp_path / "moved")
    (moved / "checkpoints/latest").write_text("r_step000003\n")
    config = parse_args(["--device=cpu", "--resume=latest", f"--out={moved}"])
    assert config.resume == str(moved / "checkpoints/r_step000003")
    renamed = alone.checkpoint(6).rename(tmp_path / "the best one")
    try:
        assert go(f"--resume={renamed}/").outcomes == alone.outcomes
    finally:
        renamed.rename(alone.checkpoint(6))


@pytest.mark.parametrize("latest", [None, b"", b"r_step000099", b"\0\0\0\0", b"\xff\xfe\x80"])
def test_latest_that_names_no_checkpoint(tmp_path, latest):
    (tmp_path / "checkpoints").mkdir()
    if latest is not None:
        (tmp_path / "checkpoints/latest").write_bytes(latest)
    with pytest.raises(UserError, match=rf"^{tmp_path}/checkpoints.*: found .*, expected .*--resume"):
        parse_args(["--resume=latest", f"--out={tmp_path}"])


# ---- damage ----------------------------------------------------------------------------------------------------------

KINDS = ["manifest.json", "dense.pt", "table0000_0000.pt", "table0001_0000.pt"]


@pytest.fixture
def damaged(pair, tmp_path):
    """A copy of a checkpoint, for damage; the folder of its run's log is tmp_path / "out"."""
    return shutil.copytree(pair.checkpoint(4), tmp_path / "copy_step000004")


def assert_refused(path: Path, named: str, tmp_path: Path) -> None:
    """Before anything is loaded or written."""
    error = rf"^{path}/{named}: found .*, expected .*(older (one|checkpoint)|see --resume)$"
    with pytest.raises(UserError, match=error):
        train_gpt.main(["--device=cpu", f"--resume={path}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def assert_all_raise(error: str, outcomes: list) -> None:
    """The first rank to fail its UserError, and the others after it."""
    pattern = rf"(UserError|FollowingError: rank \d failed first: error): {error}.*"
    told = [re.fullmatch(pattern, text) for text in outcomes]
    assert all(told) and [found[1] for found in told].count("UserError") == 1, outcomes


@pytest.mark.parametrize("name", KINDS)
def test_a_part_with_a_flipped_byte_or_cut_short_or_grown_or_missing_is_named(damaged, tmp_path, name):
    whole, draw = (damaged / name).read_bytes(), random.Random(name)
    for position in (0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(4))):
        flipped = whole[position] ^ 1 << draw.randrange(8)
        (damaged / name).write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1:])
        assert_refused(damaged, name, tmp_path)
    for content in (whole[:-1], b"", whole + b"x"):
        (damaged / name).write_bytes(content)
        assert_refused(damaged, name, tmp_path)
    (damaged / name).unlink()
    assert_refused(damaged, name, tmp_path)


def test_damage_is_found_by_whichever_rank_reads_the_file(on, damaged, tmp_path):
    for name in KINDS[1:]:
        whole = (damaged / name).read_bytes()
        (damaged / name).write_bytes(whole[:99] + bytes([whole[99] ^ 4]) + whole[100:])
        outcomes = on(2, ["--device=cpu", f"--resume={damaged}", f"--out={tmp_path / 'out'}"])
        assert_all_raise(rf"{damaged}/{name}: found", outcomes)
        (damaged / name).write_bytes(whole)
    assert not (tmp_path / "out").exists()


def test_a_part_of_another_checkpoint_is_found(pair, damaged, tmp_path):
    for name in KINDS[1:]:
        whole = (damaged / name).read_bytes()
        shutil.copy(pair.checkpoint(2) / name, damaged / name)
        assert_refused(damaged, name, tmp_path)
        (damaged / name).write_bytes(whole)
    shutil.copy(pair.checkpoint(2) / "manifest.json", damaged / "manifest.json")
    assert_refused(damaged, r"\w+.pt", tmp_path)


@pytest.mark.parametrize("text", [b"{}", b"[]", b"null", b'"text"', b"not json", b"\xff\xfe\x00", b'{"sha256": 5}',
                                  b"{" * 100_000])
def test_a_foreign_manifest_is_refused(damaged, tmp_path, text):
    (damaged / "manifest.json").write_bytes(text)
    assert_refused(damaged, "manifest.json", tmp_path)


def test_a_manifest_of_another_version_is_refused_with_what_differs(damaged, tmp_path):
    manifest = manifest_of(damaged)
    sign(damaged, manifest | {"format": 1})
    assert_refused(damaged, "manifest.json", tmp_path)
    kept = {name: value for name, value in manifest["config"].items() if name != "heads"}
    sign(damaged, manifest | {"config": kept | {"new_flag": 1}})
    with pytest.raises(UserError, match="disagrees on the fields heads, new_flag, expected"):
        parse_args([f"--resume={damaged}"])


def test_what_is_no_checkpoint_is_refused(alone, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", alone.checkpoint() / "dense.pt", alone.folder):
        assert_refused(path, "manifest.json", tmp_path)


def test_an_older_checkpoint_serves_where_the_newest_is_damaged(go, on, alone, tmp_path):
    out = shutil.copytree(alone.out, tmp_path / "out")
    (out / "checkpoints/r_step000007/dense.pt").write_bytes(b"")
    refused, = on(1, ["--resume=latest", f"--out={out}"])
    assert "r_step000007/dense.pt: found 0 bytes" in refused
    resumed = go(f"--resume={out}/checkpoints/r_step000003", out=out, run_id="on")
    assert resumed.outcomes == alone.outcomes and (out / "checkpoints/latest").read_text() == "on_step000007"
    assert_same_checkpoint(resumed.checkpoint(), alone.checkpoint())


# ---- what cannot be written, or is not worth it ----------------------------------------------------------------------

def test_all_ranks_train_on_together_where_one_cannot_write(on, go, pair, tiny_data, tmp_path):
    """The disk of rank 1 is full after the first checkpoint, for the table grows: warnings, an error at the very end,
    and the older checkpoint unharmed."""
    limit = (pair.checkpoint(2) / "table0001_0000.pt").stat().st_size + 1
    flags = [*SHORT, f"--data={tiny_data}", "--ngram_update_every=2", *OFTEN, f"--out={tmp_path}", "--run_id=full"]
    outcomes = on(2, flags, file_limit=limit)
    log, folder = (tmp_path / "full.txt").read_text(), tmp_path / "checkpoints"
    for step in (4, 6):
        found = rf"\.full_step00000{step}\.part/table0001_0000\.pt: found File too large"
        warning = rf"^warning: no checkpoint at step {step}: .*{found}, .*; training continues$"
        assert re.search(warning, log, re.MULTILINE)
    assert re.findall(r"^step:(\d+)/7 train_loss", log, re.MULTILINE) == [str(step) for step in range(1, STEPS + 1)]
    error = r"\S*full_step000007\.part/table0001_0000\.pt: found File too large, expected"
    assert_all_raise(error, outcomes)
    assert re.match(f"error: {error}", log.splitlines()[-1])
    assert f"final step:7/7 val_loss:{pair.loss:.5f}" in log
    assert names(folder) == ["full_step000002", "latest"] and (folder / "latest").read_text() == "full_step000002"
    assert_same_checkpoint(folder / "full_step000002", pair.checkpoint(2))
    assert go("--resume=latest", out=tmp_path, run_id="on").loss == pytest.approx(pair.loss, abs=1e-4)


def test_a_log_that_cannot_be_written_ends_no_training(on, alone, tiny_data, tmp_path):
    """The disk is full of other things."""
    flags = [*SHORT, f"--data={tiny_data}", *WIDE, f"--out={tmp_path}"]
    assert on(1, [*flags, "--run_id=a"]) == alone.outcomes  # leaves the source there, which is larger than the log
    limit = (tmp_path / "a.txt").read_text().index("step:4/7 train_loss")
    assert on(1, [*flags, "--run_id=b"], file_limit=limit) == alone.outcomes
    log = (tmp_path / "b.txt").read_text()
    assert "step:2/7 train_loss" in log and "step:5/7" not in log


def test_a_folder_that_is_taken_is_refused_before_training(on, tiny_data, tmp_path):
    """A file in its place, or another process that trains there; without checkpoints nobody minds."""
    flags, folder = [*SHORT, f"--data={tiny_data}", f"--out={tmp_path}"], tmp_path / "checkpoints"
    folder.touch()
    refused, = on(1, [*flags, "--checkpoint", "--run_id=a"])
    assert re.match(rf"UserError: {folder}: found File exists, expected", refused)
    folder.unlink()
    with train_gpt.lock_folder(folder, "training"):
        refused, = on(1, [*flags, "--checkpoint", "--run_id=b"])
        assert re.match(rf"UserError: {folder}: found another process training there, expected none", refused)
        assert isinstance(on(1, [*flags, "--run_id=c"])[0], float)
    for run_id in "ab":
        assert "step:" not in (tmp_path / f"{run_id}.txt").read_text()


def test_the_work_is_saved_before_the_final_evaluation(go, on, alone, monkeypatch, tmp_path):
    """Which may fail, or find that all was in vain."""
    evaluate = train_gpt.Trainer.evaluate

    def breaks(trainer, step, parts=None):
        if step == STEPS and trainer.optimizer.updates == STEPS:
            raise RuntimeError("the evaluation broke")
        return evaluate(trainer, step, parts)

    flags = ["--device=cpu", f"--resume={alone.checkpoint(6)}", "--checkpoint_keep=1"]
    for run_id, broken, error in (
            ("a", breaks, "RuntimeError: the evaluation broke"),
            ("b", lambda trainer, step, parts=None: math.nan, "UserError: validation loss: found nan at step 7,")):
        with monkeypatch.context() as patched:
            patched.setattr(train_gpt.Trainer, "evaluate", broken)
            refused, = on(1, [*flags, f"--out={tmp_path}", f"--run_id={run_id}", "--val_every=0"])
        assert refused.startswith(error)
        assert go("--resume=latest", out=tmp_path, run_id=f"{run_id}2").outcomes == alone.outcomes
        assert (tmp_path / "checkpoints/latest").read_text() == f"{run_id}_step000007"


@pytest.mark.parametrize("every", [1, 3])
def test_rows_that_are_not_finite_replace_no_good_checkpoint(go, on, tmp_path, every):
    """Nor do those so large that no more can come of them. Nothing looks at the losses between two cycles of 3."""
    flags = [f"--ngram_update_every={every}", "--val_every=0", "--checkpoint_every=3"]
    good = go(*flags, out=tmp_path)
    good.folder.joinpath("latest").write_text("r_step000003")
    resume = ["--device=cpu", "--resume=latest", f"--out={tmp_path}"]
    bad, = on(1, [*resume, "--new_rates", "--ngram_lr=1e30", "--checkpoint_keep=1", f"--checkpoint_every={every}",
                  "--run_id=bad"])
    warning = r"^warning: no checkpoint at step \d: \S+/table0000_0000.pt: found rows that are not finite.*--new_rates"
    assert re.search(warning, (tmp_path / "bad.txt").read_text(), re.MULTILINE)
    assert re.match("UserError: (training|validation) loss: found nan ", bad)
    assert (good.folder / "latest").read_text() == "r_step000003" and names(good.folder) == [
        "latest", "r_step000003", "r_step000006", "r_step000007"]
    changed, = on(1, [*resume, "--ngram_lr=0.1"])
    assert "--ngram_lr=0.1 (there 0.56)" in changed and "--new_rates" in changed
    better = go("--resume=latest", "--new_rates", "--ngram_lr=0.1", out=tmp_path, run_id="better")
    assert math.isfinite(better.loss) and better.loss != good.loss
    assert manifest_of(better.checkpoint())["config"]["ngram_lr"] == 0.1


# ---- which checkpoints stay ------------------------------------------------------------------------------------------

def test_the_newest_are_kept_and_leftovers_swept(go, tmp_path):
    """Those of the run itself and of its predecessors; another run's checkpoints, and what a user made of one, are not
    touched. The one just written stays, though older ones come from the future, as where a clock was set back."""
    folder = tmp_path / "checkpoints"
    leftovers = [".r_step000002.part", ".r_step000001.removed.part", ".other_step000002.part"]
    others = ["other_step000001", "rr_step000001", "r_step000001_mine"]
    for name in (*leftovers, *others):
        (folder / name).mkdir(parents=True)
        (folder / name / "dense.pt").write_bytes(b"x")
    for name in ("r_step000001.tar", "notes_step", ".latest.part"):
        (folder / name).write_bytes(b"x")
    others += ["r_step000001.tar", "notes_step", "latest"]
    first = go("--checkpoint_every=1", "--checkpoint_keep=3", out=tmp_path)
    assert names(folder) == sorted([*others, *(f"r_step00000{step}" for step in (5, 6, 7))])
    assert (folder / "latest").read_text() == "r_step000007"
    for path in folder.glob("r_step*"):
        os.utime(path, (time.time() + 9999, time.time() + 9999))
    second = go(f"--resume={first.checkpoint(5)}", "--checkpoint_keep=1", out=tmp_path, run_id="second")
    assert names(folder) == sorted([*others, "second_step000007"])
    assert (folder / "latest").read_text() == "second_step000007"
    assert second.outcomes == first.outcomes


def test_a_checkpoint_of_the_same_name_gives_way(go, tmp_path):
    """The log was deleted and the run started over under its name, which looks like a checkpoint's or a pattern."""
    run_id = "a_step000001[x]*.removed"
    first = go("--checkpoint_every=3", out=tmp_path, run_id=run_id)
    (tmp_path / f"{run_id}.txt").unlink()
    again = go("--checkpoint_every=3", "--seed=1", out=tmp_path, run_id=run_id)
    assert names(tmp_path / "checkpoints") == [f"{run_id}_step00000{step}" for step in (3, 6, 7)] + ["latest"]
    assert manifest_of(again.checkpoint())["config"]["seed"] == 1 and again.outcomes != first.outcomes

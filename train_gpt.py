"""Train a GPT with a hashed n-gram memory to a target validation loss in the least wall-clock time.

examples:
    python train_gpt.py                                         one process, the `cpu` track
    torchrun --standalone --nproc_per_node=8 train_gpt.py       one process a GPU, the `fineweb` track
    python train_gpt.py --ngram_rows=0 --seed=3 --dry_run       flags above the track's; this prints the plan alone

The file reads top to bottom as a token travels. Importing it does nothing: the scripts under data/ and records/ do, and
variants of the trainer, which subclass Config, GPT or NgramTable and call `main` with them (records/README.md).
"""
from __future__ import annotations

import argparse
import base64
import ctypes
import difflib
import fnmatch
import functools
import hashlib
import json
import math
import mmap
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.optim.adamw import adamw


# ==== Config: every size and switch of a run. One frozen dataclass; the command line is made from its fields ==========

def flag(default, help_text: str, group: str = ""):
    """A field of Config that is a flag too, first of its group in --help or not; tracks and variants set others."""
    return field(default=default, metadata={"help": help_text, "group": group})


@dataclass(frozen=True)
class Config:
    track: str = flag("auto", "preset: cpu, fineweb, or for one GPU fineweb80 or fineweb24; auto: by the device", "run")
    device: str = flag("auto", "cpu or cuda; auto takes cuda where there is one")
    seed: int = flag(0, "seed of the weights; the data and the sign patterns never depend on it")
    run_id: str = flag("", "name of the log file; empty makes one of the date and the seed")
    out: str = flag("logs", "folder of the log and the checkpoints")
    dtype: str = flag("auto", "arithmetic of the model: bfloat16 (auto: where the device has units for it) or float32")
    compile: bool = flag(False, "torch.compile the model (on by default in the fineweb track)")
    dry_run: bool = flag(False, "print the plan (parameters, memory, tokens, exchange) and stop")
    ranks: int = flag(0, "with --dry_run, plan for so many ranks, which need not be there; 0: those that run")
    gpu: str = flag("", "with --dry_run, the GPU to plan for: H200, H100, A100, L40 or 4090")
    checkpoint: bool = flag(False, "save a checkpoint at the end, and when a signal stops the run", "checkpoints")
    checkpoint_every: int = flag(0, "steps between checkpoints, besides those of --checkpoint; 0: none")
    checkpoint_keep: int = flag(2, "checkpoints of a run that are kept, the newest ones")
    resume: str = flag("", "checkpoint to resume: its folder, or `latest` of --out; flags not given are as in its run")
    new_rates: bool = flag(False, "with --resume, let learning rates and decays differ from the checkpoint's")
    data: str = flag("data/torch_source", "folder of *_train_*.bin and *_val_*.bin shards", "data")
    epochs: int = flag(1, "how often the train shards may be read through")
    seq_len: int = flag(128, "tokens a row")
    batch_tokens: int = flag(4096, "tokens a step over all ranks")
    micro_batch_tokens: int = flag(0, "tokens a rank holds in memory at once; 0: its whole part of a step")
    spread_rows: bool = True  # take rows from all over the data in a fixed order, for unshuffled documents
    stages: tuple = ({},)  # dicts of until, batch, windows, lr and length; what each lacks is as in stage_list
    val_tokens: int = flag(65_536, "validation tokens, whatever the number of ranks", "evaluation")
    val_every: int = flag(20, "steps between evaluations; 0: only at the end")
    target_loss: float = flag(3.30, "validation loss in nats a token that the run is to reach")
    sample_tokens: int = flag(96, "tokens of text to print after the last evaluation")
    layers: int = flag(3, "blocks", "model")
    model_dim: int = flag(128, "width of the residual stream")
    heads: int = flag(1, "attention heads; model_dim / heads is even")
    head_chunk_tokens: int = flag(512, "tokens whose logits exist at once")
    value_embeds: tuple = flag((0, 2), "blocks, counted from 0, whose values take in a gated embedding of their own")
    tie_until: float = flag(0.66, "fraction of the steps during which output head and embedding are one matrix")
    skips: bool = False  # add the input of each early block to that of its mirror image
    ngram_rows: int = flag(1_000_000, "rows of the table over all ranks; 0: no table", "n-gram table")
    ngram_dim: int = flag(0, "width of what a position reads, at most model_dim; 0: model_dim")
    ngram_orders: tuple = flag((2, 3), "orders of the hashed n-grams")
    ngram_split: tuple = flag((), "weights of the orders in the division of the rows, e.g. 1,3; empty: equal")
    ngram_signs: int = flag(8192, "sign patterns in the pool; 0: no signs")
    ngram_device: str = flag("auto", "where the table lies: auto, beside the model, or cpu, in host memory")
    ngram_dtype: str = flag("bfloat16", "of the rows: bfloat16 or float32")
    ngram_lr: float = flag(0.56, "learning rate of the table before the schedule")
    ngram_beta2: float = flag(0.95, "decay of the table's second moment an update")
    ngram_wd: float = flag(0.014, "weight decay of the table, only where it agrees with the update")
    ngram_update_every: int = flag(1, "steps whose gradients add up to one table update")
    steps: int = flag(180, "optimizer steps", "optimizer")
    muon_lr: float = flag(0.035, "learning rate of the matrices (Muon)")
    adam_lr: float = flag(0.03, "learning rate of everything else (Adam)")
    weight_decay: float = flag(0.0, "decoupled weight decay, times lr, times the multiplier in RULES")
    muon_momentum_cooldown: int = 0  # last steps over which Muon's momentum falls back
    # Seams, for variants of the table:
    ngram_row_dim = property(lambda self: self.ngram_dim)  # width of a row
    ngram_state_bytes = 8  # what the update keeps of a row: a second moment and the number of its last update

    def __post_init__(self):
        object.__setattr__(self, "ngram_dim", self.ngram_dim or self.model_dim)
        if self.dtype == "auto":
            known = torch.cpu.get_capabilities()
            has_units = self.device == "cuda" or known.get("amx_bf16") or known.get("avx512_bf16")
            object.__setattr__(self, "dtype", "bfloat16" if has_units else "float32")
        self.check()

    def need(self, ok: bool, name: str, expected: str) -> None:
        """Raise UserError unless ok: which flag, what was found, what was expected."""
        if not ok:
            raise UserError(f"--{name}: found {getattr(self, name)!r}, expected {expected}")

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        need, types = self.need, ("bfloat16", "float32")
        positive = {"steps", "seq_len", "batch_tokens", "val_tokens", "layers", "model_dim", "heads", "epochs",
                    "head_chunk_tokens", "ngram_update_every", "checkpoint_keep"}
        for f in fields(self):
            if type(f.default) in (int, float):
                value, least = getattr(self, f.name), int(f.name in positive)
                need(math.isfinite(value) and value >= least, f.name, f"a finite number, {least} or more")
        choices = {"track": ("auto", *TRACKS), "device": ("auto", "cpu", "cuda"), "dtype": types, "gpu": ("", *GPUS),
                   "ngram_dtype": types, "ngram_device": ("auto", "cpu")}
        for name, values in choices.items():
            need(getattr(self, name) in values, name, "one of " + ", ".join(filter(None, values)))
        for name, other in (("ranks", "dry_run"), ("gpu", "dry_run"), ("new_rates", "resume")):
            need(getattr(self, other) or not getattr(self, name), name, f"--{other} beside it")
        need(self.seed < 2**63, "seed", "less than 2^63")
        need("/" not in self.run_id, "run_id", "a file name without /")
        for name in ("batch_tokens", "val_tokens", "micro_batch_tokens"):
            need(getattr(self, name) % self.seq_len == 0, name, f"a multiple of --seq_len={self.seq_len}")
        need(self.model_dim % (2 * self.heads) == 0, "heads", f"--model_dim={self.model_dim} divided by an even number")
        need(len(set(self.value_embeds) & set(range(self.layers))) == len(self.value_embeds), "value_embeds",
             f"blocks from 0 to {self.layers - 1}, each once")
        need(self.stage_list[-1].end == self.steps, "stages", "the last one to end at 1")
        for stage in self.stage_list:
            need(stage.first <= stage.end, "stages", "ends in the order of time")
            need(0 < stage.batch_tokens <= self.batch_tokens, "stages", "batches from one row to --batch_tokens")
            need(0 < stage.length <= self.seq_len, "stages", f"segments from 1 token to --seq_len={self.seq_len}")
            need(0 < stage.windows[0] <= stage.windows[1], "stages", "windows of at least 1 token, short one first")
        if self.ngram_rows:
            self.check_table()

    def check_table(self) -> None:
        need, orders, weights = self.need, self.ngram_orders, self.ngram_split
        need(self.ngram_beta2 < 1, "ngram_beta2", "less than 1")
        need(1 <= self.ngram_dim <= self.model_dim, "ngram_dim", f"1 to --model_dim={self.model_dim}")
        need(0 < len(orders) == len(set(orders)) and set(orders) <= ROW_MULTIPLIERS.keys(), "ngram_orders",
             "different orders out of " + ",".join(map(str, ROW_MULTIPLIERS)))
        need(not weights or len(weights) == len(orders) and min(weights) > 0, "ngram_split",
             f"one positive whole number for each of the {len(orders)} orders")
        smallest = min(channel.high - channel.low for channel in self.channels)
        need(self.ngram_rows < 2**31 and smallest >= 2, "ngram_rows",
             f"at least 2 rows a hash, one being reserved (found {smallest}), and fewer than 2^31")

    @functools.cached_property
    def stage_list(self) -> tuple[Stage, ...]:
        """The stages of a run; a stage ends where an update cycle of the table ends."""
        stages, first, every, row = [], 0, self.ngram_update_every, self.seq_len
        for index, stage in enumerate(self.stages):
            stage = {"until": 1.0, "batch": 1.0, "windows": (row, row), "lr": 1.0, "length": row} | stage
            end = self.steps if stage["until"] >= 1 else round(stage["until"] * self.steps / every) * every
            batch_tokens = round(stage["batch"] * self.batch_tokens) // row * row
            stages.append(Stage(index, first, min(end, self.steps), batch_tokens, tuple(stage["windows"]),
                                stage["lr"], stage["length"]))
            first = stages[-1].end
        return tuple(stages)

    def stage(self, step: int) -> Stage:
        """The stage that a step belongs to; the end of the run belongs to the last."""
        return next((stage for stage in self.stage_list if step < stage.end), self.stage_list[-1])

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one: the position in the stream."""
        return sum(max(0, min(step, stage.end) - stage.first) * stage.batch_tokens for stage in self.stage_list)

    def micro_rows(self, world_size: int, batch_tokens: int) -> int:
        """Rows of a micro-batch: the largest rank's part of a step in as few equal parts as micro_batch_tokens asks."""
        rows = -(-batch_tokens // self.seq_len // world_size)
        parts = -(-rows // (self.micro_batch_tokens // self.seq_len or rows))
        return -(-rows // parts)

    def most_micro_rows(self, world_size: int) -> int:
        """Of any stage."""
        return max(self.micro_rows(world_size, stage.batch_tokens) for stage in self.stage_list)

    def cycle_steps(self, cycle: int) -> range:
        """The steps of an update cycle of the table."""
        first = cycle * self.ngram_update_every
        return range(first, min(first + self.ngram_update_every, self.steps))

    @property
    def untie_step(self) -> int:
        """From this step on output head and embedding are two matrices; rounded to a cycle of the table."""
        return round(self.tie_until * self.steps / self.ngram_update_every) * self.ngram_update_every

    @functools.cached_property
    def channels(self) -> tuple[Channel, ...]:
        """The hashes by which a position is addressed, one for each row that it reads. A seam."""
        return tuple(Channel(order, low, high, high - low - 1, ROW_MULTIPLIERS[order], SIGN_MULTIPLIERS[order])
                     for order, (low, high) in zip(self.ngram_orders, channel_bounds(self)))


class Stage(NamedTuple):
    """Steps [first, end) of a run with a batch, attention windows (short and long) and a learning rate factor of their
    own. A shorter sequence is a row with more segments, each of at most `length` tokens, so that no shape changes."""
    index: int
    first: int
    end: int
    batch_tokens: int
    windows: tuple[int, int]
    lr: float
    length: int


TRACKS = {
    "cpu": {},  # the defaults above
    "fineweb": dict(  # eight 80 GB GPUs; batches, windows and learning rates grow together, as in recent records
        data="data/fineweb10B", spread_rows=False, compile=True, seq_len=2048, batch_tokens=393_216,
        stages=(dict(until=1 / 3, batch=1 / 3, windows=(384, 896), lr=0.6),
                dict(until=2 / 3, batch=2 / 3, windows=(640, 1408), lr=0.85),
                dict(until=1.0, windows=(896, 1664))),
        micro_batch_tokens=49_152, head_chunk_tokens=8192, val_tokens=10_485_760, val_every=125, target_loss=3.28,
        sample_tokens=0, layers=11, model_dim=768, heads=6, skips=True, value_embeds=(0, 1, 2, 9, 10), tie_until=2 / 3,
        steps=1600, muon_lr=0.023, muon_momentum_cooldown=50, weight_decay=1.2, adam_lr=0.008, ngram_rows=84_602_880,
        ngram_update_every=2),
}
TRACKS["fineweb80"] = TRACKS["fineweb"] | dict(ngram_rows=21_150_720)  # one GPU of 80 GB or more: a table of 30 GiB
TRACKS["fineweb24"] = TRACKS["fineweb"] | dict(ngram_rows=2_643_840, ngram_update_every=1, micro_batch_tokens=8_192,
                                               head_chunk_tokens=4_096)  # one GPU of 24 GB

# On resume: what belongs to a launch is never taken from the checkpoint; what no weight depends on but for rounding may
# change; rates may with --new_rates.
OF_A_LAUNCH = {"device", "run_id", "out", "dry_run", "ranks", "gpu", "resume", "new_rates"}
FREE_ON_RESUME = OF_A_LAUNCH | {"compile", "checkpoint", "checkpoint_every", "checkpoint_keep", "data", "epochs",
                                "val_tokens", "val_every", "micro_batch_tokens", "head_chunk_tokens", "target_loss",
                                "sample_tokens", "ngram_device"}
RATES = {"muon_lr", "adam_lr", "weight_decay", "ngram_lr", "ngram_wd"}


def parse_ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip("()[] ").split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected whole numbers with commas between") from None


def parse_flags(config_class, argv: list[str]) -> dict:
    """Field name -> value for the flags in argv: `--flag=value` or `--flag value`, dash or underscore, `--no-flag`.
    Raises UserError that names a bad value or an unknown flag, with the nearest that there is; --help exits."""
    parser = argparse.ArgumentParser(prog="train_gpt.py", allow_abbrev=False, exit_on_error=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n\nThe file")[0])
    flags = [f for f in fields(config_class) if f.metadata]
    titles, title = {f.name: f.metadata.get("group") for f in fields(Config)}, ""
    group = functools.cache(parser.add_argument_group)
    for f in flags:
        kind, title = type(f.default), titles.get(f.name, "variant") or title
        how = dict(type=parse_ints if kind is tuple else kind, metavar=kind.__name__.upper())
        if kind is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        default = ",".join(map(str, f.default)) if kind is tuple else str(f.default)
        how["help"] = (f.metadata["help"] + f" (default {default})" * bool(default)).replace("%", "%%")
        group(title).add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **how)
    dashed = [re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), word) for word in argv]
    try:
        given, unknown = parser.parse_known_args(dashed)
    except argparse.ArgumentError as error:
        raise UserError(f"{str(error).removeprefix('argument ')} (--help lists all flags)") from None
    for word in unknown:
        near = difflib.get_close_matches(word.partition("=")[0], ["--" + f.name.replace("_", "-") for f in flags], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{word}: found no such flag; {hint}--help lists all")
    return vars(given)


def parse_args(argv: list[str], config_class=Config) -> Config:
    """Command line to Config; the flags stand above the track's preset. Raises UserError."""
    given = parse_flags(config_class, argv)
    if given.get("device", "auto") == "auto":
        given["device"] = find_device()
    if given.get("track") == "auto":
        del given["track"]
    if given.get("resume"):
        return resumed_config(given, config_class)
    track = given.setdefault("track", "fineweb" if given["device"] == "cuda" else "cpu")
    preset = {"layers": config_class.layers, "value_embeds": config_class.value_embeds} | TRACKS.get(track, {})
    layers = given.get("layers", preset["layers"])  # fewer than the preset's lack some of its blocks
    preset["value_embeds"] = tuple(block for block in preset["value_embeds"] if block < layers)
    return config_class(**(preset | given))


def find_device() -> str:
    """cuda or cpu. Raises UserError for a GPU that torch cannot use: hours on the CPU are no answer to that."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(Path("/dev").glob("nvidia[0-9]*")):
        raise UserError(f"--device=auto: found an NVIDIA GPU in /dev that torch {torch.__version__} does not see, "
                        f"expected it to; install a driver and a torch that fit, or train on the CPU with --device=cpu")
    return "cpu"


def resumed_config(given: dict, config_class) -> Config:
    """The configuration of a checkpoint's run with the flags given now, which must not contradict it."""
    path = find_checkpoint(given["resume"], given.get("out", Config.out))
    if "out" not in given and path.parent.name == "checkpoints":  # the next `latest` is found where this one was
        given["out"] = str(path.parent.parent)
    saved = read_manifest(path)["config"]
    if unknown := saved.keys() ^ {f.name for f in fields(config_class)}:
        raise UserError(f"{path}: found a checkpoint that disagrees on the fields {', '.join(sorted(unknown))}, "
                        f"expected none that does; resume with the source beside its run's log")
    kept = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
            if name not in OF_A_LAUNCH}
    config = config_class(**(kept | given | {"resume": str(path)}))
    here, free = json.loads(json.dumps(asdict(config))), FREE_ON_RESUME | (RATES if config.new_rates else set())
    wrong = [f"--{name}={here[name]} (there {value})" for name, value in saved.items()
             if name not in free and here[name] != value]
    if wrong:
        raise UserError(f"{path}: found flags that contradict the checkpoint: {', '.join(wrong)}; leave them out, add "
                        f"--new_rates to change rates, or start another run without --resume")
    return config


# ==== Errors, and files that are whole or absent ======================================================================

class UserError(Exception):
    """A fault that the user can mend; names the thing, what was found, what was expected, and the remedy."""


class FollowingError(Exception):
    """This rank failed because another had failed first, whose error this repeats."""
    first = False


class Stopped(SystemExit):
    """A signal ended the run; the exit status is the shell's, 128 + signal."""

    def __init__(self, signum: int, how: str = ""):
        super().__init__(128 + signum)
        self.text = f"stopped by {signal.Signals(signum).name}{how}"


def describe(error: BaseException) -> str:
    """One line for the log and the end of the screen."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        text += "; lower --micro_batch_tokens or --head_chunk_tokens (see --dry_run)"
    return error.text if isinstance(error, Stopped) else f"error: {text}"


def run_command(main, *arguments, **options) -> None:
    """main(...) as a process: for what the user can mend one line, else a traceback and that line; status 1. The first
    rank to fail speaks, or rank 0 where all fail before they have met; torchrun's summary repeats it."""
    status, text, speaks = 1, "", os.environ.get("RANK", "0") == "0"
    try:
        record(main)(*arguments, **options)
        return
    except KeyboardInterrupt:
        status, text = 130, "interrupted; run the same command again"
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except (Exception, Stopped) as error:
        text, speaks = describe(error), getattr(error, "first", speaks)
        if isinstance(error, Stopped):
            status = error.code
        elif not isinstance(error, (UserError, FollowingError, OSError)):
            traceback.print_exc()
    if text and speaks:
        print(f"\n{text}", file=sys.stderr, flush=True)
    sys.exit(status)


def flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def written_whole(path: Path):
    """Yields a path to write to, which becomes `path` where the block succeeds and is deleted where it fails."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        flush_to_disk(part)
        part.replace(path)
        flush_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def lock_folder(folder: Path, doing: str) -> FileLock:
    """A lock on a folder, made if need be, that goes with the process. Raises UserError where another holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        found, expected = f"another process {doing} there", "none; wait for it"
    except OSError as error:
        found, expected = error.strerror, "a folder to write to"
    raise UserError(f"{folder}: found {found}, expected {expected}, or choose another --out")


# ==== Ranks: who this process is among the others. Plain `python` is a world of one, and runs the same code ===========

TIMEOUT = timedelta(seconds=600)  # after which a collective whose partner is silent fails


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_size: int
    device: torch.device
    loader_group: dist.ProcessGroup  # gloo; of the loader's thread alone: its collectives never meet training's
    store: dist.Store  # torchrun's, which outlives any rank

    @property
    def main(self) -> bool:
        return self.rank == 0

    def part(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """[first, last) of `count` things that belong to a rank (default: this one), some of them one more."""
        rank = self.rank if rank is None else rank
        return rank * count // self.size, (rank + 1) * count // self.size

    def first_failure(self, mine: str) -> tuple[int, str]:
        """Rank and words of the first rank to fail: this one with `mine`, unless another was earlier."""
        try:
            rank, _, text = self.store.compare_set("first_failure", "", f"{self.rank} {mine}").decode().partition(" ")
            return int(rank), text
        except dist.DistError:  # torchrun itself is gone
            return self.rank, mine


@contextmanager
def join_world(config, stop: StopSignal | None = None):
    """Join torchrun's processes, or make a world of one; yields World and leaves the process group at the end."""
    rank, size, local_rank, local_size = 0, 1, 0, 1
    if launched := bool(os.environ.keys() & {"RANK", "WORLD_SIZE"}):
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"
        found = [os.environ.get(name, "") for name in names]
        if not all(number.isdecimal() for number in found) or "MASTER_ADDR" not in os.environ:
            raise UserError(f"environment: found {' '.join(map('='.join, zip(names, found)))}, expected numbers and "
                            f"MASTER_ADDR; start with `torchrun --standalone --nproc_per_node=N train_gpt.py`")
        rank, size, local_rank, local_size = map(int, found[:4])
    device, backend = torch.device("cpu"), "gloo"
    if config.device == "cuda":
        if local_rank >= (found := torch.cuda.device_count()):
            raise UserError(f"--device=cuda: found {found} GPUs, expected one for each of {local_size} processes; "
                            f"start fewer, or use --device=cpu")
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    store = next(dist.rendezvous("env://", timeout=TIMEOUT))[0] if launched else dist.HashStore()
    ours = dist.PrefixStore("ranks", store)
    dist.init_process_group(backend, store=ours, rank=rank, world_size=size, timeout=TIMEOUT)
    world = World(rank, size, local_size, device, dist.new_group(backend="gloo", timeout=TIMEOUT), store)
    if stop:
        stop.world = world
    try:
        yield world
    except BaseException as error:
        first, text = world.first_failure(describe(error))  # before the other ranks can notice
        if device.type == "cpu":  # NCCL may wait for a partner that is gone; the process is about to end anyhow
            dist.destroy_process_group()
        for loader in [thread for thread in threading.enumerate() if isinstance(thread, Loader)]:
            loader.end()
        if first != rank and not isinstance(error, Stopped):
            raise FollowingError(f"rank {first} failed first: {text}") from None
        error.first = first == rank
        raise
    dist.destroy_process_group()


def together(world: World, action):
    """action() on every rank. Where it fails on any, all ranks raise the lowest failing rank's UserError."""
    result = error = None
    try:
        result = action()
    except (UserError, OSError) as caught:
        error = str(caught)
    errors = [None] * world.size
    dist.all_gather_object(errors, error)
    if failed := [message for message in errors if message is not None]:
        raise UserError(failed[0])
    return result


class StopSignal(ExitStack):
    """SIGTERM, SIGINT and SIGHUP. While `may_wait`, training ends with the update cycle under way; at other times, or
    asked twice, or where a rank has failed (the signal is torchrun's then), the run ends at once."""

    def __init__(self):
        super().__init__()
        self.signum, self.may_wait, self.world = 0, False, None
        self.parent = os.getppid() if "RANK" in os.environ else None  # torchrun

    def __enter__(self) -> StopSignal:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            ignored = signal.getsignal(signum) == signal.SIG_IGN  # as nohup and a shell's `&` ask for
            if not ignored and threading.current_thread() is threading.main_thread():  # no other thread may set one
                self.callback(signal.signal, signum, signal.signal(signum, self.handle))
        return self

    def handle(self, signum: int, frame) -> None:
        at_once, self.signum = self.signum or not self.may_wait, self.signum or signum
        with suppress(dist.DistError):  # torchrun itself is gone
            at_once = at_once or self.world.store.check(["first_failure"])
        if at_once:
            raise Stopped(self.signum)

    def asked(self) -> bool:
        """Whether this rank is to stop; without its torchrun too, which nothing else would tell it."""
        if self.parent and self.parent != os.getppid():
            self.signum = self.signum or signal.SIGHUP
        return self.signum > 0


# ==== Tokens ==========================================================================================================
# Shards on disk, one stream of rows, each rank's batches, made ahead in a thread; the tokenizer beside them.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
GPT2_VOCAB_SIZE, GPT2_DOC_START = 50257, 50256
SHARD_HASHES = "shards.json"  # beside the shards: what `shard_hashes` knows of them


@dataclass(frozen=True)
class Shard:
    """A token file: 256 int32 (magic, version, tokens, vocabulary size, document-start token, zeros), then uint16."""
    path: Path
    num_tokens: int
    vocab_size: int
    doc_start: int

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """uint16 [count] from `first`, to the end by default. Read, not mapped: memory must not grow with the data."""
        count = self.num_tokens - first if count is None else count
        tokens = np.fromfile(self.path, np.uint16, count, offset=SHARD_HEADER_BYTES + 2 * first)
        if len(tokens) != count:
            raise UserError(f"{self.path}: found {len(tokens)} tokens from {first} on, expected {count}; make it again")
        return tokens

    def hash(self) -> str:
        """sha256 of the vocabulary and all tokens. Raises UserError where an id is not below the vocabulary size."""
        digest = hashlib.sha256(f"{self.num_tokens} {self.vocab_size} {self.doc_start}".encode())
        for first in range(0, self.num_tokens, 1 << 24):
            tokens = self.read(first, min(1 << 24, self.num_tokens - first))
            if (largest := int(tokens.max())) >= self.vocab_size:
                raise UserError(f"{self.path}: found token id {largest}, expected ids below its vocabulary size "
                                f"{self.vocab_size}; it is damaged or of another tokenizer: make it again")
            digest.update(tokens)
        return digest.hexdigest()


def open_shard(path: str | Path) -> Shard:
    """Read and check a shard's header and size. Raises UserError."""
    path = Path(path)
    size, header = path.stat().st_size, np.fromfile(path, np.int32, 5).tolist()
    magic, version, num_tokens, vocab_size, doc_start = [*header, 0, 0, 0, 0, 0][:5]
    if not vocab_size:  # as in files that are older than these fields
        vocab_size, doc_start = GPT2_VOCAB_SIZE, GPT2_DOC_START
    whole = SHARD_HEADER_BYTES + 2 * num_tokens
    if size >= SHARD_HEADER_BYTES and (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        raise UserError(f"{path}: found magic {magic} version {version}, expected {SHARD_MAGIC} version "
                        f"{SHARD_VERSION}; this is not a token shard")
    if num_tokens <= 0 or size != whole:
        raise UserError(f"{path}: found {size} bytes, expected {whole} for the {num_tokens} tokens of its header; "
                        f"it is cut short or damaged: fetch or make it again")
    if not 0 <= doc_start < vocab_size <= 1 << 16:
        raise UserError(f"{path}: found vocabulary size {vocab_size} and document-start token {doc_start}, expected "
                        f"0 <= document start < vocabulary size <= 65536; make it again")
    return Shard(path, num_tokens, vocab_size, doc_start)


def shard_hashes(shards: list[Shard], rank: int = 0, size: int = 1) -> dict[str, list]:
    """name -> [bytes, time of change in ns, hash] of shards of one folder: from its manifest where bytes and time still
    hold; of the other files the rank reads its part."""
    listed, known, unknown = None, {}, []
    with suppress(OSError, ValueError):
        listed = json.loads((shards[0].path.parent / SHARD_HASHES).read_text())
    for shard in shards:
        name, stat = shard.path.name, shard.path.stat()
        entry = listed.get(name) if isinstance(listed, dict) else None
        if isinstance(entry, list) and len(entry) == 3 and entry[:2] == [stat.st_size, stat.st_mtime_ns]:
            known[name] = entry
        else:
            unknown.append((name, stat, shard))
    return known | {name: [stat.st_size, stat.st_mtime_ns, shard.hash()] for name, stat, shard in unknown[rank::size]}


def save_shard_hashes(folder: Path, hashes: dict[str, list]) -> None:
    """Replace the manifest, if it says something else. A folder that cannot be written to is read again every time."""
    with suppress(OSError, ValueError):
        if json.loads((folder / SHARD_HASHES).read_text()) == hashes:
            return
    with suppress(OSError), written_whole(folder / SHARD_HASHES) as part:
        part.write_text(json.dumps(dict(sorted(hashes.items())), indent=1))


class TokenStream:
    """Shards end to end, cut into rows of seq_len inputs and the token behind them, the last target. With `spread` the
    rows come in golden-ratio order: few consecutive ones lie evenly over the data, in place of shuffled documents."""

    def __init__(self, shards: list[Shard], seq_len: int, spread: bool):
        self.shards, self.seq_len = shards, seq_len
        self.ends = np.cumsum([shard.num_tokens for shard in shards])
        self.num_tokens = int(self.ends[-1])
        self.num_rows = (self.num_tokens - 1) // seq_len  # the last input needs a target too
        self.stride = golden_stride(self.num_rows) if spread else 1

    def read(self, first: int, count: int) -> Tensor:
        """int64 [count, seq_len + 1]: rows first.. of the stream, which starts over at its end."""
        rows = np.empty((count, self.seq_len + 1), np.int64)  # uint16 has no modulo and no look-up in torch
        for i, left in enumerate(rows):
            at = (first + i) * self.stride % self.num_rows * self.seq_len
            while len(left):
                index = int(np.searchsorted(self.ends, at, side="right"))
                behind = int(self.ends[index]) - at  # tokens from here to the shard's end
                part = self.shards[index].read(self.shards[index].num_tokens - behind, min(len(left), behind))
                left[:len(part)] = part
                at, left = at + len(part), left[len(part):]
        return torch.from_numpy(rows)


def golden_stride(num_rows: int) -> int:
    """A stride near num_rows / golden ratio, without a common factor, whose multiples lie the most evenly."""
    def largest_quotient(a: int, b: int) -> int:  # of the continued fraction of a / b; multiples bunch up where large
        return max(a // b, largest_quotient(b, a % b)) if b else 1

    golden = max(1, round(num_rows * (math.sqrt(5) - 1) / 2))
    near = [stride for stride in range(golden, golden + 200) if math.gcd(stride, num_rows) == 1]
    return min(near, key=lambda stride: largest_quotient(num_rows, stride))


class Dataset(NamedTuple):
    train: TokenStream
    val: TokenStream
    vocab_size: int
    doc_start: int


def open_dataset(config) -> Dataset:
    """Find the shards and check their headers and sizes."""
    folder, found = Path(config.data).resolve(), {}
    for split in ("train", "val"):
        found[split] = [open_shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))]
        if not found[split]:
            raise UserError(f"{folder}: found no *_{split}_*.bin, expected token shards; make them with data/text.py "
                            f"or data/fineweb.py, or name their folder with --data")
    first = found["train"][0]
    for shard in found["train"] + found["val"]:
        if (shard.vocab_size, shard.doc_start) != (first.vocab_size, first.doc_start):
            raise UserError(f"{shard.path}: found vocabulary size {shard.vocab_size} and document start "
                            f"{shard.doc_start}, expected {first.vocab_size} and {first.doc_start} as in {first.path}; "
                            f"keep one data set a folder")
    shards = found["train"], found["val"][:1]  # of validation the first by name, however many are there
    return Dataset(*(TokenStream(part, config.seq_len, config.spread_rows) for part in shards), first.vocab_size,
                   first.doc_start)


def check_tokens(config, dataset: Dataset) -> None:
    """Refuse a run for which there are too few tokens, in one error that names all flags to change."""
    train, val, needed, faults, flags = dataset.train, dataset.val, config.tokens_before(config.steps), [], []
    if needed > train.num_rows * config.epochs * config.seq_len:
        faults.append(f"{train.num_tokens:,} train tokens, expected {needed + 1:,} for {config.steps} steps")
        if train.num_rows:
            flags.append(f"--epochs={-(-needed // config.seq_len // train.num_rows)} or fewer --steps")
    if config.val_tokens > (usable := val.num_rows * config.seq_len):
        faults.append(f"{val.num_tokens:,} validation tokens, expected {config.val_tokens + 1:,}")
        flags += [f"--val_tokens={usable}"] if usable else []
    if faults:
        advice = ", or use " * bool(flags) + ", and ".join(flags)
        raise UserError(f"{config.data}: found {'; '.join(faults)}; fetch or make more{advice}")


def identify_data(config, dataset: Dataset, world: World) -> dict:
    """What a run's numbers depend on of its data, in 16 hex digits each: all train shards ("train"), each of them
    ("shards"), and what validation reads ("val"). A collective: each rank hashes its part of the new shards."""
    shards, parts = dataset.train.shards + dataset.val.shards, [None] * world.size
    dist.all_gather_object(parts, together(world, lambda: shard_hashes(shards, world.rank, world.size)))
    hashes = {name: entry for part in parts for name, entry in part.items()}
    if world.main:
        save_shard_hashes(shards[0].path.parent, hashes)

    def short(*texts) -> str:
        return hashlib.sha256(" ".join(map(str, texts)).encode()).hexdigest()[:16]
    *train, val = [hashes[shard.path.name][2] for shard in shards]
    spread = config.seq_len if dataset.val.stride > 1 else 0  # spread rows are other tokens at another row length
    return {"train": short(*train), "val": short(val, config.val_tokens, spread), "vocab_size": dataset.vocab_size,
            "shards": [digest[:16] for digest in train]}


@dataclass
class Batch:
    """One rank's part of a step in M micro-batches of B rows; padding rows have target -1 and one segment a token."""
    tokens: Tensor  # int64 [M, B, seq_len]
    targets: Tensor  # int64 [M, B, seq_len]
    starts: Tensor  # bool [M, B, seq_len]: a segment begins here


def with_tensors(holder, change):
    """The dataclass with change(tensor) in place of each of its tensors."""
    return replace(holder, **{name: change(value) for name, value in vars(holder).items() if isinstance(value, Tensor)})


def to_device(holder, device: torch.device):
    return with_tensors(holder, lambda tensor: tensor.to(device, non_blocking=True))


def make_batch(rows: Tensor, count: int, micro_rows: int, doc_start: int, length: int | None = None) -> Batch:
    """rows int64 [n, seq_len + 1] -> Batch of ceil(count / micro_rows) micro-batches, the missing rows padded. A
    segment, which depends on no other, begins at document starts, at a row's first token, and `length` tokens on."""
    micro_batches = -(-count // micro_rows)
    missing = micro_batches * micro_rows - len(rows)
    tokens = F.pad(rows[:, :-1], (0, 0, 0, missing), value=doc_start)
    targets = F.pad(rows[:, 1:], (0, 0, 0, missing), value=-1)
    starts = tokens == doc_start
    starts[:, ::length or starts.shape[1]] = True
    return Batch(*(t.reshape(micro_batches, micro_rows, -1) for t in (tokens, targets, starts)))


def rank_batch(stream: TokenStream, first_row: int, num_rows: int, micro_rows: int, doc_start: int, world: World,
               length: int | None = None) -> Batch:
    """This rank's part of rows [first_row, first_row + num_rows) of the stream; all get as many micro-batches."""
    first, last = world.part(num_rows)
    rows = stream.read(first_row + first, last - first)
    return make_batch(rows, -(-num_rows // world.size), micro_rows, doc_start, length)


class Loader(threading.Thread):
    """prepare(call) for each call, in order, made by a daemon thread up to AHEAD calls before it is asked for. What is
    made depends on what is asked for alone, so that collectives inside `prepare` find their partners."""
    AHEAD = 4

    def __init__(self, prepare, calls: range):
        super().__init__(daemon=True, name="loader")
        self.prepare, self.calls, self.may, self.ended = prepare, calls, threading.Semaphore(self.AHEAD), False
        self.unmade = deque(Future() for _ in calls)
        self.unasked = self.unmade.copy()
        self.start()

    def run(self) -> None:
        for call in self.calls:
            self.may.acquire()
            if self.ended:
                return
            try:
                item = self.prepare(call)
            except BaseException as error:
                for future in self.unmade:
                    future.set_exception(error)
                return
            self.unmade.popleft().set_result(item)

    def next(self):
        """The next item, None behind the last. Raises what `prepare` raised."""
        if not self.unasked:
            return None
        self.may.release()
        return self.unasked.popleft().result()

    def rest(self) -> None:
        """Wait until the thread has made all that it may, so that it works only while the clock runs. Raises as `next`:
        where one rank waited for items that never come, the others' loaders would wait for its loader."""
        for future in list(self.unasked)[:self.AHEAD]:
            future.result()

    def end(self) -> None:
        """Wait, within reason, for the thread to end: one that leaves a collective while Python ends makes it crash."""
        self.ended = True
        self.may.release()
        self.join(timeout=10)


TOKENIZER_FILE = "tokenizer.tiktoken"
# GPT-2's split into words, which BPE never merges across; one pattern serves every tokenizer that data/text.py writes.
TOKENIZER_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def tokenizer_encoding(tokens: list[bytes]):
    """tiktoken.Encoding in which a token's id is its place in the list; the document start is the id behind them."""
    import tiktoken  # here, since training never needs it
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken.Encoding("shards", pat_str=TOKENIZER_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": len(tokens)})


def load_tokenizer(folder: str | Path, vocab_size: int):
    """tiktoken.Encoding of the file beside the shards, or None without one. Raises UserError where it is not theirs."""
    path = Path(folder) / TOKENIZER_FILE
    if not path.exists():
        return None
    try:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
        tokenizer = tokenizer_encoding([tokens[i] for i in range(len(lines))])
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: found a damaged line ({error}), expected a token in base64 and its rank on each; "
                        f"make the shards again with data/text.py") from None
    if tokenizer.n_vocab != vocab_size:
        raise UserError(f"{path}: found {tokenizer.n_vocab} ids, expected the shards' {vocab_size}; make the shards "
                        f"again, or use --sample_tokens=0")
    return tokenizer


# ==== N-gram table ====================================================================================================
# Rows addressed by hashes of the last tokens, sharded over ranks, updated where a step touched them.
# Its seams: Config.channels, NgramTable.addresses, read, add_grad, update_rows, forget; zeros_where_touched, HostRows.

# Odd multipliers below 2^16, so that products with ids below 2^16 stay below 2^32. Orders 2 and 3 are those of
# modded-nanogpt pull request #360, as are the signs, the one second moment a row and the decay.
ROW_MULTIPLIERS = {2: (36313, 27191), 3: (17351, 60961, 45259), 4: (52951, 22277, 64033, 31393)}
SIGN_MULTIPLIERS = {2: (48271, 30011), 3: (58699, 39779, 26801), 4: (40009, 61027, 20897, 33601)}
SIGN_POOL_SEED = 20260905  # never the run's seed
ADAM_EPS = 1e-10
MAX_MESSAGE_BYTES = 1 << 30  # NCCL and gloo count a message in 32 bits somewhere; stay well below
STAGING_BYTES = 32 << 20  # of a buffer between host and device; longer ones fill the links no better


class Channel(NamedTuple):
    """One hash of an order: rows [low, high) of the table, the last one reserved, and the constants of its hashes."""
    order: int
    low: int
    high: int
    modulus: int
    row_factors: tuple[int, ...]
    sign_factors: tuple[int, ...]


def channel_bounds(config) -> list[tuple[int, int]]:
    """[first, last) row of each order; the last row is reserved for positions without history."""
    weights = config.ngram_split or (1,) * len(config.ngram_orders)
    cuts = [config.ngram_rows * sum(weights[:c]) // sum(weights) for c in range(len(weights) + 1)]
    return list(zip(cuts, cuts[1:]))


def predecessors(segment_starts: Tensor) -> Tensor:
    """bool [T] -> int64 [T]: how many tokens of its segment stand before each position."""
    position = torch.arange(len(segment_starts), device=segment_starts.device)
    return position - torch.where(segment_starts, position, 0).cummax(0).values if len(position) else position


def ngram_addresses(tokens: Tensor, segment_starts: Tensor, config) -> tuple[Tensor, Tensor]:
    """tokens int64 [T] below 2^16, segment_starts bool [T], position 0 counting as one -> row and sign-pattern numbers,
    both int64 [C, T], of the n-grams that end at each position and read nothing before its segment. Exact integers."""
    history, rows, signs = predecessors(segment_starts), [], []
    for order, low, high, modulus, row_factors, sign_factors in config.channels:
        row_hash, sign_hash = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for back, (row_factor, sign_factor) in enumerate(zip(row_factors, sign_factors)):
            token = tokens.roll(back)  # what it wraps around is masked below
            row_hash ^= row_factor * token
            sign_hash ^= sign_factor * token
        complete = history >= order - 1
        rows.append(torch.where(complete, low + row_hash % modulus, high - 1))
        signs.append(torch.where(complete, sign_hash % max(1, config.ngram_signs), 0))
    return torch.stack(rows), torch.stack(signs)


def sign_pool(config, dtype: torch.dtype) -> Tensor:
    """[signs, ngram_row_dim] of +-1, the same for every rank, world and seed; one pattern of +1 where signs is 0."""
    if config.ngram_signs == 0:
        return torch.ones(1, config.ngram_row_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(SIGN_POOL_SEED)
    bits = torch.randint(0, 2, (config.ngram_signs, config.ngram_row_dim), generator=generator, dtype=torch.int8)
    return (2 * bits - 1).to(dtype)


def sort_unique(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] below 2^31 -> (sorted unique ids, int64 [n] index of each id among them). One in-place sort of (id,
    position) packed in 64 bits: several times faster than np.unique."""
    packed = ids << 32 | np.arange(len(ids))
    packed.sort()
    order, ids = packed & 0xFFFFFFFF, packed >> 32
    first = np.diff(ids, prepend=-1) > 0
    slots = np.empty(len(ids), np.int64)
    slots[order] = np.cumsum(first) - 1
    return ids[first], slots


def zeros_where_touched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on the CPU take memory only in pages that are touched, so that a table may exceed the machine's."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    no_reserve = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)  # mmap names MAP_NORESERVE from Python 3.13 on
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    with suppress(AttributeError, OSError):  # where there are no huge pages; one would take 2 MiB for a row of 1.5 KiB
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def row_second_moment(grads: Tensor, second: Tensor, last: Tensor, update: int, beta2: float) -> Tensor:
    """grads float32 [n, dim]; second float32 [n], running means of the rows' mean squares; last int32 [n], the update
    (from 1) that last touched a row, 0 for none; update, this one's number -> the new `second`, which decays for each
    update that a row missed too."""
    owed = torch.pow(beta2, (update - last).double()).float()  # float32 powers differ by a row's place in the tensor
    mean_square = torch.linalg.vector_norm(grads, dim=1).square() / grads.shape[1]
    return torch.addcmul(mean_square * (1 - beta2), owed, second)


def row_adam_update(rows: Tensor, grads: Tensor, second: Tensor, update: int, lr: float, beta2: float,
                    wd: float) -> Tensor:
    """Adam with beta1 = 0 for touched rows, float32 [n, dim], in place; `second` as row_second_moment returns it. Decay
    acts only where update and weight have one sign. Equals the eager rule: there an untouched row does not move."""
    step_size = lr * math.sqrt(1 - beta2**update) / (second.sqrt() + ADAM_EPS)
    change = grads * step_size.view(len(grads), -1)
    if wd:
        change.addcmul_((change * rows).gt_(0), rows, value=lr * wd)
    return rows.sub_(change)


# What the CPU does to the rows, each read and written once, where tensor operations would move temporaries through
# memory. A thread takes the part [first, last): of the tokens to read, of the rows of the gradient (each sums its reads
# in their order, so that nothing depends on the number of threads), of the rows to update. ROW: float32 or bfloat16.
TABLE_LOOPS = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
using i64 = int64_t;
using float32 = float;
struct bfloat16 { uint16_t bits; };
static inline float widen(float x) { return x; }
static inline float widen(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16; float y; std::memcpy(&y, &bits, 4); return y;
}
static inline void store(float* to, float x) { *to = x; }
static inline void store(bfloat16* to, float x) {  // rounds to nearest even
    uint32_t bits; std::memcpy(&bits, &x, 4);
    to->bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
template <class T> static inline void prefetch(const T* row, i64 dim) {  // its one or two pages are looked up early
    __builtin_prefetch(row), __builtin_prefetch(row + dim - 1);
}
template <class T> static inline void add(float* sum, bool fresh, const T* row, const int8_t* sign, i64 dim) {
    if (fresh) for (i64 d = 0; d < dim; d++) sum[d] = widen(row[d]) * sign[d];
    else for (i64 d = 0; d < dim; d++) sum[d] += widen(row[d]) * sign[d];
}

extern "C" void read(i64 first, i64 last, i64 channels, i64 tokens, i64 dim, const ROW* rows, const int8_t* pool,
                     const i64* at, const i64* signs, float* out) {
    for (i64 t = first; t < last; t++) for (i64 k = t; k < channels * tokens; k += tokens) {
        if (t + 2 < last) prefetch(rows + at[k + 2] * dim, dim);
        add(out + t * dim, k == t, rows + at[k] * dim, pool + signs[k] * dim, dim);
    }
}

extern "C" void add_grad(i64 first, i64 last, i64 channels, i64 tokens, i64 dim, i64 fresh, float* grads,
                         const float* read_grad, const int8_t* pool, const i64* slots, const i64* signs) {
    std::vector<i64> ends(last - first + 1), reads;  // a counting sort: row first + i is read at [ends[i - 1], ends[i])
    auto mine = [&](i64 k) { return first <= slots[k] && slots[k] < last; };
    for (i64 k = 0; k < channels * tokens; k++) if (mine(k)) ends[slots[k] - first + 1]++;
    for (i64 i = 0; i < last - first; i++) ends[i + 1] += ends[i];
    reads.resize(ends.back());
    for (i64 k = 0; k < channels * tokens; k++) if (mine(k)) reads[ends[slots[k] - first]++] = k;
    for (i64 i = 0, r = 0; i < last - first; i++) {
        float* grad = grads + (first + i) * dim;
        bool assign = fresh;
        for (; r < ends[i]; r++, assign = false) {
            if (r + 2 < ends.back()) prefetch(read_grad + reads[r + 2] % tokens * dim, dim);
            add(grad, assign, read_grad + reads[r] % tokens * dim, pool + signs[reads[r]] * dim, dim);
        }
        if (assign) std::memset(grad, 0, dim * sizeof(float));
    }
}

extern "C" void update(i64 first, i64 last, i64 dim, i64 number, double step_size, double beta2, double eps,
                       double decay, ROW* rows, const i64* ids, const float* grads, float* second, int32_t* touched) {
    for (i64 i = first; i < last; i++) {
        if (i64 ahead = i + 2; ahead < last) {
            prefetch(rows + ids[ahead] * dim, dim);
            __builtin_prefetch(second + ids[ahead]), __builtin_prefetch(touched + ids[ahead]);
        }
        ROW* row = rows + ids[i] * dim;
        const float* g = grads + i * dim;
        float owed = std::pow(beta2, double(number - touched[ids[i]])), square = 0;
        touched[ids[i]] = number;
        #pragma omp simd reduction(+ : square)
        for (i64 d = 0; d < dim; d++) square += g[d] * g[d];
        float v = second[ids[i]] = owed * second[ids[i]] + float(1 - beta2) * (square / dim);
        float size = float(step_size) / (std::sqrt(v) + float(eps)), shrink = decay;
        for (i64 d = 0; d < dim; d++) {
            float x = widen(row[d]), change = size * g[d];
            store(row + d, x - (change + (change * x > 0 ? shrink * x : 0)));
        }
    }
}
"""


class TableLoops:
    """TABLE_LOOPS compiled for rows of one type and this processor, on as many threads as torch's; kept in __pycache__
    under a hash of source, options and all that the compiler says of itself and the processor. Raises UserError."""

    def __init__(self, dtype: str):
        command = ["c++", "-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC", f"-DROW={dtype}",
                   "-x", "c++", "-"]
        compiler = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
        try:
            known = compiler([*command, "-dM", "-E"], input="").stdout
            key = hashlib.sha256("\0".join((TABLE_LOOPS, known, *command)).encode()).hexdigest()[:16]
            library = Path(__file__).resolve().parent / "__pycache__" / f"table_loops_{key}.so"
            if not library.exists():
                library.parent.mkdir(exist_ok=True)
                part = library.with_suffix(f".{os.getpid()}.part")
                compiler([*command, "-o", part], input=TABLE_LOOPS)
                part.replace(library)
            self.library = ctypes.CDLL(str(library))
        except subprocess.CalledProcessError as error:
            raise UserError(f"c++ failed: {next(iter(error.stderr.strip().splitlines()), error)}") from None
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise UserError("there is no C++ compiler, `c++`" if missing else str(error)) from None
        self.threads = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="table")

    def __call__(self, name: str, count: int, *arguments) -> None:
        """Run function `name` over [0, count) with the contiguous tensors, whole numbers and floats that it takes."""
        kinds = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double,
                 Tensor: lambda t: ctypes.c_void_p(t.data_ptr())}
        values = [kinds[type(argument)](argument) for argument in arguments]
        cuts = [ctypes.c_int64(count * i // self.threads) for i in range(self.threads + 1)]
        function = getattr(self.library, name)
        list(self.pool.map(lambda first, last: function(first, last, *values), cuts, cuts[1:]))


def exchange_rows(send: Tensor, send_counts: list[int], recv_counts: list[int], pieces: int, world: World,
                  group: dist.ProcessGroup | None = None) -> Tensor:
    """All-to-all of rows: [sum(send_counts), ...] grouped by receiver -> [sum(recv_counts), ...] by sender. `pieces`,
    equal on all ranks, cuts rows by columns, so that no message exceeds what a backend counts in 32 bits."""
    if world.size == 1:  # nothing to send
        return send
    received = send.new_empty(sum(recv_counts), *send.shape[1:])
    if pieces == 1:
        dist.all_to_all_single(received, send, recv_counts, send_counts, group=group)
        return received
    for to, part in zip(received.tensor_split(pieces, 1), send.tensor_split(pieces, 1)):
        to.copy_(exchange_rows(part.contiguous(), send_counts, recv_counts, 1, world, group))
    return received


@dataclass
class Cycle:
    """What a rank must know to read the table for the U steps of an update cycle, and to serve and update its shard.
    Made from tokens alone. T: the rank's tokens a step, padding included; C: rows that a token reads."""
    slots: Tensor  # int64 [U, C, T]: index of each read among the rank's own unique rows of the cycle
    reads: Tensor  # int64 [U, C, T]: index of each read in what `fetch` returns
    signs: Tensor  # int64 [U, C, T]
    asked: int  # the rank's unique rows of the cycle
    ask_counts: list[int]  # [W]: unique rows this rank reads from each owner
    serve_counts: list[int]  # [W]: rows each rank reads from this one
    served: Tensor  # int64 [sum(serve_counts)]: rows of the shard, grouped by asking rank, each group sorted
    owned: Tensor | np.ndarray  # int64 [u]: sorted unique of `served`; an array, which to_device leaves, for HostRows
    owned_slots: Tensor  # int64 [sum(serve_counts)]: index of each served row in `owned`
    pieces: int  # messages that a rank's rows are sent in


class NgramTable:
    """A rank's shard of the table with the state of its row-sparse Adam, and the exchange of rows with other ranks. The
    loader's thread plans, on the CPU; the training thread reads and updates."""
    PART_ROWS = 1 << 19  # of a checkpoint's file; bounds what a rank holds besides

    def __init__(self, config: Config, world: World):
        self.config, self.world, on_cpu = config, world, world.device.type == "cpu"
        self.read_dtype = torch.float32 if on_cpu else getattr(torch, config.dtype)  # the CPU's loops sum in float32
        self.first_row, last_row = world.part(config.ngram_rows)
        self.owner_ends = np.array([world.part(config.ngram_rows, rank)[1] for rank in range(world.size)])
        # Blocks keep temporaries near the CPU (8 MB; 1 MB is slower, since index_add_ runs in parallel only on long
        # blocks); a GPU wants few launches.
        self.block = max(1, (1 << 21) // config.ngram_row_dim) if on_cpu else 1 << 15
        self.max_message_bytes = MAX_MESSAGE_BYTES
        place = torch.device("cpu") if config.ngram_device == "cpu" else world.device
        self.rows, self.second, self.last = (
            zeros_where_touched((last_row - self.first_row, *width), dtype, place) for width, dtype in (
                ((config.ngram_row_dim,), getattr(torch, config.ngram_dtype)), ((), torch.float32), ((), torch.int32)))
        self.pool = sign_pool(config, torch.int8).to(world.device)
        self.updates, self.loops, self.slow_because = 0, None, ""
        if place.type == "cpu":
            try:
                self.loops = TableLoops(config.ngram_dtype)
            except UserError as error:
                self.slow_because = str(error)
        self.host = HostRows(self) if config.ngram_device == "cpu" else None

    def addresses(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """ngram_addresses of the tokens. A seam: a variant may address other things, or more rows a position."""
        return ngram_addresses(tokens, starts, self.config)

    def plan(self, batches: list[Batch], group: dist.ProcessGroup | None = None) -> Cycle:
        """Addresses, routes and counts of a cycle's batches. A collective of all ranks over `group` (gloo)."""
        addresses = [self.addresses(batch.tokens.flatten(), batch.starts.flatten()) for batch in batches]
        return self.route(*(torch.stack(parts) for parts in zip(*addresses)), group)

    def route(self, rows: Tensor, signs: Tensor, group: dist.ProcessGroup | None = None) -> Cycle:
        """rows, signs int64 [U, C, T] -> Cycle. Sorts, and lets every owner know what is asked of it."""
        world, width = self.world, self.config.ngram_row_dim
        asked, slots = sort_unique(rows.flatten().numpy())
        ask_counts = torch.from_numpy(np.diff(np.searchsorted(asked, self.owner_ends), prepend=0))
        counts = torch.empty(world.size**2, dtype=torch.int64)
        dist.all_gather_single(counts, ask_counts, group=group)
        counts = counts.view(world.size, world.size)  # [asking rank, owner]
        ask_counts, serve_counts = ask_counts.tolist(), counts[:, world.rank].tolist()
        served = exchange_rows(torch.from_numpy(asked), ask_counts, serve_counts, 1, world, group) - self.first_row
        owned, owned_slots = sort_unique(served.numpy())
        heaviest = int(torch.maximum(counts.sum(0), counts.sum(1)).max()) * width * 4
        slots = torch.from_numpy(slots).view(rows.shape)
        from_shard = world.size == 1 and not self.host  # see fetch
        return Cycle(slots, rows if from_shard else slots, signs, len(asked), ask_counts, serve_counts, served,
                     owned if self.host else torch.from_numpy(owned), torch.from_numpy(owned_slots),
                     pieces=min(width, max(1, -(-heaviest // self.max_message_bytes))))

    def fetch(self, cycle: Cycle, waiting=nullcontext()) -> Tensor:
        """The rank's unique rows of a cycle, [n, dim] in the table's type, from their owners; in a world of one, beside
        the model, the shard itself: no row of it changes before the cycle's last read. A collective. `waiting` is held
        while rows in host memory are awaited."""
        rows, numbers = (self.host.fetch(cycle, waiting), cycle.owned_slots) if self.host else (self.rows, cycle.served)
        if self.world.size == 1:
            return rows
        rows = rows.index_select(0, numbers)
        return exchange_rows(rows, cycle.serve_counts, cycle.ask_counts, cycle.pieces, self.world)

    def blocks(self, count: int) -> list[slice]:
        """Parts of [0, count) that keep temporaries small."""
        return [slice(low, low + self.block) for low in range(0, count, self.block)]

    def read(self, fetched: Tensor, reads: Tensor, signs: Tensor) -> Tensor:
        """reads (rows of `fetched`), signs int64 [C, T] -> e [T, dim]: each position's sum of signed rows. A seam."""
        out = torch.empty(reads.shape[1], fetched.shape[1], dtype=self.read_dtype, device=fetched.device)
        if self.loops and not out.is_cuda:
            self.loops("read", len(out), *reads.shape, out.shape[1], fetched, self.pool, reads.contiguous(),
                       signs.contiguous(), out)
            return out
        for cut in self.blocks(len(out)):
            for order, (read, sign) in enumerate(zip(reads[:, cut], signs[:, cut])):
                signed = fetched.index_select(0, read).mul_(self.pool.index_select(0, sign))  # exact in any type: +-1
                (out[cut].add_ if order else out[cut].copy_)(signed)
        return out

    def add_grad(self, grads: Tensor, slots: Tensor, signs: Tensor, read_grad: Tensor, fresh: bool) -> None:
        """Add d loss / d e [T, dim] to grads float32 [n, dim] of the cycle's rows, whose content counts as zeros with
        `fresh`; on the CPU in a fixed order of summation. A seam."""
        read_grad = read_grad.float()
        if self.loops and not grads.is_cuda:
            self.loops("add_grad", len(grads), *slots.shape, grads.shape[1], fresh, grads, read_grad.contiguous(),
                       self.pool, slots.contiguous(), signs.contiguous())
            return
        if fresh:
            grads.zero_()
        for cut in self.blocks(len(read_grad)):
            for slot, sign in zip(slots[:, cut], signs[:, cut]):
                grads.index_add_(0, slot, read_grad[cut] * self.pool.index_select(0, sign))

    def update(self, cycle: Cycle, grads: Tensor, lr: float) -> None:
        """Send the rows' gradients to their owners, sum them rank by rank, update the owned rows. A collective."""
        self.updates += 1
        grads = exchange_rows(grads, cycle.ask_counts, cycle.serve_counts, cycle.pieces, self.world)
        if sum(count > 0 for count in cycle.serve_counts) > 1:  # those of one rank are in the order of `owned` already
            summed = torch.zeros(len(cycle.owned), grads.shape[1], device=grads.device)
            grads = summed.index_add_(0, cycle.owned_slots, grads)
        (self.host.update if self.host else self.update_rows)(cycle.owned, grads, self.updates, lr)

    def update_rows(self, ids: Tensor, grads: Tensor, update: int, lr: float) -> None:
        """The rule for rows `ids` int64 [n] of the shard, each by itself, with grads float32 [n, dim]. A seam."""
        beta2, wd = self.config.ngram_beta2, self.config.ngram_wd
        if self.loops:
            self.loops("update", len(ids), grads.shape[1], update, lr * math.sqrt(1 - beta2**update), beta2, ADAM_EPS,
                       lr * wd, self.rows, ids, grads, self.second, self.last)
            return
        second, last = self.second.index_select(0, ids), self.last.index_select(0, ids)
        second = row_second_moment(grads, second, last, update, beta2)
        self.second.index_copy_(0, ids, second)
        self.last.index_fill_(0, ids, update)
        for cut in self.blocks(len(ids)):
            rows = self.rows.index_select(0, ids[cut]).float()
            row_adam_update(rows, grads[cut], second[cut], update, lr, beta2, wd)
            self.rows.index_copy_(0, ids[cut], rows.to(self.rows.dtype))

    def wait(self) -> None:
        """Until rows and state are those of the last update."""
        if self.host:
            self.host.thread.wait()

    def forget(self, ids: Tensor | np.ndarray) -> None:
        """Rows `ids` of the shard as they are before the first update, and the count of updates too. A seam: what else
        an update changes, warm-up leaves as it was."""
        self.wait()
        for state in (self.rows, self.second, self.last):
            state.index_fill_(0, torch.as_tensor(ids).to(state.device), 0)
        self.updates = 0

    def saved_parts(self):
        """Yield touched rows and their state as dicts of CPU tensors, some at a time; "ids" count over all ranks."""
        self.wait()
        for ids in self.last.nonzero().squeeze(1).split(self.PART_ROWS):
            state = {name: getattr(self, name)[ids].cpu() for name in ("rows", "second", "last")}
            yield {"ids": (ids + self.first_row).cpu()} | state

    def load_part(self, part: dict) -> None:
        """Take from a part, which any rank of any world may have saved, the rows that are this rank's."""
        bounds = torch.tensor((self.first_row, self.first_row + len(self.rows)))
        low, high = torch.searchsorted(part["ids"], bounds).tolist()
        ids = (part["ids"][low:high] - self.first_row).to(self.rows.device)
        for name in ("rows", "second", "last"):
            getattr(self, name)[ids] = part[name][low:high].to(self.rows.device)


class InOrder:
    """A thread for calls that must follow each other. After one that failed none is made; whoever waits learns why."""

    def __init__(self, name: str, prepare=None):
        self.pool, self.latest, self.worked_s = ThreadPoolExecutor(1, name, prepare), None, 0.0

    def __call__(self, action, *arguments) -> Future:
        self.latest = self.pool.submit(self.act, self.latest, action, *arguments)
        return self.latest

    def act(self, before: Future | None, action, *arguments) -> None:
        if before:
            before.result()
        began = time.perf_counter()
        action(*arguments)
        self.worked_s += time.perf_counter() - began

    def wait(self) -> None:
        """For all calls so far."""
        if self.latest:
            self.latest.result()


def staging_buffer(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, columns] of host memory, at most STAGING_BYTES or a row; page-locked for a GPU, which copies by itself."""
    shape = max(1, STAGING_BYTES // (columns * dtype.itemsize)), columns
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise UserError(f"--ngram_device=cpu: found no page-locked memory ({str(error).splitlines()[0]}), expected "
                        f"{STAGING_BYTES >> 20} MiB a buffer, two a rank; raise the limit (`ulimit -l`, or the "
                        f"container's), or leave the table on the GPU") from None


@dataclass
class Ahead:
    """A cycle's rows on their way to the device. late, changing, rows are the host thread's until `ready` is done."""
    owned: np.ndarray  # int64 [u], the cycle's
    before: np.ndarray | None = None  # `owned` of the cycle whose update comes first
    late: np.ndarray | None = None  # bool [u]: this update changes the row, which is brought after it
    changing: np.ndarray | None = None  # bool, the same rows in `before`
    rows: Tensor | None = None  # [u, dim] on the device
    ready: Future | None = None  # set once the last of the rows are under way


class HostRows:
    """The way between a table in host memory (--ngram_device=cpu) and the device: one thread does everything in order.

    While a cycle computes, those rows of the next that its update leaves alone go to the device. Of its update the rows
    that both read come first, and follow; the others change beside the next cycle's computing. So no row is read before
    its update, and the device reads, bit for bit, what a table of its own would hold. All passes through two buffers.
    """

    def __init__(self, table: NgramTable):
        self.table, self.device, self.ahead, dim = table, table.world.device, None, table.rows.shape[1]
        self.staged_rows, self.staged_grads = (staging_buffer(dim, dtype, self.device)
                                               for dtype in (table.rows.dtype, torch.float32))
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.thread = InOrder("host rows", lambda: self.stream and torch.cuda.set_stream(self.stream))

    def look_ahead(self, current: Cycle, upcoming: Cycle) -> None:
        """Begin to bring the rows of the cycle that follows the current one's update."""
        self.ahead = ahead = Ahead(upcoming.owned, current.owned)

        def bring_early():
            ahead.late = np.isin(ahead.owned, ahead.before, assume_unique=True)
            ahead.changing = np.isin(ahead.before, ahead.owned, assume_unique=True)
            self.bring(ahead, ~ahead.late)

        self.thread(bring_early)

    def fetch(self, cycle: Cycle, waiting) -> Tensor:
        """[u, dim] on the device: the cycle's `owned` rows as the last update left them."""
        ahead = self.ahead
        if ahead and ahead.owned is cycle.owned and ahead.ready:
            self.ahead = None
        else:  # nobody looked ahead
            ahead = Ahead(cycle.owned)
            ahead.ready = self.thread(self.bring, ahead, np.ones(len(ahead.owned), bool))
        with waiting:
            ahead.ready.result()
        if self.stream:
            ahead.rows.record_stream(torch.cuda.current_stream())
        return ahead.rows

    def update(self, owned: np.ndarray, grads: Tensor, update: int, lr: float) -> None:
        """Begin to update the rows `owned` with the gradients of their losses, float32 [u, dim] on the device."""
        ahead, done = self.ahead, self.stream and torch.cuda.current_stream().record_event()
        if ahead and (ahead.ready or ahead.before is not owned):  # what was brought is stale now
            ahead = self.ahead = None

        def update_common():
            self.change(owned, ahead.changing, grads, done, update, lr)
            self.bring(ahead, ahead.late)

        def update_others():
            self.change(owned, ~ahead.changing if ahead else np.ones(len(owned), bool), grads, done, update, lr)

        if ahead:
            ahead.ready = self.thread(update_common)
        self.thread(update_others)

    def bring(self, ahead: Ahead, which: np.ndarray) -> None:
        """Copy these rows, bool [u], of `owned` to the device. In the thread; they are there when it returns."""
        if ahead.rows is None:  # of few sizes, so that the allocator finds a block of its own again
            size, step = len(ahead.owned), 1 << max(0, len(ahead.owned).bit_length() - 4)
            shape = -(-size // step) * step, self.staged_rows.shape[1]
            ahead.rows = self.staged_rows.new_empty(shape, device=self.device)[:size]
        for part in torch.from_numpy(np.flatnonzero(which)).split(len(self.staged_rows)):
            ids = torch.from_numpy(ahead.owned)[part]
            rows = torch.index_select(self.table.rows, 0, ids, out=self.staged_rows[:len(part)])
            ahead.rows.index_copy_(0, part.to(self.device), rows.to(self.device))
        if self.stream:
            self.stream.synchronize()

    def change(self, owned: np.ndarray, which: np.ndarray, grads: Tensor, done, update: int, lr: float) -> None:
        """Update these rows, bool [u], of `owned` once `grads` are `done`. In the thread."""
        if self.stream:
            self.stream.wait_event(done)
        for part in torch.from_numpy(np.flatnonzero(which)).split(len(self.staged_grads)):
            part_grads = self.staged_grads[:len(part)].copy_(grads.index_select(0, part.to(self.device)))
            self.table.update_rows(torch.from_numpy(owned)[part], part_grads, update, lr)


# ==== Model ===========================================================================================================
# A pre-norm GPT with rotary positions, attention inside a segment, squared-ReLU MLPs, a softcapped loss, and a
# residual stream that takes in the token embedding and the n-gram memory before every block.

ROTARY_BASE = 10_000.0
SOFTCAP, SHIFT, WIDTH = 23.0, 5.0, 7.5  # logits become SOFTCAP * sigmoid((logit + SHIFT) / WIDTH), as in recent records
GATE_DIM = 12  # a gate looks at this much of the residual stream


class RMSNorm(torch.autograd.Function):
    """x / rms(x) over the last dimension; half the passes over memory that autograd makes of F.rms_norm on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        scale = (norm.square() / x.shape[-1] + 1e-6).rsqrt()
        y = (x * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        along = (grad * y).sum(-1, keepdim=True) / -y.shape[-1]
        return torch.addcmul(grad, y, along).mul_(scale)


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2, keeping one tensor for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2)


def rotary_table(config: Config, stage: int) -> Tensor:
    """float32 [2, seq_len, head_dim / 2]: cosines and sines for the stage's long window. Where that has grown, YaRN
    (arXiv:2309.00071) slows the pairs that turned less than once in the old one by the ratio of both, leaves those that
    turned 32 times, and sharpens attention by 1 + 0.1 ln(ratio), the root of it in each factor."""
    head_dim = config.model_dim // config.heads
    frequency = ROTARY_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    windows, sharper = [stage.windows[1] for stage in config.stage_list[:stage + 1]], 1.0
    for old, new in zip(windows, windows[1:]):
        turns = old * frequency / (2 * math.pi)
        keep = ((turns - 1) / 31).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) * old / new)
        sharper *= 1 + 0.1 * math.log(new / old)
    angle = torch.arange(config.seq_len)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())) * sharper**0.5


class Rotate(torch.autograd.Function):
    """x [..., L, D], rotary [2, L, D/2] -> x with the pair (i, i + D/2) of each position turned by its angle."""

    @staticmethod
    def forward(ctx, x: Tensor, rotary: Tensor) -> Tensor:
        ctx.save_for_backward(rotary)
        (cos, sin), y = rotary[:, :x.shape[-2]].to(x.dtype), torch.empty_like(x)
        (a, b), (ya, yb) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        ya.copy_(a * cos).addcmul_(b, sin, value=-1)
        yb.copy_(b * cos).addcmul_(a, sin)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors[0]
        return Rotate.apply(grad, torch.stack((cos, -sin))), None


def attention_mask(starts: Tensor, window: int, flex: bool) -> Tensor | BlockMask:
    """starts bool [B, L] -> position q sees k where q - window < k <= q lies in the same segment: bool [B, 1, L, L] for
    scaled_dot_product_attention, or with `flex` what flex_attention takes."""
    batch, length = starts.shape
    segment = starts.cumsum(-1)

    def sees(b, h, q, k):
        return (k <= q) & (q - k < window) & (segment[b, q] == segment[b, k])

    if flex:
        return create_block_mask(sees, batch, None, length, length, device=starts.device)
    row, position = (torch.arange(n, device=starts.device) for n in starts.shape)
    return sees(row[:, None, None, None], None, position[:, None], position)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Attention of [B, H, L, D]: torch's fused kernels for a dense mask; flex_attention, compiled, skips blocks."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask)
    if q.dtype == torch.bfloat16 and not q.is_cuda:  # where torch 2.13's fused kernel is three times slower, backward
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, L, D], weight [H, GATE_DIM] -> [B, H, L, 1] between 0 and 2, 1 where the weight is zero."""
    return 2 * torch.sigmoid(F.linear(x[..., :GATE_DIM], weight.to(x.dtype))).transpose(1, 2)[..., None]


class Block(nn.Module):
    """Attention and MLP (a seam). Matrices are [out, in]; mlp_down is transposed: Muon stacks it with mlp_up."""

    def __init__(self, config: Config, index: int):
        super().__init__()
        dim, self.heads = config.model_dim, config.heads
        self.qkv = nn.Parameter(torch.empty(3, dim, dim))
        self.attn_out = nn.Parameter(torch.zeros(dim, dim))
        self.mlp_up = nn.Parameter(torch.empty(4 * dim, dim))
        self.mlp_down = nn.Parameter(torch.zeros(4 * dim, dim))
        self.attn_gate = nn.Parameter(torch.zeros(config.heads, GATE_DIM))
        if index in config.value_embeds:
            self.value_gate = nn.Parameter(torch.zeros(config.heads, GATE_DIM))

    def forward(self, x: Tensor, mask: Tensor | BlockMask, rotary: Tensor, value_embed: Tensor | None) -> Tensor:
        (batch, length, dim), y = x.shape, RMSNorm.apply(x)
        qkv = F.linear(y, self.qkv.flatten(0, 1).to(x.dtype))
        qkv = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [3, B, H, L, D]
        (q, k), v = Rotate.apply(RMSNorm.apply(qkv[:2]), rotary), qkv[2]
        if value_embed is not None:
            v = v + gate(y, self.value_gate) * value_embed.view(batch, length, self.heads, -1).transpose(1, 2)
        y = attend(q, k, v, mask) * gate(y, self.attn_gate)
        x = x + F.linear(y.transpose(1, 2).reshape(batch, length, dim), self.attn_out.to(x.dtype))
        return x + self.mlp(RMSNorm.apply(x))

    def mlp(self, x: Tensor) -> Tensor:
        return SquaredReLU.apply(F.linear(x, self.mlp_up.to(x.dtype))) @ self.mlp_down.to(x.dtype)


def squashed_logits(x: Tensor, head: Tensor) -> Tensor:
    """x [T, D], head [V, D] in one type -> float32 [T, V] between 0 and 1: logits before SOFTCAP."""
    return F.linear(x / WIDTH, head).float().add_(SHIFT / WIDTH).sigmoid_()


class SoftcappedLoss(torch.autograd.Function):
    """Head, softcap and cross-entropy in chunks of tokens, gradients made in the same pass; logits never exist whole.
    x [T, D], weight float32 [V, D], targets int64 [T] (-1: no loss) -> float32 sum of the losses in nats."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        loss, head, training = torch.zeros((), device=x.device), weight.to(x.dtype), ctx.needs_input_grad[0]
        x_grad, weight_grad = (torch.empty_like(x), torch.zeros_like(weight)) if training else (None, None)
        for low in range(0, len(x), chunk):
            part, target = x[low:low + chunk], targets[low:low + chunk, None]
            capped = squashed_logits(part, head)
            probability = (capped * SOFTCAP).softmax(-1)
            index, counted = target.clamp(min=0), (target >= 0).to(x.dtype)
            loss -= (probability.gather(1, index).log() * counted).sum()
            if training:
                probability.scatter_add_(1, index, -torch.ones_like(index, dtype=torch.float32))
                grad = torch.ops.aten.sigmoid_backward(probability, capped).to(x.dtype)
                slope = counted * (SOFTCAP / WIDTH)  # on the narrow factors, not on the logits
                x_grad[low:low + chunk] = grad @ head * slope
                weight_grad += grad.mT @ (part * slope)
        if training:
            ctx.save_for_backward(x_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx, loss_grad: Tensor):
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * loss_grad.to(x_grad.dtype), weight_grad * loss_grad, None, None


class Rule(NamedTuple):
    kind: str  # "muon" or "adam"
    wd: float = 1.0  # multiplies weight_decay


RULES = {  # parameter name pattern -> how it is updated; exactly one must match each parameter
    "blocks.*.qkv": Rule("muon"), "blocks.*.attn_out": Rule("muon"), "blocks.*.mlp_*": Rule("muon"),
    "embed": Rule("adam"), "head": Rule("adam"), "value_embeds.*": Rule("adam"),
    "*_gate": Rule("adam", wd=0.0), "*_scales": Rule("adam", wd=0.0),
}


def rule_of(name: str, rules: dict[str, Rule] = RULES) -> tuple[str, Rule]:
    matching = [(pattern, rule) for pattern, rule in rules.items() if fnmatch.fnmatchcase(name, pattern)]
    assert len(matching) == 1, f"parameter {name}: found rules {dict(matching)}, expected exactly one"
    return matching[0]


class GPT(nn.Module):
    """Computes in `dtype` with float32 parameters. Seams: the three attributes, all methods but hidden and forward."""
    block, rules = Block, RULES
    kept_widths = 22  # tensors as wide as the stream that a block keeps for the backward pass, about

    def __init__(self, config: Config, vocab_size: int):
        super().__init__()
        self.config, self.dtype = config, getattr(torch, config.dtype)
        shape = -(-vocab_size // 64) * 64, config.model_dim  # a round size is faster; no target names the padding
        self.embed = nn.Parameter(torch.empty(shape))
        # Every fourth block attends over the stage's long window, and the last.
        self.long = [i % 4 == 3 or i == config.layers - 1 for i in range(config.layers)]
        self.blocks = nn.ModuleList(self.block(config, i) for i in range(config.layers))
        self.head = nn.Parameter(torch.zeros(shape))
        self.embed_scales = nn.Parameter(torch.zeros(config.layers))
        self.smear_gate = nn.Parameter(torch.zeros(1, GATE_DIM))
        self.smear_scales = nn.Parameter(torch.zeros(1))
        if config.skips:
            self.skip_scales = nn.Parameter(torch.full((config.layers // 2,), 0.1))
        self.value_embeds = nn.ParameterList(torch.zeros(shape) for _ in config.value_embeds)
        if config.ngram_rows:
            self.ngram_scales = nn.Parameter(torch.full((config.layers,), 0.05))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw what does not start at zero or a constant."""
        self.embed.normal_(std=0.05, generator=generator)  # small, so that Adam turns it soon, and fit for a head
        bound = (3 / self.config.model_dim) ** 0.5  # of a standard deviation of 1 / sqrt(model_dim)
        for block in self.blocks:
            block.qkv.uniform_(-bound, bound, generator=generator)
            block.mlp_up.uniform_(-bound, bound, generator=generator)

    def pad_memory(self, memory: Tensor) -> Tensor:
        """[B, L, ngram_dim] -> as add_memory takes it, of the stream's width."""
        return F.pad(memory, (0, self.config.model_dim - memory.shape[-1]))

    def add_memory(self, x: Tensor, memory: Tensor, i: int) -> Tensor:
        """What block i takes in; x [B, L, model_dim], memory from pad_memory."""
        return torch.addcmul(x, memory, self.ngram_scales[i].to(x.dtype))

    def hidden(self, tokens: Tensor, starts: Tensor, memory: Tensor | None, masks: tuple, rotary: Tensor) -> Tensor:
        """tokens int64, starts bool [B, L], memory [B, L, ngram_dim], masks (short, long) -> [B, L, model_dim]."""
        layers, early = self.config.layers, []
        value_embeds = dict(zip(self.config.value_embeds, self.value_embeds))
        x = RMSNorm.apply(F.embedding(tokens, self.embed).to(self.dtype))
        previous = F.pad(x[:, :-1], (0, 0, 1, 0)).masked_fill(starts[..., None], 0)
        x = first = x + self.smear_scales.to(x.dtype) * gate(x, self.smear_gate).squeeze(1) * previous
        if memory is not None:
            memory = self.pad_memory(memory.to(x.dtype))
        for i, block in enumerate(self.blocks):
            mirror = layers - 1 - i
            if self.config.skips and mirror > i:
                early.append(x)
            elif self.config.skips and mirror < i:
                x = torch.addcmul(x, early[mirror], self.skip_scales[mirror].to(x.dtype))
            x = torch.addcmul(x, first, self.embed_scales[i].to(x.dtype))
            if memory is not None:
                x = self.add_memory(x, memory, i)
            value_embed = F.embedding(tokens, value_embeds[i]).to(x.dtype) if i in value_embeds else None
            x = block(x, masks[self.long[i]], rotary, value_embed)
        return RMSNorm.apply(x)

    def forward(self, tokens: Tensor, starts: Tensor, memory: Tensor | None, targets: Tensor, masks: tuple,
                rotary: Tensor, tied: bool) -> Tensor:
        """Float32 sum of the losses, in nats, over the positions whose target int64 [B, L] is not -1."""
        x = self.hidden(tokens, starts, memory, masks, rotary)
        return self.loss(x.flatten(0, 1), self.embed if tied else self.head, targets.flatten())

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return SoftcappedLoss.apply(x, head, targets, self.config.head_chunk_tokens)

    def flops_per_token(self, windows: tuple[int, int]) -> int:
        """Operations forward and backward: three times two for each weight of a product, and for each element of what
        attention sees, on average over a row of one document."""
        config, windows = self.config, [min(windows[long], self.config.seq_len) for long in self.long]
        seen = sum(window - window * (window - 1) / 2 / config.seq_len for window in windows)
        weights = 12 * config.layers * config.model_dim**2 + self.head.numel()
        return int(6 * (weights + 2 * config.model_dim * seen))


def build_model(config: Config, vocab_size: int, model_class=GPT) -> GPT:
    """The model on the CPU. Its weights depend on the seed alone, not on device or rank."""
    model = model_class(config, vocab_size)
    model.init_weights(torch.Generator().manual_seed(config.seed))
    return model


# ==== Optimizer =======================================================================================================
# Update rules and schedules, pure functions of tensors and of the step; then parameters in flat buffers, of
# which each rank updates its part. (The table's rule, row_adam_update, stands with the table.)

# Polar Express, arXiv:2505.16932: the best polynomials a x + b x^3 + c x^5, one a step, for singular values from 1e-3.
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
MUON_MOMENTUM, MUON_MOMENTUM_STEPS = (0.85, 0.95), 300  # Nesterov momentum at first, and after so many steps
MUON_BETA2 = 0.95  # NorMuon: decay of the second moment of each row of an update
ADAM_BETAS = (0.8, 0.95)
COOLDOWN = 0.6  # last fraction of the steps, over which the learning rates fall to zero


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, a, b] -> the nearest (semi-)orthogonal matrices, singular values near 1, computed in `dtype`."""
    x, tall = matrices.to(dtype), matrices.shape[-2] > matrices.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_update(weights: Tensor, grads: Tensor, momentum: Tensor, row_moment: Tensor, lr: float, beta: float,
                beta2: float, wd: float, dtype: torch.dtype = torch.float32) -> None:
    """Muon with Nesterov momentum on a stack [N, a, b], in place; tall matrices take sqrt(a / b) times lr. NorMuon
    (arXiv:2510.05491): rows are divided by the root of their running mean square, row_moment [N, a, 1], and the whole
    keeps its norm. Decay acts only where update and weight have the same sign."""
    momentum.lerp_(grads, 1 - beta)
    change = orthogonalize(grads.lerp(momentum, beta), dtype).float()
    norm = change.norm(dim=(-2, -1), keepdim=True)
    row_moment.lerp_(change.square().mean(-1, keepdim=True), 1 - beta2)
    change = change / (row_moment.sqrt() + ADAM_EPS)
    change *= norm / (change.norm(dim=(-2, -1), keepdim=True) + ADAM_EPS)
    if wd:
        change.addcmul_((change * weights).gt_(0), weights, value=wd)
    weights.sub_(change, alpha=lr * max(1.0, weights.shape[-2] / weights.shape[-1]) ** 0.5)


def adam_update(weights: Tensor, grads: Tensor, first: Tensor, second: Tensor, update: int, lr: float, beta1: float,
                beta2: float, wd: float) -> None:
    """AdamW in place on float32 tensors of one shape, by torch's fused kernel; update counts from 1."""
    adamw([weights], [grads], [first], [second], [], [torch.full((), update - 1.0, device=weights.device)], fused=True,
          amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2, weight_decay=wd, eps=ADAM_EPS)


def lr_scale(step: int, config: Config) -> float:
    """The stage's factor, times 1, then a straight line down to 0."""
    return config.stage(step).lr * min(1.0, (1 - step / config.steps) / COOLDOWN)


def muon_momentum(step: int, config: Config) -> float:
    """A straight line up, and over the last muon_momentum_cooldown steps down again."""
    low, high = MUON_MOMENTUM
    fall = (config.steps - step) / max(1, config.muon_momentum_cooldown)
    return low + (high - low) * min(1.0, step / MUON_MOMENTUM_STEPS, fall)


class Bucket:
    """Parameters that one rule updates together, as views into a buffer of equal parts for the ranks, the end padding:
    [n, a, b] for Muon, whose matrices have one shape, [n] for Adam; a rank's part has local_size of the n."""

    def __init__(self, rule: Rule, params: dict[str, nn.Parameter], world: World):
        self.rule, self.shapes = rule, {name: p.shape for name, p in params.items()}
        unit = next(iter(self.shapes.values()))[-2:] if rule.kind == "muon" else ()
        self.counts = [p.numel() // math.prod(unit) for p in params.values()]
        self.local_size = -(-sum(self.counts) // world.size)
        self.weights = torch.zeros(world.size * self.local_size, *unit, device=world.device)
        self.grads = torch.zeros_like(self.weights)
        for (name, weights), grads in zip(self.by_name(self.weights).items(), self.by_name(self.grads).values()):
            weights.copy_(params[name].data)
            params[name].data, params[name].grad = weights, grads
        part = self.weights.chunk(world.size)[world.rank]
        self.summed = torch.empty_like(part) if world.size > 1 else self.grads  # over ranks, of this rank's part
        shapes = {"momentum": part.shape, "row_moment": (*part.shape[:-1], 1)} if rule.kind == "muon" else \
            {"first_moment": part.shape, "second_moment": part.shape}
        self.local = {"weights": part} | {kind: part.new_zeros(shape) for kind, shape in shapes.items()}

    def by_name(self, whole: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of [n, a, b], [n, a, 1] or [n], as a view."""
        parts = whole[:sum(self.counts)].split(self.counts)
        return {name: part.view(*shape[:-1], -1) for (name, shape), part in zip(self.shapes.items(), parts)}


class Optimizer:
    """Muon for matrices and Adam for the rest, on buckets; the same for one rank and for many."""

    def __init__(self, model: GPT, config: Config, world: World):
        self.config, self.world, self.updates, groups = config, world, 0, {}
        for name, p in model.named_parameters():
            pattern, rule = rule_of(name, model.rules)
            groups.setdefault((rule, p.shape[-2:] if rule.kind == "muon" else pattern), {})[name] = p
        self.buckets = [Bucket(rule, params, world) for (rule, _), params in groups.items()]

    def forget(self) -> None:
        """No moments and no updates, as before the first step."""
        self.updates = 0
        for moment in (part for bucket in self.buckets for kind, part in bucket.local.items() if kind != "weights"):
            moment.zero_()

    @torch.no_grad()
    def step(self, scale: float, momentum: float, batch_tokens: int, tied: bool) -> None:
        """Average the gradients of loss sums over the step's tokens, update, and zero them. A tied head has none."""
        config, several, self.updates = self.config, self.world.size > 1, self.updates + 1
        buckets = [bucket for bucket in self.buckets if not (tied and "head" in bucket.shapes)]
        reductions = [several and dist.reduce_scatter_single(b.summed, b.grads, async_op=True) for b in buckets]
        gathers = []
        for bucket, reduction in zip(buckets, reductions):
            if several:
                reduction.wait()
            weights, *moments = bucket.local.values()
            state = weights, bucket.summed.div_(batch_tokens), *moments
            wd = config.weight_decay * bucket.rule.wd
            if bucket.rule.kind == "muon":
                muon_update(*state, config.muon_lr * scale, momentum, MUON_BETA2, wd, getattr(torch, config.dtype))
            else:
                adam_update(*state, self.updates, config.adam_lr * scale, *ADAM_BETAS, wd)
            if several:
                gathers.append(dist.all_gather_single(bucket.weights, weights.clone(), async_op=True))
            bucket.grads.zero_()
        for gather in gathers:
            gather.wait()

    def untie(self) -> None:
        """Give the head a copy of the embedding, which it was so far, and of its moments; both are cut alike."""
        embed, head = (next(b for b in self.buckets if name in b.shapes) for name in ("embed", "head"))
        head.weights.copy_(embed.weights)
        for kind, local in embed.local.items():
            head.local[kind].copy_(local)

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """"weights" and each kind of moment -> parameter name -> whole tensor on rank 0's CPU. A collective."""
        saved = {}
        for bucket in self.buckets:
            for kind, local in bucket.local.items():
                whole = torch.cat([local] * self.world.size)
                dist.all_gather_single(whole, local.contiguous())
                if self.world.main:
                    saved.setdefault(kind, {}).update(bucket.by_name(whole.cpu()))
        return saved

    def load(self, saved: dict[str, dict[str, Tensor]], updates: int) -> None:
        """Take what `saved` made, in a world of any size."""
        self.updates = updates
        for bucket in self.buckets:
            for kind, local in bucket.local.items():
                whole = bucket.weights if kind == "weights" else torch.cat([local] * self.world.size)
                for name, part in bucket.by_name(whole).items():
                    part.copy_(saved[kind][name])
                local.copy_(whole.chunk(self.world.size)[self.world.rank])


# ==== Plan: what a run will need, from the config alone, held against the machine before anything is allocated =======

# Dense bfloat16 TFLOP/s, and GB/s to the other GPUs each way (NVLink, or PCIe 4.0 x16), from the makers' data sheets.
GPUS = {"H200": (989, 450), "H100": (989, 450), "A100": (312, 300), "L40": (181, 32), "4090": (165, 32)}
REMEDIES = {"table_rows": "--ngram_rows", "table_state": "--ngram_rows", "table_cache": "--batch_tokens",
            "table_gradients": "--batch_tokens", "activations": "--micro_batch_tokens", "logits": "--head_chunk_tokens"}


def make_plan(config: Config, world: World, vocab_size: int, tokens_on_disk: int, model_class=GPT) -> dict:
    """A flat dict of parameters, tokens, bytes a rank by kind (estimates from above; "host_": in host memory beside a
    GPU), exchange a step, and, for a known GPU, the times below which a step of the last stage cannot be."""
    size, stage = world.size, config.stage_list[-1]
    with torch.device("meta"):
        model = model_class(config, vocab_size)
    counts = [(p.numel(), rule_of(name, model.rules)[1].kind) for name, p in model.named_parameters()]
    parameters, moments = sum(n for n, _ in counts), sum(n * (1 if kind == "muon" else 2) for n, kind in counts)
    micro_tokens = config.most_micro_rows(size) * config.seq_len
    kept = config.layers * (model.kept_widths * config.model_dim + config.seq_len // 4)  # numbers for each token
    kept += 8 * config.model_dim + 2 * config.ngram_dim
    plan = {
        "dense_parameters": parameters, "table_parameters": config.ngram_rows * config.ngram_row_dim,
        "train_tokens_needed": config.tokens_before(config.steps) + 1, "train_tokens_on_disk": tokens_on_disk,
        "weights_and_gradients_bytes": 8 * parameters, "optimizer_bytes": 4 * (moments + parameters) // size,
        "activations_bytes": micro_tokens * kept * getattr(torch, config.dtype).itemsize,
        "logits_bytes": 3 * 4 * min(config.head_chunk_tokens, micro_tokens) * model.head.shape[0],
        "dense_exchange_bytes_per_step": 2 * 4 * parameters * (size - 1) // size,
        "flops_per_token": model.flops_per_token(stage.windows),
    }
    if config.ngram_rows:
        plan |= table_plan(config, world, tokens_on_disk)
    if config.gpu:
        tflops, link_gbs = GPUS[config.gpu]
        sent = sum(value for name, value in plan.items() if name.endswith("exchange_bytes_per_step"))
        flops = plan["flops_per_token"] * stage.batch_tokens / size
        plan["least_compute_ms_per_step"] = round(1e-9 * flops / tflops, 3)
        plan["least_exchange_ms_per_step"] = round(1e-6 * sent / link_gbs, 3)
    totals = {f"{place}bytes_per_rank": sum(plan_parts(plan, place).values()) for place in ("", "host_")}
    return plan | {name: total for name, total in totals.items() if total}


def table_plan(config: Config, world: World, tokens_on_disk: int) -> dict:
    """The table's part of the plan. In host memory rows and state count only as far as the run can touch them."""
    size, reads, dim, state = world.size, len(config.channels), config.ngram_row_dim, config.ngram_state_bytes
    shard, row = -(-config.ngram_rows // size), dim * getattr(torch, config.ngram_dtype).itemsize
    rank_tokens = -(-config.batch_tokens // config.seq_len // size) * config.seq_len
    cycle_reads = rank_tokens * config.ngram_update_every * reads
    cycle_rows = min(config.ngram_rows, cycle_reads)
    apart, rows_bytes, state_bytes = config.ngram_device == "cpu", shard * row, shard * state
    if world.device.type == "cpu" or apart:  # apart: in the hands of HostRows
        tokens = min(config.tokens_before(config.steps), tokens_on_disk or math.inf)
        touched = min(shard, tokens * reads * 5 // 4 // size)  # hashes load the owners evenly, but not exactly
        rows_bytes = min(rows_bytes, touched * (row + mmap.PAGESIZE))  # first and last page hold others' bytes too
        state_bytes = min(state_bytes, touched * (state + 2 * mmap.PAGESIZE))
    host, copies = "host_" if apart and world.device.type != "cpu" else "", (size > 1) + apart
    ends = {f"{host}staging_bytes": 2 * STAGING_BYTES, "table_parts_bytes": 2 * STAGING_BYTES} if apart else {}
    sent = cycle_rows * (size - 1) // size * (row + 4 * dim + 8)
    return {
        f"{host}table_rows_bytes": rows_bytes, f"{host}table_state_bytes": state_bytes, **ends,
        "table_cache_bytes": 2 * cycle_rows * row * copies * (9 if apart else 8) // 8,  # sizes are rounded up
        "table_gradients_bytes": (1 + copies) * 4 * cycle_rows * dim,
        "sign_pool_bytes": max(1, config.ngram_signs) * dim,
        "table_plans_bytes": 16 * (6 * cycle_reads + reads * config.val_tokens // size),
        "table_exchange_bytes_per_step": sent // config.ngram_update_every,
    }


def plan_parts(plan: dict, place: str) -> dict[str, int]:
    """What a plan counts on the device (place "") or, beside a GPU, in host memory ("host_")."""
    return {name: n for name, n in plan.items() if name.endswith("_bytes") and name.startswith("host_") == bool(place)}


def plan_lines(plan: dict, config: Config, world: World) -> list[str]:
    lines = [f"plan for {world.size} rank{'s' * (world.size > 1)} on {world.device.type}"]
    for name, value in plan.items():
        shown = f"{value / 2**20:,.1f} MiB" if "bytes" in name else f"{value:,}"
        label = re.sub("_bytes(?=$|_per_step)", "", name).replace("_", " ")
        lines.append(f"  {label:<30}{shown:>20}{' a rank' * name.endswith('_bytes')}")
    return lines + [f"  order {c.order}: rows {c.low:,} to {c.high - 1:,}, modulus {c.modulus:,}, multipliers "
                    f"{c.row_factors}, of signs {c.sign_factors}" for c in config.channels if config.ngram_rows]


def available_bytes(world: World, place: str) -> int:
    """Memory that one rank may still take: free on its GPU, or its part of the host's (for the CPU, or "host_")."""
    if world.device.type == "cuda" and not place:
        return torch.cuda.mem_get_info(world.device)[0]
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if meminfo.exists():
        available = int(re.search(r"MemAvailable:\s*(\d+)", meminfo.read_text())[1]) << 10
    with suppress(OSError, ValueError):  # no such file, or "max": a container without a limit
        limit = int((group / "memory.max").read_text())
        cache = int(re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)[1])
        available = min(available, limit - int((group / "memory.current").read_text()) + cache)
    return available // world.local_size


def check_fits(plan: dict, world: World) -> None:
    """Refuse a run that cannot fit, before it allocates, and name the flag that shrinks its largest part."""
    for place in ("", "host_"):
        needed, available = plan.get(f"{place}bytes_per_rank", 0), available_bytes(world, place)
        if needed > available:
            name, largest = max(plan_parts(plan, place).items(), key=lambda part: part[1])
            part = name.removeprefix("host_").removesuffix("_bytes")
            remedy = REMEDIES.get(part, "--model_dim or --layers")
            if remedy == "--ngram_rows" and world.device.type == "cuda" and not place:
                remedy += ", or keep the table in host memory with --ngram_device=cpu"
            raise UserError(f"{place.replace('_', ' ')}memory: found {available / 2**30:.2f} GiB available to a rank, "
                            f"expected {needed / 2**30:.2f} GiB by the plan, of which {part} takes "
                            f"{largest / 2**30:.2f}; lower {remedy} (see --dry_run)")


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks: mapping and clearing them anew takes longer than the arithmetic on them."""
    if platform.libc_ver()[0] == "glibc":
        for option, value in ((-4, 0), (-1, -1), (-2, 64 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            ctypes.CDLL(None).mallopt(option, value)


# ==== Log: one file a run, opened exclusively by rank 0; the sources beside it, once a folder, by their hashes ========

LOG_EVERY = 10  # steps between lines with the training loss


def variant_of(*classes) -> dict[str, Path]:
    """What tells variants apart: "file: class" of what stands in for Config, GPT and NgramTable, with the file."""
    paths = [Path(sys.modules[c.__module__].__file__).resolve() for c in classes]
    return {f"{path.name}: {c.__name__}": path for path, c in zip(paths, classes)}


class RunLog:
    """Writes `out/run_id.txt` and the screen; silent but on rank 0. On a terminal training has one live line."""

    def __init__(self, config: Config, world: World, header: dict, sources: set[Path]):
        self.main, self.total, self.run_id, self.lost = world.main, config.steps, "", set()
        self.live = self.main and sys.stdout.isatty()
        if not self.main:
            return
        stamp = f"{datetime.now():%Y-%m-%d_%H%M%S}_{config.track}_seed{config.seed}_{os.urandom(2).hex()}"
        self.run_id, folder = config.run_id or stamp, Path(config.out)
        path, digests = folder / f"{self.run_id}.txt", {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "x", encoding="utf-8", buffering=1 << 20)
            for source in sorted({Path(__file__).resolve(), *sources}):
                content = source.read_bytes()
                digests[source.name] = hashlib.sha256(content).hexdigest()
                copy = folder / f"{source.stem}_{digests[source.name][:16]}{source.suffix}"
                if not copy.exists():
                    with written_whole(copy) as part:
                        part.write_bytes(content)
        except OSError as error:
            found = "a file of that name" if isinstance(error, FileExistsError) else error.strerror
            raise UserError(f"{folder if folder.is_file() else path}: found {found}, expected to write a log there; "
                            f"choose another --run_id or --out") from None
        sources = {"source_sha256": digests[Path(__file__).name], "sources": digests}
        self.line("run:" + json.dumps({"format": 1, "run_id": self.run_id} | header | sources), screen=False)
        self.write(sys.stdout, f"log {path}\n")

    def line(self, text: str, screen: bool = True) -> None:
        if self.main:
            self.write(self.file, text + "\n")
            if screen:
                self.write(sys.stdout, ("\r\033[K" if self.live else "") + text + "\n")

    def write(self, file, text: str) -> None:
        """To the log or the screen. One that takes no more (a full disk, a reader that left) ends no run: the other
        gets a warning, once, and what the log could not take waits for space, up to 1 MiB of it."""
        encoding = file.encoding or "utf-8"
        try:
            file.write(text.encode(encoding, "backslashreplace").decode(encoding))
            file.flush()
        except OSError as error:
            if file is sys.stdout:  # so that neither this nor the end of Python fails again
                os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
            if file not in self.lost:
                self.lost.add(file)
                name, other = (file.name, sys.stderr) if file is self.file else ("standard output", self.file)
                why = f"found {error.strerror}, expected to write there; training continues"
                self.write(other, f"warning: {name}: {why}\n")

    def step(self, step: int, train_time_s: float, key: str, loss: float, more: str = "") -> None:
        average_ms = 1e3 * train_time_s / step if step else math.nan
        self.line(f"step:{step}/{self.total} {key}:{loss:.5f} train_time:{1e3 * train_time_s:.0f}ms "
                  f"step_avg:{average_ms:.2f}ms{more}", screen=key == "val_loss" or not self.live)

    def progress(self, step: int, loss: float, tokens_per_s: float, left_s: float) -> None:
        if self.live:
            self.write(sys.stdout, f"\r\033[Kstep {step}/{self.total}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
                                   f"{left_s // 60:.0f}:{left_s % 60:02.0f} left")


def run_header(config: Config, world: World, data: dict, plan: dict) -> dict:
    """What made the run, for the log's first line."""
    def git(*arguments) -> str | None:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        with suppress(OSError, subprocess.CalledProcessError):  # no git here, or no repository
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    info, changes = Path("/proc/cpuinfo"), git("status", "--porcelain")
    cpu = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return {
        "date": datetime.now().isoformat(timespec="seconds"), "config": asdict(config), "seed": config.seed,
        "world_size": world.size, "cpu_name": cpu[1] if cpu else platform.processor() or platform.machine(),
        "device_name": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "cpu_threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(),
        "git_commit": git("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes),
        "data": {name: data[name] for name in ("train", "val", "vocab_size")}, "target_loss": config.target_loss,
        "clock": "train-only", "plan": plan,
    }


class Clock:
    """Seconds of training alone: runs only between start() and stop(), which wait for the device."""

    def __init__(self, world: World, total: float = 0.0):
        self.total, self.began = total, None
        self.wait = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None

    def start(self) -> None:
        self.wait()
        dist.barrier()
        self.began = time.perf_counter()

    def stop(self) -> None:
        self.wait()
        self.total, self.began = self.seconds(), None

    def seconds(self) -> float:
        return self.total + (time.perf_counter() - self.began if self.began is not None else 0.0)


class Stopwatch:
    """Seconds that this thread spends inside `with` blocks; on a GPU those of waiting, not of the work it gets."""
    seconds = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_) -> None:
        self.seconds += time.perf_counter() - self.began


class LossReader:
    """Reads each step's loss two steps later, so that a GPU never waits; logs it, and ends a run that diverged.
    What train_step returns is equal on all ranks, so all stop at one step, for a bad loss or as one was asked to."""

    def __init__(self, world: World, log: RunLog):
        self.cuda, self.log, self.pending, self.stop = world.device.type == "cuda", log, deque(), False

    def push(self, done: int, sums: Tensor, train_time_s: float, tokens_per_s: float) -> None:
        event = None
        if self.cuda:
            sums = torch.empty(2, pin_memory=True).copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((done, sums, event, train_time_s, tokens_per_s))
        self.read(lag=2 if self.cuda else 0)

    def read(self, lag: int = 0) -> None:
        while len(self.pending) > lag:
            done, sums, event, seconds, rate = self.pending.popleft()
            if event is not None:
                event.synchronize()
            loss, wishes = sums.tolist()
            self.stop |= wishes > 0
            if not math.isfinite(loss):
                raise UserError(f"training loss: found {loss} after step {done - 1}, expected a finite number; lower "
                                f"the learning rates (--muon_lr, --adam_lr, --ngram_lr)")
            self.log.progress(done, loss, rate, (self.log.total - done) * seconds / done)
            if done % LOG_EVERY == 0:
                self.log.step(done, seconds, "train_loss", loss, f" tokens_per_s:{rate:.0f}")


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


# ==== Checkpoints: a folder that is whole or not there, written where an update cycle ends ============================
# Parameters and moments by name (dense.pt, from rank 0), each rank's touched table rows (table*.pt), and manifest.json
# with their checksums. One run at a time holds the lock of the folder that they lie in.

CHECKPOINT_FORMAT = 2


@dataclass
class Progress:
    """Where a run stands, besides its tensors. The step alone gives schedules, stream position and table plans."""
    step: int = 0
    train_time_s: float = 0.0
    met: tuple[int, float] | None = None  # step and training seconds at which the target was first met


def find_checkpoint(resume: str, out: str) -> Path:
    """The folder that --resume means. Raises UserError."""
    if resume != "latest":
        return Path(resume)
    latest = Path(out) / "checkpoints" / "latest"
    name = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    if not name.isprintable() or not (latest.parent / name / "manifest.json").is_file():
        raise UserError(f"{latest}: found {name or 'nothing'!r}, expected the name of a checkpoint beside it; name the "
                        f"run's --out, or the checkpoint's folder with --resume=PATH")
    return latest.parent / name


def read_manifest(path: Path) -> dict:
    """manifest.json of a checkpoint. Raises UserError where it is not there, damaged, or something else."""
    found = "something else, or a damaged file"
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest.pop("sha256") == manifest_digest(manifest) and manifest["format"] == CHECKPOINT_FORMAT:
            return manifest
    except OSError as error:
        found = error.strerror
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # all that JSON may say else
        pass
    raise UserError(f"{path}/manifest.json: found {found}, expected a checkpoint's manifest of format "
                    f"{CHECKPOINT_FORMAT}; name a checkpoint's folder, or use an older checkpoint")


def manifest_digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_entry(path: Path) -> dict:
    size = path.stat().st_size
    return {"bytes": size, "sha256": hashlib.sha256(np.memmap(path, mode="r") if size else b"").hexdigest()}


def open_checkpoint(config: Config, data: dict, world: World, variant: list[str]) -> dict:
    """The manifest of the checkpoint to resume, once it is seen to be of this trainer and data and its files to be as
    they were written; each rank reads its part of them. Raises UserError."""
    path = Path(config.resume)
    manifest = read_manifest(path)
    if manifest["variant"] != variant:
        raise UserError(f"{path}: found a checkpoint of {', '.join(manifest['variant'])}, expected one of "
                        f"{', '.join(variant)}; resume it with the script that wrote it")
    there, here = manifest["data"]["shards"], data["shards"]
    grows = not config.spread_rows and config.epochs <= 1  # the stream only grows where shards are added behind
    if there != (here[:len(there)] if grows else here):
        raise UserError(f"{config.data}: found another data set (train shards {', '.join(here)}), expected "
                        f"the one that {path} was trained on ({', '.join(there)}); name its folder with --data")
    for name, expected in list(manifest["files"].items())[world.rank::world.size]:
        part = path / name
        if not part.exists() or file_entry(part) != expected:
            found = f"{part.stat().st_size} bytes, or a wrong checksum" if part.exists() else "no such file"
            raise UserError(f"{part}: found {found}, expected {expected['bytes']} bytes as they were written; "
                            f"the checkpoint is damaged: use an older one")
    return manifest


def write_tensors(path: Path, content: dict) -> dict:
    """torch.save, down to the disk, of finite tensors by name. Returns the manifest's entry."""
    for name, tensor in content.items():
        tensors = tensor.values() if isinstance(tensor, dict) else [tensor]
        norms = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors if t.is_floating_point()]
        if not all(norm.isfinite() for norm in norms):
            raise UserError(f"{path}: found {name} that are not finite, or too large to compute with, expected finite "
                            f"ones; resume an older checkpoint with lower learning rates (--new_rates)")
    try:
        with open(path, "xb") as file:
            torch.save(content, file)
        flush_to_disk(path)
    except (OSError, RuntimeError) as error:  # torch makes its own of a failed write; the cause is behind it
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise UserError(f"{path}: found {getattr(cause, 'strerror', None) or cause}, expected to write there") from None
    return {path.name: file_entry(path)}


class Checkpoints:
    """Writes a run's checkpoints to `out/checkpoints` and keeps the newest. run_ids: its own, last, and earlier."""

    def __init__(self, config: Config, world: World, data: dict, run_ids: list[str], variant: list[str]):
        self.keep, self.world, self.run_ids = config.checkpoint_keep, world, run_ids
        self.folder = Path(config.out) / "checkpoints"
        self.constant = {"format": CHECKPOINT_FORMAT, "variant": variant, "run_ids": run_ids, "world_size": world.size,
                         "torch": torch.__version__, "data": data, "config": asdict(config)}

    def save(self, trainer: Trainer, progress: Progress) -> Path:
        """Write a checkpoint, the latest from then on. A collective: it is whole, or all ranks raise UserError."""
        world, path = self.world, self.folder / f"{self.run_ids[-1]}_step{progress.step:06d}"
        part, files = self.folder / f".{path.name}.part", [None] * world.size
        dense = trainer.optimizer.saved()
        try:
            together(world, lambda: world.main and self.sweep(part))
            dist.all_gather_object(files, together(world, lambda: self.write_parts(part, trainer, dense)))
            manifest = self.constant | asdict(progress) | {
                "updates": trainer.optimizer.updates, "table_updates": trainer.table.updates if trainer.table else 0,
                "files": {name: entry for entries in files for name, entry in entries.items()}}
            together(world, lambda: world.main and self.publish(part, path, manifest))
        except UserError:
            if world.main:
                shutil.rmtree(part, ignore_errors=True)
            raise
        return path

    def sweep(self, part: Path) -> None:
        """Make an empty folder to write to, without what killed runs left: whoever holds the lock is alone."""
        for left in self.folder.glob(".*.part"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        part.mkdir()

    def write_parts(self, part: Path, trainer: Trainer, dense: dict) -> dict:
        files = write_tensors(part / "dense.pt", dense) if self.world.main else {}
        for i, rows in enumerate(trainer.table.saved_parts() if trainer.table else ()):
            if len(rows["ids"]):
                files |= write_tensors(part / f"table{self.world.rank:04d}_{i:04d}.pt", rows)
        return files

    def publish(self, part: Path, path: Path, manifest: dict) -> None:
        with written_whole(part / "manifest.json") as file:
            file.write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}, indent=1))
        removed = self.folder / f".{path.name}.removed.part"
        if path.exists():  # of an earlier run of this name, whose log is gone
            path.rename(removed)
        part.rename(path)
        with written_whole(self.folder / "latest") as latest:
            latest.write_text(path.name)
        mine = re.compile(f"({'|'.join(map(re.escape, self.run_ids))})_step[0-9]+")  # and not what a user made of one
        older = [old for old in self.folder.iterdir() if mine.fullmatch(old.name) and old != path]
        older.sort(key=lambda old: old.stat().st_mtime, reverse=True)
        for old in older[self.keep - 1:]:  # under another name first, so that nothing half-removed looks whole
            shutil.rmtree(old.rename(self.folder / f".{old.name}.removed.part"))
        shutil.rmtree(removed, ignore_errors=True)


def load_checkpoint(path: Path, manifest: dict, trainer: Trainer, data: dict) -> Progress:
    """Give a trainer, of a world of any size, the state that a checkpoint holds. Its files have been checked."""
    def read(name: str) -> dict:
        return torch.load(path / name, map_location="cpu", mmap=True, weights_only=True)

    trainer.optimizer.load(read("dense.pt"), manifest["updates"])
    if trainer.table:
        trainer.table.updates = manifest["table_updates"]
        for name in manifest["files"]:
            if name.startswith("table"):
                trainer.table.load_part(read(name))
    there, target = manifest["config"]["target_loss"], trainer.config.target_loss
    met = manifest["met"] if there == target and manifest["data"]["val"] == data["val"] else None
    return Progress(manifest["step"], manifest["train_time_s"], met and tuple(met))


# ==== Training, evaluation and sampling ===============================================================================

WARMUP_STEPS = 2  # of each stage, untimed, before the clock starts; all that they change is put back


class Trainer:
    """The parts of a run, and the step, evaluation and sample that they make together. Its methods are collectives."""

    def __init__(self, config: Config, world: World, dataset: Dataset, model_class=GPT, table_class=NgramTable):
        self.config, self.world, self.dataset, self.model_class = config, world, dataset, model_class
        self.model = build_model(config, dataset.vocab_size, model_class).to(world.device)
        self.table = table_class(config, world) if config.ngram_rows else None
        self.optimizer = Optimizer(self.model, config, world)
        # A graph for each stage, tied or not, trained or evaluated: more than the 8 that are allowed by default.
        compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True, recompile_limit=64,
                                     isolate_recompiles=True)
        self.forward = compiled(self.model) if config.compile else self.model
        self.flex = config.compile and world.device.type == "cuda"
        self.mask = compiled(attention_mask) if self.flex else attention_mask
        self.rotary = [rotary_table(config, i).to(world.device) for i in range(len(config.stage_list))]
        whole = rank_batch(dataset.val, 0, config.val_tokens // config.seq_len, config.most_micro_rows(world.size),
                           dataset.doc_start, world)
        parts = [Batch(*(t[None] for t in part)) for part in zip(whole.tokens, whole.targets, whole.starts)]
        self.val = [(part, self.table and self.table.plan([part])) for part in parts]  # this rank's, always the same
        self.fetched = self.table_grads = None  # of the update cycle under way
        self.table_time, self.host_time = Stopwatch(), Stopwatch()

    # -- ahead of time, on the CPU -------------------------------------------------------------------------------------

    def prepare(self, cycle: int) -> tuple[list[Batch], Cycle | None]:
        """The batches of an update cycle and the table's plan for them."""
        config, world, stage = self.config, self.world, self.config.stage(cycle * self.config.ngram_update_every)
        rows, micro_rows = stage.batch_tokens // config.seq_len, config.micro_rows(world.size, stage.batch_tokens)
        batches = [rank_batch(self.dataset.train, config.tokens_before(step) // config.seq_len, rows, micro_rows,
                              self.dataset.doc_start, world, stage.length) for step in config.cycle_steps(cycle)]
        plan = self.table and self.table.plan(batches, world.loader_group)
        if world.device.type == "cuda":  # page-locked, so that the copies to the device run beside its work
            batches = [with_tensors(batch, Tensor.pin_memory) for batch in batches]
            plan = plan and with_tensors(plan, Tensor.pin_memory)
        return batches, plan

    # -- on the device -------------------------------------------------------------------------------------------------

    def train_step(self, step: int, batch: Batch, plan: Cycle | None, stop: bool = False,
                   upcoming: Cycle | None = None) -> Tensor:
        """One step; `plan` is that of the whole update cycle, `upcoming` of the next, where that is known.

        Returns float32 [2] on the device: the mean loss of all ranks, and how many of them want to `stop`.
        """
        config, table, sums = self.config, self.table, torch.zeros(2, device=self.world.device)
        index, batch_tokens = step % config.ngram_update_every, config.stage(step).batch_tokens
        if table and index == 0:
            with self.table_time:
                self.fetched = table.fetch(plan, self.host_time)
                if table.host and upcoming:
                    table.host.look_ahead(plan, upcoming)
                self.table_grads = torch.empty(plan.asked, config.ngram_row_dim, device=self.world.device)
        for m, (tokens, targets, starts) in enumerate(zip(batch.tokens, batch.targets, batch.starts)):
            memory = None
            if table:
                slots, reads, signs = (numbers[index].chunk(len(batch.tokens), dim=1)[m]
                                       for numbers in (plan.slots, plan.reads, plan.signs))
                with self.table_time:
                    memory = table.read(self.fetched, reads, signs).view(*tokens.shape, -1).requires_grad_()
            loss = self.forward(tokens, starts, memory, targets, **self.stage_inputs(step, starts))
            loss.backward()
            if table:
                with self.table_time:
                    table.add_grad(self.table_grads, slots, signs, memory.grad.view(-1, config.ngram_row_dim),
                                   fresh=(index, m) == (0, 0))
            sums[0] += loss.detach() / batch_tokens
        scale = lr_scale(step, config)
        if table and (index + 1 == config.ngram_update_every or step + 1 == config.steps):
            with self.table_time:
                table.update(plan, self.table_grads, config.ngram_lr * scale)
            self.fetched = self.table_grads = None
        self.optimizer.step(scale, muon_momentum(step, config), batch_tokens, tied=step < config.untie_step)
        if step + 1 == config.untie_step:
            self.optimizer.untie()
        sums[1] += stop
        dist.all_reduce(sums)
        return sums

    def stage_inputs(self, step: int, starts: Tensor, flex: bool | None = None) -> dict:
        """What the model is given besides tokens at this step of the schedules, or, in an evaluation, before it."""
        config, windows, flex = self.config, self.config.stage(step).windows, self.flex if flex is None else flex
        make = self.mask if flex else attention_mask
        masks = {window: make(starts, window, flex) for window in set(windows)}
        return dict(masks=tuple(masks[window] for window in windows), rotary=self.rotary[config.stage(step).index],
                    tied=step < config.untie_step)

    def val_parts(self, parts: list | None = None):
        """Yield tokens, starts, memory, targets of validation's micro-batches, or others, as the model takes them."""
        for prepared in self.val if parts is None else parts:
            batch, plan = (holder and to_device(holder, self.world.device) for holder in prepared)
            tokens, memory = batch.tokens[0], None
            if plan:
                memory = self.table.read(self.table.fetch(plan), plan.reads[0], plan.signs[0]).view(*tokens.shape, -1)
            yield tokens, batch.starts[0], memory, batch.targets[0]

    @torch.no_grad()
    def evaluate(self, step: int, parts: int | None = None) -> float:
        """Mean loss in nats a token over the validation tokens of all ranks, or each rank's first micro-batches."""
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for tokens, starts, memory, targets in self.val_parts(self.val[:parts]):
            total[0] += self.forward(tokens, starts, memory, targets, **self.stage_inputs(step, starts))
            total[1] += (targets >= 0).sum()
        dist.all_reduce(total)
        return float(total[0] / total[1])

    @torch.no_grad()
    def sample(self, step: int, count: int, prompt: list[int] = []) -> list[int]:
        """The prompt's ids and `count` more, drawn at temperature 0.8; all ranks draw the same."""
        generator = torch.Generator().manual_seed(self.config.seed)
        ids = [self.dataset.doc_start, *prompt]
        for _ in range(count):
            batch = make_batch(torch.tensor([ids[-self.config.seq_len:] + [-1]]), 1, 1, self.dataset.doc_start)
            tokens, starts, memory, _ = next(self.val_parts([(batch, self.table and self.table.plan([batch]))]))
            inputs = self.stage_inputs(step, starts, flex=False)  # a new length every time
            head = self.model.embed if inputs.pop("tied") else self.model.head
            x = self.model.hidden(tokens, starts, memory, **inputs)[0, -1:]
            logits = SOFTCAP * squashed_logits(x, head.to(x.dtype))[0, :self.dataset.vocab_size].cpu()
            ids.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
        return ids[1:]

    def warm_up(self) -> None:
        """Run a cycle and an evaluation of each stage, then begin anew: the clock meets all warm, and unchanged."""
        config, table = self.config, self.table
        firsts = {*(stage.first for stage in config.stage_list), config.untie_step}
        for first in sorted(step for step in firsts if step < config.steps):
            cycle = first // config.ngram_update_every
            batches, plan = to_device_all(self.prepare(cycle), self.world.device)
            for _ in range(WARMUP_STEPS):
                for step, batch in zip(config.cycle_steps(cycle), batches):
                    self.train_step(step, batch, plan)
            self.evaluate(first, parts=1)
            if table:
                table.forget(plan.owned)
        self.model.load_state_dict(build_model(config, self.dataset.vocab_size, self.model_class).state_dict())
        self.optimizer.forget()
        self.table_time, self.host_time = Stopwatch(), Stopwatch()
        if table and table.host:
            table.host.thread.worked_s = 0.0


def to_device_all(prepared: tuple, device: torch.device) -> tuple[list[Batch], Cycle | None]:
    batches, plan = prepared
    return [to_device(batch, device) for batch in batches], plan and to_device(plan, device)


def train(trainer: Trainer, log: RunLog, progress: Progress, checkpoints: Checkpoints | None, stop: StopSignal) -> None:
    """The training loop, from where `progress` stands to the end, without the final evaluation."""
    config, world, table, first = trainer.config, trainer.world, trainer.table, progress.step
    every, save_every, started = config.ngram_update_every, config.checkpoint_every, progress.train_time_s
    clock, reader, waited = Clock(world, started), LossReader(world, log), Stopwatch()
    loader = Loader(trainer.prepare, range(first // every, -(-config.steps // every)))
    upcoming, graphs = None, compiled_graphs()

    def pause() -> None:
        """Stop the clock when all that the steps so far have begun is done, on all ranks."""
        if clock.began is not None:
            reader.read()
            if table and table.host:
                table.wait()
                dist.barrier()
            loader.rest()
            clock.stop()
            progress.train_time_s = clock.seconds()

    for step in range(first, config.steps):
        if config.val_every and step % config.val_every == 0:
            pause()
            validate(trainer, log, progress)
        if clock.began is None:
            clock.start()
        if step % every == 0:
            with waited:
                prepared = upcoming or loader.next()
                upcoming = loader.next() if table and table.host else None
            batches, plan = to_device_all(prepared, world.device)
        sums = trainer.train_step(step, batches[step % every], plan, stop.asked(), upcoming and upcoming[1])
        done, seconds = step + 1, clock.seconds()
        reader.push(done, sums, seconds, config.tokens_before(done) / seconds)
        progress.step, progress.train_time_s = done, seconds
        cycle_ends = done % every == 0 or done == config.steps
        due = save_every and done < config.steps and done // save_every > (done - every) // save_every
        if cycle_ends and (reader.stop or due):
            pause()
            save_on_the_way(trainer, log, progress, checkpoints, stop if reader.stop else None)
    pause()
    report_time(trainer, log, progress.train_time_s - started, waited.seconds, first)
    if compiled_graphs() > graphs:
        log.line(f"warning: {compiled_graphs() - graphs} graphs were compiled on the clock")


def save_on_the_way(trainer: Trainer, log: RunLog, progress: Progress, checkpoints: Checkpoints | None,
                    stop: StopSignal | None) -> None:
    """A checkpoint inside a run; training is worth more than one that cannot be written. With `stop` the run ends."""
    saved = "without a checkpoint (see --checkpoint)"
    try:
        if checkpoints:
            saved = f"checkpoint {checkpoints.save(trainer, progress)}"
    except UserError as error:
        if stop:
            raise
        saved = f"warning: no checkpoint at step {progress.step}: {error}; training continues"
    if stop:
        raise Stopped(stop.signum or signal.SIGTERM, f" after step {progress.step}, {saved}")
    log.line(saved, screen=saved.startswith("warning"))


def validate(trainer: Trainer, log: RunLog, progress: Progress) -> float:
    val_loss = trainer.evaluate(progress.step)
    log.step(progress.step, progress.train_time_s, "val_loss", val_loss)
    if not math.isfinite(val_loss):
        raise UserError(f"validation loss: found {val_loss} at step {progress.step}, expected a finite number")
    if progress.met is None and val_loss <= trainer.config.target_loss:
        progress.met = (progress.step, progress.train_time_s)
    return val_loss


def report_time(trainer: Trainer, log: RunLog, seconds: float, waited_s: float, first: int) -> None:
    """Where the training time since step `first` went; on a GPU, a profiler knows what the table took."""
    world, table = trainer.world, trainer.table
    on_cpu = f", table {trainer.table_time.seconds:.2f} s" if world.device.type == "cpu" else ""
    log.line(f"waited for data {waited_s:.2f} s{on_cpu} of {seconds:.2f} s")
    if table and table.host:
        host_s = trainer.host_time.seconds
        log.line(f"waited for rows in host memory {host_s:.2f} s ({host_s / max(seconds, 1e-9):.1%} of the time); "
                 f"the host's thread worked {table.host.thread.worked_s:.2f} s, evaluations included")
    flops = sum(max(0, stage.end - max(first, stage.first)) * stage.batch_tokens *
                trainer.model.flops_per_token(stage.windows) for stage in trainer.config.stage_list)
    log.line(f"{1e-12 * flops / world.size / max(seconds, 1e-9):.3f} TFLOP/s a rank")


def conclude(trainer: Trainer, log: RunLog, tokenizer, progress: Progress, checkpoints: Checkpoints | None) -> float:
    """The last checkpoint first, then what may fail: final evaluation and sample. The result is the last two lines,
    which no failed checkpoint must lose. Returns the final validation loss."""
    config, failed = trainer.config, None
    try:
        if checkpoints:
            log.line(f"checkpoint {checkpoints.save(trainer, progress)}")
    except UserError as error:
        failed = error
    val_loss = validate(trainer, log, progress)
    if config.sample_tokens:
        ids = trainer.sample(config.steps, config.sample_tokens)
        text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
        log.line("sample:\n" + "\n".join("  | " + line for line in text.splitlines()))
    log.line(f"final step:{config.steps}/{config.steps} val_loss:{val_loss:.5f} "
             f"train_time:{1e3 * progress.train_time_s:.0f}ms")
    outcome = f"met at step:{progress.met[0]} train_time:{1e3 * progress.met[1]:.0f}ms" if progress.met else "not met"
    log.line(f"target val_loss:{config.target_loss} {outcome}")
    if failed:
        raise failed
    return val_loss


# ==== Main ============================================================================================================

def main(argv: list[str] | None = None, config_class=Config, model_class=GPT, table_class=NgramTable) -> float:
    """Run what the command line asks for, with a variant's classes. Returns the final validation loss, or nan."""
    config = parse_args(sys.argv[1:] if argv is None else argv, config_class)
    if config.ranks:  # none of which need be here, nor the tokens: they are GPT-2's then
        world = World(0, config.ranks, config.ranks, torch.device(config.device), None, None)
        vocab_size, tokens = GPT2_VOCAB_SIZE, 0
        with suppress(UserError):
            dataset = open_dataset(config)
            vocab_size, tokens = dataset.vocab_size, dataset.train.num_tokens
        print("\n".join(plan_lines(make_plan(config, world, vocab_size, tokens, model_class), config, world)))
        return math.nan
    if config.device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # tables' sizes are new every cycle
    with StopSignal() as stop, join_world(config, stop) as world:
        dataset = together(world, lambda: open_dataset(config))
        plan = make_plan(config, world, dataset.vocab_size, dataset.train.num_tokens, model_class)
        if world.main:
            with nullcontext() if config.dry_run else suppress(OSError):  # the log meets it too, and warns
                print("\n".join(plan_lines(plan, config, world)), flush=True)
        classes = config_class, model_class, table_class
        return math.nan if config.dry_run else run(config, world, dataset, plan, stop, classes)


def run(config: Config, world: World, dataset: Dataset, plan: dict, stop: StopSignal, classes: tuple) -> float:
    """The run itself, and the checks that it may start. Returns the final validation loss."""
    if world.device.type == "cpu":
        keep_freed_memory()
    elif config.ngram_device == "cpu" and os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's, for work on a GPU
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
    together(world, lambda: (check_fits(plan, world), check_tokens(config, dataset)))
    data, variant = identify_data(config, dataset, world), variant_of(*classes)
    resumed = together(world, lambda: config.resume and open_checkpoint(config, data, world, list(variant)))
    tokenizer = together(world, lambda: config.sample_tokens and load_tokenizer(config.data, dataset.vocab_size))
    header = run_header(config, world, data, plan)
    if resumed:
        header["resumed"] = {key: resumed[key] for key in ("run_ids", "step")}
    log = together(world, lambda: RunLog(config, world, header, set(variant.values())))
    keeps, run_ids = config.checkpoint or config.checkpoint_every > 0, [log.run_id]
    locks = world.main and (keeps or resumed)  # which a resumed run shares with the one that may still be writing
    try:
        dist.broadcast_object_list(run_ids)
        folder = Path(config.out) / "checkpoints"
        with together(world, lambda: lock_folder(folder, "training") if locks else nullcontext()):
            trainer, progress = Trainer(config, world, dataset, *classes[1:]), Progress()
            if trainer.table and trainer.table.slow_because:
                log.line(f"the table's loops are not compiled ({trainer.table.slow_because}); the run is slower")
            try:
                trainer.warm_up()
            except torch._dynamo.exc.BackendCompilerFailed as error:
                raise UserError(f"--compile: found that torch cannot compile ({error.inner_exception}), expected a C++ "
                                f"compiler (g++) or, on a GPU, triton; install it, or use --no_compile") from error
            if resumed:
                progress = load_checkpoint(Path(config.resume), resumed, trainer, data)
                run_ids = resumed["run_ids"] + run_ids
                log.line(f"resumed {config.resume} at step {progress.step}")
            checkpoints = Checkpoints(config, world, data, run_ids, list(variant)) if keeps else None
            unfinished = progress.step < config.steps
            if unfinished:
                stop.may_wait = True
                train(trainer, log, progress, checkpoints, stop)
                stop.may_wait = False
            val_loss = conclude(trainer, log, tokenizer, progress, checkpoints if unfinished else None)
        if stop.signum:
            raise Stopped(stop.signum)  # too late to stop anything, but whoever sent it wants to know
        return val_loss
    except BaseException as error:
        log.line(world.first_failure(describe(error))[1], screen=False)
        raise


if __name__ == "__main__":
    run_command(main)

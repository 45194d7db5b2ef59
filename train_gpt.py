"""Train a GPT with a hashed n-gram memory to a target validation loss in the least wall-clock time.

    python train_gpt.py                                        one process, the `cpu` track
    torchrun --standalone --nproc_per_node=8 train_gpt.py      one process a GPU, the `fineweb` track
    python train_gpt.py --help                                 every flag with its default

The file reads top to bottom as a token travels: config, n-gram table, layers, model, update rules, optimizer, schedules, plan, training,
main. Importing it does nothing. tokens.py brings the batches: shards, stream, loader, tokenizer. harness.py holds what decides no
number of a run: ranks and their errors, the plan, the log, checkpoints, clocks. host_rows.py stands between a table in host memory
and the device. table_kernel.cpp is optional.
"""
from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import mmap
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import ScalingType
from torch.optim.adamw import adamw

from harness import (Checkpoints, Clock, LossWatch, Progress, RunLog, SharedError, StopSignal, Stopped, TimeShare, UserError,
                     World, check_config, check_fits, compiled_graphs, error_text, exit_status, find_checkpoint, flag,
                     join_world, keep_freed_memory, load_checkpoint, open_checkpoint, parse_flags, peak_tflops, plan_bytes,
                     plan_lines, read_manifest, table_kernel, together)
from host_rows import HostRows
from tokens import (Batch, Dataset, GPT2_VOCAB_SIZE, TIMES_TRAINED, check_tokens, fingerprints, load_ahead, make_batch, open_dataset,
                    predecessors, rank_batch, sort_unique, table_report, times_trained, to_device, tokenizer_for_samples, with_tensors)


# =====================================================================================================================
# Config: every size and switch of a run. One frozen dataclass; the command line is made from its fields.
# =====================================================================================================================

@dataclass(frozen=True)
class Config:
    # run
    track: str = flag("auto", "preset: cpu, fineweb, or of fineweb for one GPU fineweb80 or fineweb24; auto goes by the device")
    device: str = flag("auto", "cpu or cuda; auto takes cuda where there is one")
    seed: int = flag(0, "seed of the weights; the data and the sign patterns never depend on it")
    run_id: str = flag("", "name of the log file; empty makes one of the date and the seed")
    out: str = flag("logs", "folder of the log")
    log_every: int = flag(10, "steps between lines with the training loss")
    ranks: int = flag(0, "with --dry_run, plan for this many ranks, on a device that need not be there; 0: those that run")
    dry_run: bool = flag(False, "print the plan (parameters, memory, tokens, exchange) and stop")
    peak_tflops: float = flag(0.0, "what one rank's device can do at the model's precision, for MFU and --dry_run; 0: by the GPU's name")
    link_gbs: float = flag(0.0, "bandwidth between ranks in GB/s each way, for the bound that --dry_run tells")
    table_report: bool = flag(False, "print how the run's tokens fill the n-gram table and stop, without training")
    dtype: str = flag("auto", "type of the model's arithmetic, bfloat16 or float32; auto takes bfloat16 where the device has units for it")
    compile: bool = flag(False, "torch.compile the model (on by default in the fineweb track)")
    warmup_steps: int = flag(2, "untimed steps before the clock starts; all they change is put back")
    timeout_s: int = flag(600, "seconds after which a collective whose partner is gone ends the run")
    # checkpoints
    checkpoint: bool = flag(False, "save a checkpoint at the end, and when SIGTERM or SIGINT stops the run")
    checkpoint_every: int = flag(0, "steps between checkpoints, besides those of --checkpoint; 0: none")
    checkpoint_keep: int = flag(2, "checkpoints of a run that are kept, the newest ones")
    resume: str = flag("", "checkpoint to go on from: its folder, or `latest` of --out; flags not given are as they were in its run")
    eval_only: bool = flag(False, "evaluate the checkpoint of --resume, also without its table and by new and known n-grams, sample, and stop")
    # data
    data: str = flag("data/torch_source", "folder of *_train_*.bin and *_val_*.bin shards")
    epochs: int = flag(1, "how often the train shards may be read through")
    spread_rows: bool = flag(True, "take rows from all over the data in a fixed order, for unshuffled documents")
    seq_len: int = flag(128, "tokens a row")
    batch_tokens: int = flag(4096, "tokens a step over all ranks")
    stages: str = flag("", "end:batch:short-long:lr[:length],... until which part of the steps, which part of batch_tokens, which attention "
                           "windows, what part of the learning rates, segments of at most how many tokens; empty: one stage")
    micro_batch_tokens: int = flag(0, "tokens a rank holds in memory at once; 0: its whole share of a step")
    # evaluation
    val_tokens: int = flag(65_536, "validation tokens, whatever the number of ranks")
    val_every: int = flag(20, "steps between evaluations; 0: only at the end")
    target_loss: float = flag(3.30, "validation loss in nats a token that the run is to reach")
    sample: str = flag("", "text to continue after the last evaluation; empty starts a document")
    sample_tokens: int = flag(96, "tokens of text to print after the last evaluation")
    # model
    layers: int = flag(3, "blocks")
    model_dim: int = flag(128, "width of the residual stream")
    heads: int = flag(1, "attention heads; model_dim / heads is even")
    rotary_base: float = flag(10_000.0, "base of the rotary frequencies")
    head_chunk_tokens: int = flag(512, "tokens whose logits exist at once")
    fp8_head: bool = flag(False, "make the logits by a product in float8 (their gradients stay in --dtype)")
    attn_gate: bool = flag(True, "scale each head's output by a gate on the block's input")
    smear: bool = flag(True, "mix a gated part of the previous token's embedding into each")
    skips: bool = flag(False, "add the input of each early block to that of its mirror image")
    value_embeds: tuple = flag((0, 2), "blocks, counted from 0 (those that exist), whose values take in a gated token embedding of their own")
    tie_until: float = flag(0.66, "fraction of the steps during which head and embedding are one matrix")
    # n-gram table
    ngram_rows: int = flag(1_000_000, "rows of the table over all ranks; 0: no table")
    ngram_dim: int = flag(0, "width of what a position reads, at most model_dim; 0: model_dim")
    ngram_orders: tuple = flag((2, 3), "orders of the hashed n-grams")
    ngram_split: tuple = flag((), "shares of the rows by order, e.g. 1,3; empty: equal")
    ngram_heads: int = flag(1, "hashes an order, each with rows and multipliers of its own, and a prime modulus where there are several")
    ngram_canonical: bool = flag(False, "hash classes of tokens that differ in case, accents or white space alone")
    ngram_combine: str = flag("sum", "sum the rows of all hashes, or concat: each is a slice of ngram_dim")
    ngram_gate: str = flag("scale", "what a block takes in: scale, a trained number times the memory, or context, a gated projection of it")
    ngram_layers: tuple = flag((), "blocks, counted from 0, that take the memory in; empty: all")
    ngram_signs: int = flag(8192, "sign patterns in the pool; 0: no signs")
    ngram_device: str = flag("auto", "where the table lies: auto, beside the model, or cpu, in host memory, rows read ahead and updated there")
    ngram_dtype: str = flag("bfloat16", "type of the rows: bfloat16 or float32")
    ngram_second_moment: str = flag("row", "second moment of the row-sparse Adam: one a row, or one an element")
    ngram_lr: float = flag(0.56, "learning rate of the table before the schedule")
    ngram_beta2: float = flag(0.95, "decay of the table's second moment an update")
    ngram_wd: float = flag(0.014, "weight decay of the table, only where it agrees with the update")
    ngram_update_every: int = flag(1, "steps whose gradients add up to one table update")
    ngram_kernel: bool = flag(True, "on the CPU, compile the table's loops with the C++ compiler, where there is one")
    # optimizer
    steps: int = flag(180, "optimizer steps")
    muon_lr: float = flag(0.035, "learning rate of the matrices (Muon)")
    muon_momentum: float = flag(0.95, "Nesterov momentum of Muon, reached from 0.85")
    muon_momentum_steps: int = flag(300, "steps over which the momentum rises")
    muon_momentum_cooldown: int = flag(0, "last steps over which it falls back")
    muon_beta2: float = flag(0.95, "NorMuon: decay of the second moment of each row of an update; 0: plain Muon")
    adam_lr: float = flag(0.03, "learning rate of everything else (Adam)")
    adam_beta1: float = flag(0.8, "first-moment decay of Adam")
    adam_beta2: float = flag(0.95, "second-moment decay of Adam")
    weight_decay: float = flag(0.0, "decoupled weight decay, times lr, times the multiplier in RULES")
    cooldown: float = flag(0.6, "last fraction of the steps over which the learning rate falls")
    final_lr: float = flag(0.0, "learning rate at the last step as a fraction of the highest")

    def __post_init__(self):
        object.__setattr__(self, "ngram_dim", self.ngram_dim or self.model_dim)
        if self.dtype == "auto":
            known = torch.cpu.get_capabilities()
            has_units = self.device == "cuda" or known.get("amx_bf16") or known.get("avx512_bf16")
            object.__setattr__(self, "dtype", "bfloat16" if has_units else "float32")
        object.__setattr__(self, "value_embeds", tuple(block for block in self.value_embeds if 0 <= block < self.layers))
        check_config(self, TRACKS, ROW_MULTIPLIERS, channel_bounds)

    @functools.cached_property
    def stage_list(self) -> tuple[Stage, ...]:
        """The stages of a run; a stage ends where an update cycle of the table ends."""
        stages, first, every = [], 0, self.ngram_update_every
        for text in (self.stages or f"1:1:{self.seq_len}-{self.seq_len}:1").split(","):
            try:
                end, batch, windows, lr, *length = text.split(":")
                last = min(self.steps, round(Fraction(end) * self.steps / every) * every) if Fraction(end) < 1 else self.steps
                rows = int(Fraction(batch) * self.batch_tokens) // self.seq_len
                stages.append(Stage(first, last, rows * self.seq_len, tuple(map(int, windows.split("-", 1))), float(lr),
                                    *(map(int, length) if length else (self.seq_len,))))
            except (ValueError, TypeError, ZeroDivisionError):
                raise SharedError(f"--stages: found {text!r}, expected end:batch:short-long:lr[:length], as in 1/3:1/2:384-896:0.6") from None
            first = last
        return tuple(stages)

    def stage_index(self, step: int) -> int:
        """Number of the stage that a step belongs to; the end of the run belongs to the last."""
        return next((i for i, stage in enumerate(self.stage_list) if step < stage.end), len(self.stage_list) - 1)

    def stage(self, step: int) -> Stage:
        return self.stage_list[self.stage_index(step)]

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one: the position in the stream."""
        return sum(max(0, min(step, stage.end) - stage.first) * stage.batch_tokens for stage in self.stage_list)

    def micro_rows(self, world_size: int, batch_tokens: int) -> int:
        """Rows of a micro-batch: the largest rank's share of a step, cut into as few equal parts as micro_batch_tokens allows."""
        share = -(-batch_tokens // self.seq_len // world_size)
        parts = -(-share // min(share, self.micro_batch_tokens // self.seq_len or share))
        return -(-share // parts)

    def most_micro_rows(self, world_size: int) -> int:
        """Of any stage."""
        return max(self.micro_rows(world_size, stage.batch_tokens) for stage in self.stage_list)

    @property
    def ngram_row_dim(self) -> int:
        """Width of a row of the table."""
        return self.ngram_dim // (len(self.ngram_orders) * self.ngram_heads) if self.ngram_combine == "concat" else self.ngram_dim

    @property
    def memory_layers(self) -> tuple[int, ...]:
        return self.ngram_layers or tuple(range(self.layers))

    @property
    def untie_step(self) -> int:
        """From this step on head and embedding are two matrices; rounded to a cycle of the table as the ends of stages are."""
        return round(self.tie_until * self.steps / self.ngram_update_every) * self.ngram_update_every


@dataclass(frozen=True)
class Stage:
    """Steps [first, end) of a run with their batch, their attention windows (short and long, in tokens), learning rate factor, and
    the most tokens of a segment: a shorter sequence is a row with more segments, so that no shape ever changes."""
    first: int
    end: int
    batch_tokens: int
    windows: tuple[int, int]
    lr: float
    length: int


TRACKS = {
    "cpu": {},  # the defaults above
    "fineweb": dict(  # eight 80 GB GPUs; batches, windows and learning rates grow together, as in recent records
        data="data/fineweb10B", spread_rows=False, compile=True, warmup_steps=3, seq_len=2048, batch_tokens=393_216,
        stages="1/3:1/3:384-896:0.6,2/3:2/3:640-1408:0.85,1:1:896-1664:1", micro_batch_tokens=49_152, head_chunk_tokens=8192,
        val_tokens=10_485_760, val_every=125, target_loss=3.28, sample_tokens=0, log_every=25, layers=11, model_dim=768, heads=6,
        skips=True, value_embeds=(0, 1, 2, 9, 10), tie_until=2 / 3,
        steps=1600, muon_lr=0.023, muon_momentum_cooldown=50, weight_decay=1.2, adam_lr=0.008, ngram_rows=84_602_880,
        ngram_update_every=2),
}
TRACKS["fineweb80"] = TRACKS["fineweb"] | dict(ngram_rows=21_150_720)  # one GPU of 80 GB or more: a table of 30 GiB
TRACKS["fineweb24"] = TRACKS["fineweb"] | dict(  # one GPU of 24 GB
    ngram_rows=2_643_840, ngram_update_every=1, micro_batch_tokens=8_192, head_chunk_tokens=4_096)


# Flags that may change when a run goes on from a checkpoint, since no weight depends on them but for rounding; NOT_RESUMED ones start afresh.
NOT_RESUMED = {"ranks", "device", "run_id", "out", "dry_run", "table_report", "eval_only"}
FREE_ON_RESUME = NOT_RESUMED | {
    "peak_tflops", "link_gbs", "resume", "log_every", "compile", "warmup_steps", "timeout_s", "checkpoint", "checkpoint_every",
    "checkpoint_keep", "data", "epochs", "micro_batch_tokens", "val_tokens", "val_every", "target_loss", "sample", "sample_tokens",
    "head_chunk_tokens", "ngram_device", "ngram_kernel"}


def parse_args(argv: list[str]) -> Config:
    """Command line to Config: `--flag=value` or `--flag value`, dash or underscore, `--flag`/`--no-flag` for booleans.

    The flags stand above the track's preset. Raises UserError that names an unknown flag or a bad value.
    """
    given = parse_flags(Config, argv, __doc__.split("\n\n")[0])
    if given.get("device", "auto") == "auto":
        given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if given.get("track") == "auto":
        del given["track"]
    if given.get("resume"):
        return resumed_config(given)
    if "track" not in given:
        given["track"] = "fineweb" if given["device"] == "cuda" else "cpu"
    return configure(TRACKS.get(given["track"], {}), given)


def configure(base: dict, given: dict) -> Config:
    """The flags given above a base; a text to continue asks for a sample where the base makes none."""
    if given.get("sample") and base.get("sample_tokens") == 0:
        base = base | {"sample_tokens": Config.sample_tokens}
    return Config(**(base | given))


def resumed_config(given: dict) -> Config:
    """The configuration of a checkpoint's run with the flags given now, which must not contradict it."""
    path = find_checkpoint(given["resume"], given.get("out", Config.out))
    if "out" not in given and path.parent.name == "checkpoints":  # so that the run's next `latest` is found where this one was
        given["out"] = str(path.parent.parent)
    saved = {name: tuple(value) if isinstance(value, list) else value for name, value in read_manifest(path)["config"].items()}
    unknown = saved.keys() ^ {f.name for f in fields(Config)}
    if unknown:
        raise SharedError(f"{path}: found a checkpoint that disagrees on the flags {', '.join(sorted(unknown))}, expected one that "
                          f"this version of train_gpt.py wrote; go on with the version that lies beside its run's log")
    config = configure({name: value for name, value in saved.items() if name not in NOT_RESUMED}, given | {"resume": str(path)})
    wrong = [f"--{name}={getattr(config, name)} (there {value})" for name, value in saved.items()
             if name not in FREE_ON_RESUME and getattr(config, name) != value]
    if wrong:
        raise SharedError(f"{path}: found flags that contradict the checkpoint: {', '.join(wrong)}; leave them out to go on with "
                          f"that run, or start another without --resume")
    return config


# =====================================================================================================================
# N-gram table: rows addressed by hashes of the last tokens, sharded over ranks, updated where a step touched them.
# Its seams: addressing (ngram_addresses), storage (zeros_where_touched, HostRows), read (NgramTable.read), update (row_adam_update).
# =====================================================================================================================

# Odd multipliers below 2^16, so that products with ids below 2^16 stay below 2^32. Orders 2 and 3 are record 92's.
ROW_MULTIPLIERS = {2: (36313, 27191), 3: (17351, 60961, 45259), 4: (52951, 22277, 64033, 31393)}
SIGN_MULTIPLIERS = {2: (48271, 30011), 3: (58699, 39779, 26801), 4: (40009, 61027, 20897, 33601)}
SIGN_POOL_SEED = 20260905  # never the run's seed
ADAM_EPS = 1e-10
CHECKPOINT_PART_ROWS = 1 << 19  # table rows a file: bounds what a rank holds besides
MAX_MESSAGE_BYTES = 1 << 30  # NCCL and gloo count a message in 32 bits somewhere; stay well below


def channel_bounds(config: Config) -> list[tuple[int, int]]:
    """[first, last) row of each channel, orders first, then heads; the last row of each is reserved for positions without history."""
    shares, heads = config.ngram_split or (1,) * len(config.ngram_orders), config.ngram_heads
    cuts = [config.ngram_rows * sum(shares[:c]) // sum(shares) for c in range(len(shares) + 1)]
    return [(low + (high - low) * head // heads, low + (high - low) * (head + 1) // heads)
            for low, high in zip(cuts, cuts[1:]) for head in range(heads)]


@functools.cache
def channel_hash(order: int, head: int, heads: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Row and sign multipliers of a channel, and the modulus of its row hash, for `rows` that are not reserved.

    The first head has the record's multipliers; one head alone has its modulus too, all rows; the k-th of several has the k-th largest
    prime that fits (1 where there is none).
    """
    if heads == 1:
        return ROW_MULTIPLIERS[order], SIGN_MULTIPLIERS[order], rows
    primes = (n for n in range(rows, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    modulus = next(itertools.islice(primes, head, None), 1)
    if head == 0:
        return ROW_MULTIPLIERS[order], SIGN_MULTIPLIERS[order], modulus
    generator = torch.Generator().manual_seed(SIGN_POOL_SEED + 1000 * order + head)
    drawn = (torch.randint(1 << 15, (2, order), generator=generator) * 2 + 1).tolist()  # odd and below 2^16, as the others
    return tuple(drawn[0]), tuple(drawn[1]), modulus


class Channel(NamedTuple):
    """One hash of one order: rows [low, high) of the table, the last one reserved, and the constants of its hashes."""
    order: int
    head: int
    low: int
    high: int
    row_factors: tuple[int, ...]
    sign_factors: tuple[int, ...]
    modulus: int


def channels(config: Config) -> list[Channel]:
    hashes = itertools.product(config.ngram_orders, range(config.ngram_heads))
    return [Channel(order, head, low, high, *channel_hash(order, head, config.ngram_heads, high - low - 1))
            for (order, head), (low, high) in zip(hashes, channel_bounds(config))]


def hash_lines(config: Config) -> list[str]:
    """What the plan says of each hash, where there is more than the record's one an order."""
    if not config.ngram_rows or config.ngram_heads == 1:
        return []
    return [f"  order {c.order}, head {c.head}: rows {c.low:,} to {c.high - 1:,}, modulus {c.modulus:,}, multipliers {c.row_factors}, "
            f"of signs {c.sign_factors}" for c in channels(config)]


def ngram_addresses(tokens: Tensor, segment_starts: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Row and sign-pattern numbers of every position's n-grams.

    tokens int64 [T], ids below 2^16; segment_starts bool [T], where position 0 counts as a start. Returns (rows, signs), both
    int64 [C, T] with C = orders x heads. The n-gram at t ends with tokens[t] and reads nothing before its segment. Exact integers.
    """
    history, rows, signs = predecessors(segment_starts), [], []
    for order, _, low, high, row_factors, sign_factors, modulus in channels(config):
        row_hash, sign_hash = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for back, (row_factor, sign_factor) in enumerate(zip(row_factors, sign_factors)):
            token = tokens.roll(back)  # what it wraps around is masked below
            row_hash ^= row_factor * token
            sign_hash ^= sign_factor * token
        complete = history >= order - 1
        rows.append(torch.where(complete, low + row_hash % modulus, high - 1))
        signs.append(torch.where(complete, sign_hash % max(1, config.ngram_signs), 0))
    return torch.stack(rows), torch.stack(signs)


def sign_pool(config: Config, dtype: torch.dtype) -> Tensor:
    """[signs, ngram_row_dim] of +-1, the same on every rank, world size and seed; a single pattern of +1 where signs is 0."""
    if config.ngram_signs == 0:
        return torch.ones(1, config.ngram_row_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(SIGN_POOL_SEED)
    bits = torch.randint(0, 2, (config.ngram_signs, config.ngram_row_dim), generator=generator, dtype=torch.int8)
    return (2 * bits - 1).to(dtype)


def zeros_where_touched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on the CPU take memory only in the pages that are touched, so that a table may exceed the machine's."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    no_reserve = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)  # mmap names MAP_NORESERVE from Python 3.13 on
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages refuses, and needs no telling
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take 2 MiB for a row of 1.5 KiB
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def row_second_moment(grads: Tensor, second: Tensor, last: Tensor, update: int, beta2: float) -> Tensor:
    """The touched rows' new second moments: what a row owes for the updates it missed is paid, then its gradient comes in.

    grads float32 [n, dim]; second float32 [n] (one number a row, of the mean square) or [n, dim]; last int32 [n], the update
    (from 1) at which the row was last touched, 0 for never; update, this one's number.
    """
    owed = torch.pow(beta2, (update - last).double()).float()  # torch's float32 powers differ by a row's place in the tensor
    if second.dim() == 1:
        mean_square = torch.linalg.vector_norm(grads, dim=1).square() / grads.shape[1]
        return torch.addcmul(mean_square * (1 - beta2), owed, second)
    return torch.addcmul(grads.square() * (1 - beta2), owed[:, None], second)


def row_adam_update(rows: Tensor, grads: Tensor, second: Tensor, update: int, lr: float, beta2: float, wd: float) -> Tensor:
    """Adam with beta1 = 0 for the touched rows of a table (record 92's rule). Returns the rows, float32 [n, dim], in place.

    second is row_second_moment's result. Decay acts only on elements whose update and weight have the same sign. An
    untouched row does not move, so that this equals the eager rule over the whole table.
    """
    step_size = lr * math.sqrt(1 - beta2**update) / (second.sqrt() + ADAM_EPS)
    change = grads * (step_size[:, None] if second.dim() == 1 else step_size)
    if wd:
        change.addcmul_((change * rows).gt_(0), rows, value=lr * wd)
    return rows.sub_(change)


def exchange_rows(send: Tensor, send_counts: list[int], recv_counts: list[int], pieces: int, world: World,
                  group: dist.ProcessGroup | None = None) -> Tensor:
    """All-to-all of rows. send [sum(send_counts), ...] lies grouped by receiver; returns [sum(recv_counts), ...] by sender.

    `pieces`, equal on all ranks, cuts wide rows by columns so that no message exceeds what a backend can count in 32 bits.
    """
    if world.size == 1:  # nothing to send
        return send
    received = send.new_empty(sum(recv_counts), *send.shape[1:])
    if pieces == 1:
        dist.all_to_all_single(received, send, recv_counts, send_counts, group=group)
        return received
    for columns in torch.arange(send.shape[1]).tensor_split(pieces):
        cut = slice(int(columns[0]), int(columns[-1]) + 1)
        part = received.new_empty(received.shape[0], len(columns))
        dist.all_to_all_single(part, send[:, cut].contiguous(), recv_counts, send_counts, group=group)
        received[:, cut] = part
    return received


@dataclass
class Cycle:
    """What one rank must know to read the table for the U steps of an update cycle, and to serve and update its shard.

    Made ahead on the CPU from tokens alone. Row numbers within a shard are local; "served" rows lie grouped by asking rank,
    each group sorted; T is the rank's tokens a step, padding included. Where rows are slices of the memory, C is 1 and T counts slices.
    """
    slots: Tensor  # int64 [U, C, T]: index of each read among the rank's own unique rows of the cycle
    reads: Tensor  # int64 [U, C, T]: index of each read in what `fetch` returns
    signs: Tensor  # int64 [U, C, T]
    asked: Tensor  # int64 [n]: the rank's sorted unique rows of the cycle, numbered over all ranks
    ask_counts: list[int]  # [W]: unique rows this rank reads from each owner
    serve_counts: list[int]  # [W]: rows each rank reads from this one
    served: Tensor  # int64 [sum(serve_counts)]
    owned: Tensor | np.ndarray  # int64 [u]: sorted unique of `served`; an array, which no copy to a device takes along, for HostRows
    owned_slots: Tensor  # int64 [sum(serve_counts)]: index of each served row in `owned`
    pieces: int  # messages that a rank's rows are sent in


class NgramTable:
    """A rank's shard of the table with the state of its row-sparse Adam, and the exchange of rows with the other ranks."""

    def __init__(self, config: Config, world: World, classes=lambda tokens: tokens):
        self.config, self.world, self.classes = config, world, classes  # classes: what is hashed in place of the tokens
        # The CPU's kernel sums in float32.
        self.read_dtype = torch.float32 if world.device.type == "cpu" else getattr(torch, config.dtype)
        self.first_row, last_row = world.share(config.ngram_rows)
        num_rows = last_row - self.first_row
        self.owner_cuts = np.array([world.share(config.ngram_rows, rank)[1] for rank in range(world.size)])
        # Blocks keep temporaries near the CPU (8 MB; 1 MB is slower, since index_add_ runs in parallel only on long blocks);
        # a GPU wants few launches.
        self.block = max(1, (1 << 21) // config.ngram_row_dim) if world.device.type == "cpu" else 1 << 15
        self.max_message_bytes = MAX_MESSAGE_BYTES
        dtype, dim = getattr(torch, config.ngram_dtype), config.ngram_row_dim
        place = torch.device("cpu") if config.ngram_device == "cpu" else world.device
        self.rows = zeros_where_touched((num_rows, dim), dtype, place)
        second_shape = (num_rows,) if config.ngram_second_moment == "row" else (num_rows, dim)
        self.second = zeros_where_touched(second_shape, torch.float32, place)
        self.last = zeros_where_touched((num_rows,), torch.int32, place)
        self.pool = sign_pool(config, torch.int8).to(world.device)
        self.updates = 0
        self.kernel = table_kernel(config, place)
        self.host = HostRows(self) if config.ngram_device == "cpu" else None

    # -- planning: in the loader's thread, on the CPU ---------------------------------------------------------------

    def plan(self, batches: list[Batch], group: dist.ProcessGroup | None = None, more_rows: Tensor | None = None) -> Cycle:
        """Addresses, routes and counts of a cycle's batches. A collective of all ranks over `group` (gloo).

        more_rows int64 [k]: rows that the rank shall ask for besides, having a gradient for them already.
        """
        addresses = [ngram_addresses(self.classes(b.tokens.flatten()), b.starts.flatten(), self.config) for b in batches]
        rows, signs = (torch.stack(parts) for parts in zip(*addresses))
        if self.config.ngram_combine == "concat":  # slices of a position stand behind each other: positions of one channel
            rows, signs = (numbers.mT.flatten(1)[:, None] for numbers in (rows, signs))
        return self.route(rows, signs, group, more_rows)

    def route(self, rows: Tensor, signs: Tensor, group: dist.ProcessGroup | None = None, more_rows: Tensor | None = None) -> Cycle:
        """rows, signs int64 [U, C, T] -> Cycle. Sorts, and tells every owner what is asked of it."""
        flat = rows.flatten()
        asked, slots = sort_unique((flat if more_rows is None else torch.cat((flat, more_rows))).numpy())
        ends = np.searchsorted(asked, self.owner_cuts)
        ask_counts = torch.from_numpy(np.diff(ends, prepend=0))
        counts = torch.empty(self.world.size**2, dtype=torch.int64)
        dist.all_gather_single(counts, ask_counts, group=group)
        counts = counts.view(self.world.size, self.world.size)  # [asking rank, owner]
        serve_counts = counts[:, self.world.rank].tolist()
        asked = torch.from_numpy(asked)
        served = exchange_rows(asked, ask_counts.tolist(), serve_counts, 1, self.world, group) - self.first_row
        owned, owned_slots = sort_unique(served.numpy())
        heaviest = int(torch.maximum(counts.sum(0), counts.sum(1)).max()) * self.config.ngram_row_dim * 4
        slots = torch.from_numpy(slots)[:rows.numel()].view(rows.shape)
        from_shard = self.world.size == 1 and not self.host  # see fetch
        return Cycle(slots, rows if from_shard else slots, signs, asked, ask_counts.tolist(), serve_counts, served,
                     owned if self.host else torch.from_numpy(owned), torch.from_numpy(owned_slots),
                     pieces=min(self.config.ngram_row_dim, max(1, -(-heaviest // self.max_message_bytes))))

    # -- reading and updating: in the training thread -------------------------------------------------------------------

    def fetch(self, cycle: Cycle, waiting: AbstractContextManager = nullcontext()) -> Tensor:
        """The rank's unique rows of a cycle, [n, dim] in the table's type, from their owners. A collective.

        In a world of one, beside the model, the shard itself: no row of it changes before the cycle's last read. `waiting` is held
        while rows in host memory are awaited.
        """
        rows, numbers = (self.host.fetch(cycle, waiting), cycle.owned_slots) if self.host else (self.rows, cycle.served)
        if self.world.size == 1:
            return rows
        return exchange_rows(rows.index_select(0, numbers), cycle.serve_counts, cycle.ask_counts, cycle.pieces, self.world)

    def read(self, fetched: Tensor, reads: Tensor, signs: Tensor) -> Tensor:
        """reads (rows of `fetched`), signs int64 [C, T] -> e [T, dim]: at each position the sum of its signed rows."""
        out = torch.empty(reads.shape[1], fetched.shape[1], dtype=self.read_dtype, device=fetched.device)
        if self.kernel and not out.is_cuda:
            self.kernel("read", len(out), *reads.shape, out.shape[1], fetched, self.pool, reads.contiguous(), signs.contiguous(), out)
            return out
        for low in range(0, len(out), self.block):
            part = out[low:low + self.block]
            for order, (read, sign) in enumerate(zip(reads[:, low:low + self.block], signs[:, low:low + self.block])):
                signed = fetched.index_select(0, read).mul_(self.pool.index_select(0, sign))  # exact in any type: +-1
                (part.add_ if order else part.copy_)(signed)
        return out

    def add_grad(self, grads: Tensor, slots: Tensor, signs: Tensor, read_grad: Tensor, fresh: bool) -> None:
        """Add d loss / d e [T, dim] to grads float32 [n, dim] of the cycle's rows; on the CPU in a fixed order of summation.

        With `fresh` what grads held before counts as zeros.
        """
        read_grad = read_grad.float()
        if self.kernel and not grads.is_cuda:
            self.kernel("add_grad", len(grads), *slots.shape, grads.shape[1], fresh, grads, read_grad.contiguous(), self.pool,
                        slots.contiguous(), signs.contiguous())
            return
        if fresh:
            grads.zero_()
        for low in range(0, len(read_grad), self.block):
            cut = slice(low, low + self.block)
            for slot, sign in zip(slots, signs):
                grads.index_add_(0, slot[cut], read_grad[cut] * self.pool.index_select(0, sign[cut]))

    def update(self, cycle: Cycle, grads: Tensor, lr: float) -> None:
        """Send the rows' gradients to their owners, sum them rank by rank, and update the owned rows. A collective."""
        self.updates += 1
        received = exchange_rows(grads, cycle.ask_counts, cycle.serve_counts, cycle.pieces, self.world)
        summed = received  # in the order of `owned` already where it comes from one rank alone
        if sum(count > 0 for count in cycle.serve_counts) > 1:
            summed = torch.zeros(len(cycle.owned), grads.shape[1], device=grads.device).index_add_(0, cycle.owned_slots, received)
        (self.host.update if self.host else self.update_rows)(cycle.owned, summed, self.updates, lr)

    def update_rows(self, ids: Tensor, grads: Tensor, update: int, lr: float) -> None:
        """The rule, for rows `ids` int64 [n] of the shard with gradients float32 [n, dim], where the rows lie; each row by itself."""
        config, beta2 = self.config, self.config.ngram_beta2
        if self.kernel:
            step_size = lr * math.sqrt(1 - beta2**update)
            self.kernel("update", len(ids), grads.shape[1], self.second.dim() == 1, update, step_size, beta2, ADAM_EPS,
                        lr * config.ngram_wd, self.rows, ids, grads, self.second, self.last)
            return
        second = row_second_moment(grads, self.second.index_select(0, ids), self.last.index_select(0, ids), update, beta2)
        self.second.index_copy_(0, ids, second)
        self.last.index_fill_(0, ids, update)
        for low in range(0, len(ids), self.block):
            cut = slice(low, low + self.block)
            rows = row_adam_update(self.rows.index_select(0, ids[cut]).float(), grads[cut], second[cut], update, lr, beta2, config.ngram_wd)
            self.rows.index_copy_(0, ids[cut], rows.to(self.rows.dtype))

    def settle(self) -> None:
        """Wait until rows and state are those of the last update."""
        if self.host:
            self.host.thread.settle()

    def touched(self, cycle: Cycle) -> tuple:
        """A copy on the CPU of all that an update with this cycle would change, for `put_back`."""
        self.settle()
        ids = torch.as_tensor(cycle.owned)
        return ids, *(state[ids].cpu() for state in (self.rows, self.second, self.last)), self.updates

    def put_back(self, saved: tuple) -> None:
        self.settle()
        ids, *states, self.updates = saved
        for state, old in zip((self.rows, self.second, self.last), states):
            state[ids] = old.to(state.device)

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def saved_parts(self):
        """Yield all touched rows with their state as dicts of CPU tensors, in order, some at a time; "ids" count over all ranks."""
        self.settle()
        for ids in self.last.nonzero().squeeze(1).split(CHECKPOINT_PART_ROWS):
            yield {"ids": (ids + self.first_row).cpu(), "rows": self.rows[ids].cpu(), "second": self.second[ids].cpu(),
                   "last": self.last[ids].cpu()}

    def load_part(self, part: dict) -> None:
        """Take from a part, which any rank of any world may have saved, the rows that are this rank's."""
        low, high = torch.searchsorted(part["ids"], torch.tensor((self.first_row, self.first_row + len(self.rows)))).tolist()
        ids = (part["ids"][low:high] - self.first_row).to(self.rows.device)
        for name in ("rows", "second", "last"):
            getattr(self, name)[ids] = part[name][low:high].to(self.rows.device)


# =====================================================================================================================
# Layers: rotary positions, attention that stays inside its segment, squared-ReLU MLP, and the loss.
# =====================================================================================================================

SOFTCAP, SHIFT, WIDTH = 23.0, 5.0, 7.5  # logits become SOFTCAP * sigmoid((logit + SHIFT) / WIDTH), as in recent speedrun records


class RMSNorm(torch.autograd.Function):
    """x / rms(x) over the last dimension; half the passes over memory of what autograd makes of F.rms_norm on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square() / x.shape[-1]
        scale = (mean_square + 1e-6).rsqrt()
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
    """float32 [2, seq_len, head_dim / 2]: cosines and sines, as the stage's long window wants them.

    When the window grows, YaRN (arXiv:2309.00071) slows the pairs that turned less than once in the old one by the ratio of the
    windows, leaves those that turned more than 32 times, and sharpens attention by 1 + 0.1 ln(ratio), which goes into both factors
    of the product as its root.
    """
    head_dim = config.model_dim // config.heads
    frequency = config.rotary_base ** -(torch.arange(0, head_dim, 2) / head_dim)
    windows, sharper = [stage.windows[1] for stage in config.stage_list[:stage + 1]], 1.0
    for old, new in zip(windows, windows[1:]):
        turns = old * frequency / (2 * math.pi)
        keep = ((turns - 1) / 31).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) * old / new)
        sharper *= 1 + 0.1 * math.log(new / old)
    angle = torch.arange(config.seq_len)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())) * sharper**0.5


class Rotate(torch.autograd.Function):
    """x [..., L, D], rotary [2, L, D/2]: turns the pair (i, i + D/2) of each position by its angle, and gradients back."""

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = torch.empty_like(x)
        (a, b), (ya, yb) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        ya.copy_(a * cos).addcmul_(b, sin, value=-1)
        yb.copy_(b * cos).addcmul_(a, sin)
        return y

    @staticmethod
    def forward(ctx, x: Tensor, rotary: Tensor) -> Tensor:
        cos, sin = rotary[:, :x.shape[-2]].to(x.dtype)
        ctx.save_for_backward(cos, sin)
        return Rotate.turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return Rotate.turn(grad, cos, -sin), None


def attention_mask(starts: Tensor, window: int, flex: bool) -> Tensor | BlockMask:
    """starts bool [B, L] -> who sees whom: position q sees k where q - window < k <= q lies in the same segment.

    bool [B, 1, L, L] for scaled_dot_product_attention, or with `flex` what flex_attention takes.
    """
    batch, length = starts.shape
    segment, position = starts.cumsum(-1), torch.arange(length, device=starts.device)
    if flex:
        def sees(b, h, q, k):
            return (k <= q) & (q - k < window) & (segment[b, q] == segment[b, k])
        return create_block_mask(sees, batch, None, length, length, device=starts.device)
    distance = position[:, None] - position
    return ((segment[:, :, None] == segment[:, None, :]) & (distance >= 0) & (distance < window))[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Attention of [B, H, L, D]: torch's fused kernels for a dense mask; flex_attention, compiled with the model, skips blocks."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask)
    if q.dtype == torch.bfloat16 and not q.is_cuda:  # torch 2.13's fused kernel takes three times as long there, backward
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def is_long(block: int, layers: int) -> bool:
    """Whether a block attends over the stage's long window: every fourth does, and the last."""
    return block % 4 == 3 or block == layers - 1


GATE_DIM = 12  # a gate looks at this much of the stream


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, L, D], weight [H, GATE_DIM] -> [B, H, L, 1] between 0 and 2, 1 where the weight is zero."""
    return 2 * torch.sigmoid(F.linear(x[..., :GATE_DIM], weight.to(x.dtype))).transpose(1, 2)[..., None]


class Block(nn.Module):
    """Attention and MLP. Matrices are [out, in]; mlp_down is stored transposed, so that Muon stacks it with mlp_up."""

    def __init__(self, config: Config, index: int):
        super().__init__()
        dim, self.heads = config.model_dim, config.heads
        self.qkv = nn.Parameter(torch.empty(3, dim, dim))
        self.attn_out = nn.Parameter(torch.zeros(dim, dim))
        self.mlp_up = nn.Parameter(torch.empty(4 * dim, dim))
        self.mlp_down = nn.Parameter(torch.zeros(4 * dim, dim))
        if config.attn_gate:
            self.attn_gate = nn.Parameter(torch.zeros(config.heads, GATE_DIM))
        if index in config.value_embeds:
            self.value_gate = nn.Parameter(torch.zeros(config.heads, GATE_DIM))

    def forward(self, x: Tensor, mask: Tensor | BlockMask, rotary: Tensor, value_embed: Tensor | None) -> Tensor:
        x = x + self.attention(RMSNorm.apply(x), mask, rotary, value_embed)
        hidden = SquaredReLU.apply(F.linear(RMSNorm.apply(x), self.mlp_up.to(x.dtype)))
        return x + hidden @ self.mlp_down.to(x.dtype)

    def attention(self, x: Tensor, mask: Tensor | BlockMask, rotary: Tensor, value_embed: Tensor | None) -> Tensor:
        batch, length, dim = x.shape
        qkv = F.linear(x, self.qkv.flatten(0, 1).to(x.dtype))
        qkv = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [3, B, H, L, D]
        qk, v = qkv.split((2, 1))
        q, k = Rotate.apply(RMSNorm.apply(qk), rotary)
        v = v.squeeze(0)
        if value_embed is not None:
            v = v + gate(x, self.value_gate) * value_embed.view(batch, length, self.heads, -1).transpose(1, 2)
        y = attend(q, k, v, mask)
        if hasattr(self, "attn_gate"):
            y = y * gate(x, self.attn_gate)
        return F.linear(y.transpose(1, 2).reshape(batch, length, dim), self.attn_out.to(x.dtype))


def float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in float8 e4m3 and the float32 scale that gives it back: its largest magnitude becomes the type's, 448."""
    scale = x.abs().amax().float().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def squashed_logits(x: Tensor, head: Tensor, head8: tuple[Tensor, Tensor] | None) -> Tensor:
    """x [T, D], head [V, D] in one type -> float32 [T, V] between 0 and 1: logits before SOFTCAP. With head8 a product of float8."""
    if head8:
        x8, scale = float8(x)
        logits = F.scaled_mm(x8, head8[0].mT, scale / WIDTH, ScalingType.TensorWise, head8[1], ScalingType.TensorWise, output_dtype=x.dtype)
    else:
        logits = F.linear(x / WIDTH, head)
    return logits.float().add_(SHIFT / WIDTH).sigmoid_()


class SoftcappedLoss(torch.autograd.Function):
    """Head, softcap and cross-entropy in chunks of tokens, gradients made in the same pass; logits never exist whole.

    x [T, D], weight float32 [V, D], targets int64 [T] (-1: no loss) -> float32 sum of the losses in nats. With `fp8` the product that
    makes the logits is one of float8, each factor scaled by its largest entry.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, fp8: bool) -> Tensor:
        loss, head, training = torch.zeros((), device=x.device), weight.to(x.dtype), ctx.needs_input_grad[0]
        x_grad, weight_grad = (torch.empty_like(x), torch.zeros_like(weight)) if training else (None, None)
        head8 = float8(head) if fp8 else None
        for low in range(0, len(x), chunk):
            part, target = x[low:low + chunk], targets[low:low + chunk, None]
            capped = squashed_logits(part, head, head8)
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
        return x_grad * loss_grad.to(x_grad.dtype), weight_grad * loss_grad, None, None, None


# =====================================================================================================================
# Model: a pre-norm GPT whose residual stream takes the n-gram memory and the token embedding in before every block.
# =====================================================================================================================

SKIP_INIT = 0.1
EMBED_STD = 0.05  # small, so that Adam turns embeddings soon (a norm follows), and fit for a head


class GPT(nn.Module):
    """Computes in `dtype` with float32 parameters. All weights depend on `seed` alone, not on device or rank."""

    def __init__(self, config: Config, vocab_size: int):
        super().__init__()
        self.config, self.dtype = config, getattr(torch, config.dtype)
        padded_vocab = -(-vocab_size // 64) * 64  # matrix units like round sizes; no target ever names the padding
        self.embed = nn.Parameter(torch.empty(padded_vocab, config.model_dim))
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.head = nn.Parameter(torch.zeros(padded_vocab, config.model_dim))
        self.embed_scales = nn.Parameter(torch.zeros(config.layers))
        if config.smear:
            self.smear_gate = nn.Parameter(torch.zeros(1, GATE_DIM))
            self.smear_scales = nn.Parameter(torch.zeros(1))
        if config.skips:
            self.skip_scales = nn.Parameter(torch.full((config.layers // 2,), SKIP_INIT))
        if config.value_embeds:
            self.value_embeds = nn.ParameterList(torch.zeros(padded_vocab, config.model_dim) for _ in config.value_embeds)
        if config.ngram_rows:
            self.ngram_scales = nn.Parameter(torch.full((len(config.memory_layers),), 0.05))
            if config.ngram_gate == "context":
                self.ngram_keys = nn.Parameter(torch.empty(len(config.memory_layers), config.model_dim, config.ngram_dim))
                self.ngram_values = nn.Parameter(torch.empty_like(self.ngram_keys))
        if not self.embed.is_meta:
            self.init_weights(torch.Generator().manual_seed(config.seed))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        self.embed.normal_(std=EMBED_STD, generator=generator)
        bound = (3 / self.config.model_dim) ** 0.5  # uniform of standard deviation 1 / sqrt(model_dim)
        for block in self.blocks:
            block.qkv.uniform_(-bound, bound, generator=generator)
            block.mlp_up.uniform_(-bound, bound, generator=generator)
        if self.config.ngram_rows and self.config.ngram_gate == "context":
            bound = (3 / self.config.ngram_dim) ** 0.5
            self.ngram_keys.uniform_(-bound, bound, generator=generator)
            self.ngram_values.uniform_(-bound, bound, generator=generator)

    def take_in(self, x: Tensor, memory: Tensor, k: int) -> Tensor:
        """Add the memory to the stream, as the k-th of the blocks that do.

        scale: a trained number times it. context (Engram, arXiv:2601.07372): the number times
        sigmoid(RMSNorm(x) . RMSNorm(W_K e) / sqrt(d)) W_V e, so that a row which does not fit where it is read stays out.
        """
        scale = self.ngram_scales[k].to(x.dtype)
        if self.config.ngram_gate == "scale":
            return torch.addcmul(x, memory, scale)
        key, value = (F.linear(memory, weight[k].to(x.dtype)) for weight in (self.ngram_keys, self.ngram_values))
        fit = (RMSNorm.apply(x) * RMSNorm.apply(key)).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
        return x + scale * torch.sigmoid(fit) * value

    def hidden(self, tokens: Tensor, starts: Tensor, memory: Tensor | None, masks: tuple, rotary: Tensor) -> Tensor:
        """tokens int64 [B, L], starts bool [B, L], masks (short, long), memory [B, L, ngram_dim] -> [B, L, model_dim]."""
        x = first = RMSNorm.apply(F.embedding(tokens, self.embed).to(self.dtype))
        if memory is not None:
            wider = x.shape[-1] - memory.shape[-1] if self.config.ngram_gate == "scale" else 0
            memory = F.pad(memory.to(x.dtype), (0, wider))
        if self.config.smear:
            previous = F.pad(x[:, :-1], (0, 0, 1, 0)).masked_fill(starts[..., None], 0)
            x = first = x + self.smear_scales.to(x.dtype) * gate(x, self.smear_gate).squeeze(1) * previous
        early = []
        for i, block in enumerate(self.blocks):
            mirror = self.config.layers - 1 - i
            if self.config.skips and mirror > i:
                early.append(x)
            elif self.config.skips and mirror < i:
                x = torch.addcmul(x, early[mirror], self.skip_scales[mirror].to(x.dtype))
            value_embed = None
            if i in self.config.value_embeds:
                value_embed = F.embedding(tokens, self.value_embeds[self.config.value_embeds.index(i)]).to(x.dtype)
            x = torch.addcmul(x, first, self.embed_scales[i].to(x.dtype))
            if memory is not None and i in self.config.memory_layers:
                x = self.take_in(x, memory, self.config.memory_layers.index(i))
            x = block(x, masks[is_long(i, self.config.layers)], rotary, value_embed)
        return RMSNorm.apply(x)

    def forward(self, tokens: Tensor, starts: Tensor, memory: Tensor | None, targets: Tensor, masks: tuple, rotary: Tensor,
                tied: bool) -> Tensor:
        """Float32 sum of the losses, in nats, over the positions whose target int64 [B, L] is not -1."""
        x = self.hidden(tokens, starts, memory, masks, rotary)
        head = self.embed if tied else self.head
        return SoftcappedLoss.apply(x.flatten(0, 1), head, targets.flatten(), self.config.head_chunk_tokens, self.config.fp8_head)

    def scores(self, tokens: Tensor, starts: Tensor, memory: Tensor | None, targets: Tensor, masks: tuple, rotary: Tensor, tied: bool) -> Tensor:
        """float32 [2, B * L]: each position's loss in nats, and 1 where the likeliest token is the target."""
        x, head = self.hidden(tokens, starts, memory, masks, rotary).flatten(0, 1), (self.embed if tied else self.head).to(self.dtype)
        parts, chunk, head8 = [], self.config.head_chunk_tokens, float8(head) if self.config.fp8_head else None
        for part, target in zip(x.split(chunk), targets.flatten().split(chunk)):
            logits = SOFTCAP * squashed_logits(part, head, head8)
            parts.append(torch.stack((F.cross_entropy(logits, target, reduction="none", ignore_index=-1), logits.argmax(-1) == target)))
        return torch.cat(parts, dim=1)


# =====================================================================================================================
# Update rules: pure functions of tensors. (The table's own rule, row_adam_update, stands with the table.)
# =====================================================================================================================

# Polar Express, arXiv:2505.16932: the best odd polynomials a x + b x^3 + c x^5, one a step, for singular values in [1e-3, 1].
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, a, b] -> the nearest (semi-)orthogonal matrices, singular values near 1, by five Polar Express steps in `dtype`."""
    x = matrices.to(dtype)
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrices.shape[-2] <= matrices.shape[-1] else x.mT


def muon_update(weights: Tensor, grads: Tensor, momentum: Tensor, row_moment: Tensor, lr: float, beta: float, beta2: float,
                wd: float, dtype: torch.dtype = torch.float32) -> None:
    """Muon with Nesterov momentum on a stack [N, a, b], in place; lr is scaled by sqrt(a / b) for tall matrices.

    With beta2, NorMuon (arXiv:2510.05491): rows are divided by the root of their running mean square, row_moment [N, a, 1], the
    norm of the whole kept. Decay acts only where update and weight have the same sign.
    """
    momentum.lerp_(grads, 1 - beta)
    change = orthogonalize(grads.lerp(momentum, beta), dtype).float()
    if beta2:
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
    updates_before = torch.full((), update - 1.0, device=weights.device)
    adamw([weights], [grads], [first], [second], [], [updates_before], fused=True, amsgrad=False, maximize=False, lr=lr,
          beta1=beta1, beta2=beta2, weight_decay=wd, eps=ADAM_EPS)


# =====================================================================================================================
# Optimizer and its communication: parameters live in flat buffers; each rank updates its share of each buffer.
# =====================================================================================================================

@dataclass(frozen=True)
class Rule:
    kind: str  # "muon" or "adam"
    wd: float = 1.0  # multiplies weight_decay


RULES = {  # parameter name pattern -> rule; exactly one must match each parameter
    "blocks.*.qkv": Rule("muon"),
    "blocks.*.attn_out": Rule("muon"),
    "blocks.*.mlp_*": Rule("muon"),
    "embed": Rule("adam"),
    "head": Rule("adam"),
    "value_embeds.*": Rule("adam"),
    "ngram_keys": Rule("muon"),
    "ngram_values": Rule("muon"),
    "*_gate": Rule("adam", wd=0.0),
    "*_scales": Rule("adam", wd=0.0),
}


MOMENTS = {"muon": ("momentum", "row_moment"), "adam": ("first_moment", "second_moment")}  # what each kind of rule keeps of a parameter


def rule_of(name: str) -> tuple[str, Rule]:
    matching = [(pattern, rule) for pattern, rule in RULES.items() if fnmatch.fnmatchcase(name, pattern)]
    assert len(matching) == 1, f"parameter {name}: expected exactly one rule, found {[pattern for pattern, _ in matching]}"
    return matching[0]


class Bucket:
    """Parameters that one rule updates together, as views into one flat buffer cut into equal shares of the ranks.

    Muon's buckets hold matrices of one shape; a share is then a whole number of matrices, the last ones padding.
    """

    def __init__(self, rule: Rule, params: dict[str, nn.Parameter], world: World):
        self.rule, self.world = rule, world
        self.shapes = {name: p.shape for name, p in params.items()}
        unit = next(iter(self.shapes.values()))[-2:] if rule.kind == "muon" else ()
        size = sum(p.numel() for p in params.values()) // math.prod(unit)
        self.share_shape = (-(-size // world.size), *unit)
        self.share_size = math.prod(self.share_shape)
        self.weights = torch.zeros(world.size * self.share_size, device=world.device)
        self.grads = torch.zeros_like(self.weights)
        for attribute, flat in (("data", self.weights), ("grad", self.grads)):
            for name, view in self.by_name(flat).items():
                if attribute == "data":
                    view.copy_(params[name].data)
                setattr(params[name], attribute, view)
        by_row = (*self.share_shape[:-1], 1)
        self.moments = {kind: self.weights.new_zeros(by_row if kind == "row_moment" else self.share_shape) for kind in MOMENTS[rule.kind]}

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' parts of a flat buffer, as views of their shapes, or with one number a row."""
        by_row = len(flat) < len(self.weights)
        shapes = {name: (*shape[:-1], 1) if by_row else shape for name, shape in self.shapes.items()}
        sizes = [math.prod(shape) for shape in shapes.values()]
        parts = flat[:sum(sizes)].split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}

    def share(self, flat: Tensor) -> Tensor:
        return flat[self.world.rank * self.share_size:][:self.share_size].view(self.share_shape)

    def start_reduce(self) -> dist.Work | None:
        """Begin to sum the gradients over ranks; each rank receives its share, in `summed`. One rank has nothing to send."""
        if self.world.size == 1:
            self.summed = self.share(self.grads)
            return None
        self.summed = self.weights.new_empty(self.share_shape)
        return dist.reduce_scatter_single(self.summed.view(-1), self.grads, async_op=True)

    def start_gather(self) -> dist.Work | None:
        """Begin to give every rank the updated shares of all."""
        return None if self.world.size == 1 else dist.all_gather_single(self.weights, self.share(self.weights).flatten().clone(), async_op=True)


class Optimizer:
    """Muon for matrices and Adam for the rest, on buckets; the same class for one rank and for many."""

    def __init__(self, model: nn.Module, config: Config, world: World):
        self.config = config
        groups = {}
        for name, p in model.named_parameters():
            pattern, rule = rule_of(name)
            key = (p.shape[-2:] if rule.kind == "muon" else pattern)
            groups.setdefault((rule, key), {})[name] = p
        self.buckets = [Bucket(rule, params, world) for (rule, _), params in groups.items()]
        self.updates = 0

    @torch.no_grad()
    def step(self, scale: float, momentum: float, batch_tokens: int, tied: bool) -> None:
        """Average the gradients (of loss sums) over the step's tokens, update, and leave gradients at zero. A tied head has none."""
        config, self.updates = self.config, self.updates + 1
        buckets = [bucket for bucket in self.buckets if not (tied and "head" in bucket.shapes)]
        reductions = [bucket.start_reduce() for bucket in buckets]
        gathers = []
        for bucket, reduction in zip(buckets, reductions):
            if reduction:
                reduction.wait()
            weights, grads = bucket.share(bucket.weights), bucket.summed.div_(batch_tokens)
            wd = config.weight_decay * bucket.rule.wd
            if bucket.rule.kind == "muon":
                muon_update(weights, grads, *bucket.moments.values(), config.muon_lr * scale, momentum,
                            config.muon_beta2, wd, getattr(torch, config.dtype))
            else:
                adam_update(weights, grads, *bucket.moments.values(), self.updates, config.adam_lr * scale,
                            config.adam_beta1, config.adam_beta2, wd)
            gathers.append(bucket.start_gather())
            bucket.grads.zero_()
        for gather in filter(None, gathers):
            gather.wait()

    @torch.no_grad()
    def untie(self, model: GPT) -> None:
        """Give the head a copy of the embedding, which it was so far, and of its moments; the two buckets are cut alike."""
        model.head.copy_(model.embed)
        embed, head = (next(b for b in self.buckets if name in b.shapes) for name in ("embed", "head"))
        for kind in embed.moments:
            head.moments[kind].copy_(embed.moments[kind])

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes but the count of updates."""
        return [t for bucket in self.buckets for t in (bucket.weights, *bucket.moments.values())]

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """"weights" and each kind of moment -> parameter name -> whole tensor on the CPU, on the main rank. A collective."""
        saved = {}
        for bucket in self.buckets:
            for kind, share in {"weights": None, **bucket.moments}.items():
                whole = bucket.weights if share is None else share.new_empty(bucket.world.size * share.numel())
                if share is not None:
                    dist.all_gather_single(whole, share.flatten())
                if bucket.world.main:
                    saved.setdefault(kind, {}).update({name: part.to("cpu", copy=True) for name, part in bucket.by_name(whole).items()})
        return saved

    def load(self, saved: dict[str, dict[str, Tensor]], updates: int) -> None:
        """Take what `saved` made, in a world of any size."""
        self.updates = updates
        for bucket in self.buckets:
            for kind, share in {"weights": None, **bucket.moments}.items():
                whole = bucket.weights if share is None else share.new_zeros(bucket.world.size * share.numel())
                for name, part in bucket.by_name(whole).items():
                    part.copy_(saved[kind][name])
                if share is not None:
                    share.copy_(whole.view(bucket.world.size, *share.shape)[bucket.world.rank])


# =====================================================================================================================
# Schedules: pure functions of the step.
# =====================================================================================================================

def lr_scale(step: int, config: Config) -> float:
    """The stage's factor, times 1, then a straight line down to final_lr over the last `cooldown` of the steps."""
    left = min(1.0, (1 - step / config.steps) / config.cooldown) if config.cooldown else 1.0
    return config.stage(step).lr * (left + (1 - left) * config.final_lr)


def muon_momentum(step: int, config: Config) -> float:
    rise = step / max(1, config.muon_momentum_steps)
    fall = (config.steps - step) / config.muon_momentum_cooldown if config.muon_momentum_cooldown else 1.0
    return 0.85 + (config.muon_momentum - 0.85) * min(1.0, rise, fall)


def cycle_steps(cycle: int, config: Config) -> range:
    first = cycle * config.ngram_update_every
    return range(first, min(first + config.ngram_update_every, config.steps))


# =====================================================================================================================
# The plan of a run: what it will need, from the config alone (harness.py prints it and holds it against the machine).
# =====================================================================================================================

def flops_per_token(config: Config, vocab: int, windows: tuple[int, int]) -> int:
    """Multiplications and additions of one token's forward and backward pass: three times two for each weight of a product, and
    for each position that attention sees (on average over a row without document borders)."""
    products = 12 * config.layers * config.model_dim**2 + vocab * config.model_dim
    if config.ngram_rows and config.ngram_gate == "context":
        products += 2 * len(config.memory_layers) * config.model_dim * config.ngram_dim
    seen = 0.0
    for i in range(config.layers):
        window = min(windows[is_long(i, config.layers)], config.seq_len)
        seen += window - window * (window - 1) / 2 / config.seq_len
    return int(6 * (products + 2 * config.model_dim * seen))


def make_plan(config: Config, world: World, vocab_size: int, tokens_on_disk: int) -> dict:
    """The plan of a run as a flat dict (harness.plan_bytes), from the config and the numbers of the model's parameters."""
    with torch.device("meta"):
        model = GPT(config, vocab_size)
    moments = sum(p.numel() * (1 if rule_of(name)[1].kind == "muon" else 2) for name, p in model.named_parameters())
    vocab = model.head.shape[0]
    return plan_bytes(config, world, sum(p.numel() for p in model.parameters()), moments, vocab,
                      flops_per_token(config, vocab, config.stage_list[-1].windows), tokens_on_disk)


def plan_for(config: Config) -> list[str]:
    """The plan for --ranks, none of which need be here, nor the tokens: they are GPT-2's then."""
    world, vocab_size, tokens = World(0, config.ranks, config.ranks, torch.device(config.device), None, None), GPT2_VOCAB_SIZE, 0
    with suppress(UserError):
        dataset = open_dataset(config)
        vocab_size, tokens = dataset.vocab_size, dataset.train.num_tokens
    return plan_lines(make_plan(config, world, vocab_size, tokens), world)


# =====================================================================================================================
# Training, evaluation and sampling.
# =====================================================================================================================

class Trainer:
    """The parts of a run, and the step, evaluation and sample that they make together. Its methods are collectives."""

    def __init__(self, config: Config, world: World, dataset: Dataset):
        self.config, self.world, self.dataset = config, world, dataset
        self.model = GPT(config, dataset.vocab_size).to(world.device)
        self.table = NgramTable(config, world, dataset.classes) if config.ngram_rows else None
        self.optimizer = Optimizer(self.model, config, world)
        # A graph for each stage, tied or not, trained or evaluated: more than the 8 that are allowed by default.
        compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True, recompile_limit=64, isolate_recompiles=True)
        self.forward = compiled(self.model) if config.compile else self.model
        self.rotary = [rotary_table(config, i).to(world.device) for i in range(len(config.stage_list))]
        self.flex = config.compile and world.device.type == "cuda"
        self.mask = compiled(attention_mask) if self.flex else attention_mask
        self.val = self.plan_evaluation()
        self.fetched = self.table_grads = self.asked = None  # of the update cycle under way
        self.table_time, self.host_time = TimeShare(world), TimeShare(world)
        self.carried = None  # (cycle, row numbers, gradients) that a checkpoint in the middle of a cycle holds

    # -- ahead of time, on the CPU -----------------------------------------------------------------------------------------

    def prepare(self, cycle: int) -> tuple[list[Batch], Cycle | None]:
        """The batches of an update cycle and the table's plan for them: of its number, and of the rows that a resumed cycle carries."""
        config, world = self.config, self.world
        stage = config.stage(cycle * config.ngram_update_every)
        rows, micro_rows = stage.batch_tokens // config.seq_len, config.micro_rows(world.size, stage.batch_tokens)
        batches = [rank_batch(self.dataset.train, config.tokens_before(step) // config.seq_len, rows, micro_rows,
                              self.dataset.doc_start, world, stage.length) for step in cycle_steps(cycle, config)]
        carried = self.carried  # which the training thread empties
        carried_rows = carried[1] if carried and carried[0] == cycle else None
        plan = self.table and self.table.plan(batches, world.loader_group, carried_rows)
        if world.device.type == "cuda":  # page-locked, so that the copies to the device run beside its work
            batches = [with_tensors(batch, Tensor.pin_memory) for batch in batches]
            plan = plan and with_tensors(plan, Tensor.pin_memory)
        return batches, plan

    def plan_evaluation(self) -> list[tuple[Batch, Cycle | None]]:
        """This rank's validation micro-batches, each with its table plan; made once, since the tokens are always the same."""
        config, world = self.config, self.world
        whole = rank_batch(self.dataset.val, 0, config.val_tokens // config.seq_len, config.most_micro_rows(world.size),
                           self.dataset.doc_start, world)
        parts = [Batch(*(t[None] for t in part)) for part in zip(whole.tokens, whole.targets, whole.starts)]
        return [(part, self.table and self.table.plan([part])) for part in parts]

    # -- on the device -------------------------------------------------------------------------------------------------------

    def begin_cycle(self, plan: Cycle, upcoming: Cycle | None) -> None:
        """Fetch the cycle's rows, and make room for their gradients, which begin with those of a resumed cycle."""
        self.asked, self.fetched = plan.asked, self.table.fetch(plan, self.host_time)
        if self.table.host and upcoming:
            self.table.host.look_ahead(plan, upcoming)
        self.table_grads = torch.empty(len(plan.asked), self.config.ngram_row_dim, device=self.world.device)  # its first add_grad clears it
        if self.carried:
            ids, grads = (tensor.to(self.world.device) for tensor in self.carried[1:])
            self.table_grads.zero_().index_add_(0, torch.searchsorted(self.asked, ids), grads)
            self.carried = None

    def settle(self) -> None:
        """Wait until the table is as the last step leaves it, on all ranks: what its host still does belongs to the step."""
        if self.table and self.table.host:
            self.table.settle()
            dist.barrier()

    def cycle_under_way(self, step: int) -> dict:
        """The rank's gradients of an update cycle that `step` falls into the middle of; the rows themselves are the table's."""
        if self.table is None or step % self.config.ngram_update_every == 0 or step == self.config.steps:
            return {}
        return {"ids": self.asked.cpu(), "grads": self.table_grads.cpu()}

    def carry_on(self, step: int, parts: list[dict]) -> None:
        """Take such gradients, of the ranks that this one stands for, to go on with the cycle."""
        if step % self.config.ngram_update_every and step < self.config.steps:
            none = {"ids": torch.empty(0, dtype=torch.int64), "grads": torch.empty(0, self.config.ngram_row_dim)}
            self.carried = (step // self.config.ngram_update_every, *(torch.cat([part[key] for part in (none, *parts)])
                                                                       for key in ("ids", "grads")))

    def train_step(self, step: int, batch: Batch, plan: Cycle | None, stop: bool = False, upcoming: Cycle | None = None) -> Tensor:
        """One step; `plan` is that of the whole update cycle, `upcoming` of the one that follows, where that is known.

        Returns float32 [2] on the device: the mean loss of all ranks, and how many of them want to `stop`.
        """
        config, table, sums = self.config, self.table, torch.zeros(2, device=self.world.device)
        index, batch_tokens = step % config.ngram_update_every, config.stage(step).batch_tokens
        if table and (index == 0 or self.fetched is None):
            with self.table_time:
                self.begin_cycle(plan, upcoming)
        for m, (tokens, targets, starts) in enumerate(zip(batch.tokens, batch.targets, batch.starts)):
            memory = None
            if table:
                reads_a_part = plan.reads.shape[-1] // len(batch.tokens)
                cut = slice(m * reads_a_part, (m + 1) * reads_a_part)
                slots, reads, signs = (numbers[index][:, cut] for numbers in (plan.slots, plan.reads, plan.signs))
                with self.table_time:
                    memory = table.read(self.fetched, reads, signs).view(*tokens.shape, -1).requires_grad_()
            loss = self.forward(tokens, starts, memory, targets, **self.stage_inputs(step, starts))
            loss.backward()
            if table:
                with self.table_time:
                    table.add_grad(self.table_grads, slots, signs, memory.grad.view(-1, config.ngram_row_dim), fresh=(index == 0 and m == 0))
            sums[0] += loss.detach() / batch_tokens
        scale = lr_scale(step, config)
        if table and (index + 1 == config.ngram_update_every or step + 1 == config.steps):
            with self.table_time:
                table.update(plan, self.table_grads, config.ngram_lr * scale)
            self.fetched = self.table_grads = self.asked = None
        self.optimizer.step(scale, muon_momentum(step, config), batch_tokens, tied=step < config.untie_step)
        if step + 1 == config.untie_step:
            self.optimizer.untie(self.model)
        if stop:
            sums[1] += 1
        dist.all_reduce(sums)
        return sums

    def stage_inputs(self, step: int, starts: Tensor, flex: bool | None = None) -> dict:
        """What the model is given besides tokens at this step of the schedules, or, in an evaluation, before it."""
        config, flex = self.config, self.flex if flex is None else flex
        short, long = config.stage(step).windows
        make = self.mask if flex else attention_mask
        mask = make(starts, long, flex)
        masks = (mask if short == long else make(starts, short, flex), mask)
        return dict(masks=masks, rotary=self.rotary[config.stage_index(step)], tied=step < config.untie_step)

    def read_memory(self, batch: Batch, plan: Cycle | None) -> Tensor | None:
        """[B, L, ngram_dim] for a batch of one micro-batch, from the rows as they are now."""
        if self.table is None:
            return None
        plan = to_device(plan, self.world.device)
        return self.table.read(self.table.fetch(plan), plan.reads[0], plan.signs[0]).view(*batch.tokens.shape[1:], -1)

    def val_parts(self, parts: int | None = None):
        """Yield tokens, starts, memory and targets of this rank's (first) validation micro-batches, as the model takes them."""
        for batch, plan in self.val[:parts]:
            memory, batch = self.read_memory(batch, plan), to_device(batch, self.world.device)
            yield batch.tokens[0], batch.starts[0], memory, batch.targets[0]

    @torch.no_grad()
    def evaluate(self, step: int, parts: int | None = None) -> float:
        """Mean loss in nats a token over the validation tokens of all ranks, or over each rank's first micro-batches."""
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for tokens, starts, memory, targets in self.val_parts(parts):
            total[0] += self.forward(tokens, starts, memory, targets, **self.stage_inputs(step, starts))
            total[1] += (targets >= 0).sum()
        dist.all_reduce(total)
        return float(total[0] / total[1])

    @torch.no_grad()
    def held_out(self, step: int) -> list[str]:
        """What the table does on validation tokens: loss and accuracy with it, and off (zeros in place of what it says), in all and by how
        often training met the n-gram.
        """
        score = torch.compile(self.model.scores, dynamic=False) if self.flex else self.model.scores
        scores = []  # of each micro-batch: loss and whether right, with the table and off, and 1; float64 [5, B * L]
        for tokens, starts, memory, targets in self.val_parts():
            both = [score(tokens, starts, said, targets, **self.stage_inputs(step, starts))
                    for said in ((None,) if memory is None else (memory, torch.zeros_like(memory)))]
            scores.append(torch.cat((both[0], both[-1], torch.ones_like(both[0][:1]))).double().mul_(targets.flatten() >= 0).cpu())
        scores = torch.cat(scores, dim=1)

        def told(which: Tensor) -> tuple[int, str]:
            """How many of some positions there are on all ranks, and loss and accuracy over them."""
            sums = scores[:, which].sum(1)
            dist.all_reduce(sums)
            loss, right, loss_off, right_off = (sums[:4] / sums[4].clamp(min=1)).tolist()
            off = ("", "") if self.table is None else (f" (off {loss_off:.5f})", f" (off {right_off:.4f})")
            return int(sums[4]), f"{int(sums[4]):,} tokens, loss {loss:.5f}{off[0]}, right {right:.4f}{off[1]}"

        lines = [f"held out: {told(torch.ones_like(scores[0], dtype=torch.bool))[1]}; where the n-gram was"]
        for order, times in times_trained(self.config, self.dataset, step, [batch for batch, _ in self.val]).items():
            parts = {name: told(torch.from_numpy((times >= low) & (times < high))) for name, (low, high) in TIMES_TRAINED.items()}
            lines += [f"  order {order}, {name}: {text}" for name, (count, text) in parts.items() if count]
        return lines

    @torch.no_grad()
    def sample(self, step: int, prompt: list[int]) -> list[int]:
        """The prompt's ids and sample_tokens more, drawn at temperature 0.8; all ranks draw the same."""
        generator = torch.Generator().manual_seed(self.config.seed)
        ids = [self.dataset.doc_start, *prompt]
        for _ in range(self.config.sample_tokens):
            window = torch.tensor(ids[-self.config.seq_len:] + [-1])[None]
            batch = make_batch(window, 1, 1, self.dataset.doc_start)
            memory = self.read_memory(batch, self.table and self.table.plan([batch]))
            batch = to_device(batch, self.world.device)
            tokens, starts = batch.tokens[0], batch.starts[0]
            inputs = self.stage_inputs(step, starts, flex=False)  # a new length every time
            head = self.model.embed if inputs.pop("tied") else self.model.head
            x = self.model.hidden(tokens, starts, memory, **inputs)[0, -1:]
            logits = SOFTCAP * squashed_logits(x, head.to(x.dtype), None)[0, :self.dataset.vocab_size].cpu()
            ids.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
        return ids[1:]

    def warm_up(self) -> None:
        """Run a cycle and an evaluation of each stage, then put back all that changed, so that the clock meets everything warm."""
        config = self.config
        if config.warmup_steps == 0:
            return
        saved, updates = [t.to("cpu", copy=True) for t in self.optimizer.tensors()], self.optimizer.updates
        beginnings = {stage.first for stage in config.stage_list} | {config.untie_step}
        for first in sorted(step for step in beginnings if step < config.steps):
            cycle = first // config.ngram_update_every
            batches, plan = to_device_all(self.prepare(cycle), self.world.device)
            table_saved = self.table and self.table.touched(plan)
            for _ in range(config.warmup_steps):
                for step, batch in zip(cycle_steps(cycle, config), batches):
                    self.train_step(step, batch, plan)
            self.evaluate(first, parts=1)
            if self.table:
                self.table.put_back(table_saved)
        for tensor, old in zip(self.optimizer.tensors(), saved):
            tensor.copy_(old)
        self.optimizer.updates = updates
        if self.table and self.table.host:
            self.table.host.thread.worked_s = 0.0
        self.table_time, self.host_time = TimeShare(self.world), TimeShare(self.world)


def to_device_all(prepared: tuple[list[Batch], Cycle | None], device: torch.device) -> tuple[list[Batch], Cycle | None]:
    batches, plan = prepared
    return [to_device(batch, device) for batch in batches], plan and to_device(plan, device)


def train(trainer: Trainer, log: RunLog, tokenizer, progress: Progress, checkpoints: Checkpoints, stop: StopSignal) -> float:
    """The training loop, from where `progress` stands. Returns the final validation loss."""
    config, world, first = trainer.config, trainer.world, progress.step
    clock, watch, waited_s, upcoming = Clock(world, progress.train_time_s), LossWatch(world), 0.0, None
    every, started, graphs = config.ngram_update_every, progress.train_time_s, compiled_graphs()
    cycles = load_ahead(trainer.prepare, range(first // every, -(-config.steps // every)))
    for step in range(first, config.steps + 1):
        if step == config.steps or (config.val_every and step % config.val_every == 0):
            watch.settle()
            trainer.settle()
            clock.stop()
            val_loss = validate(trainer, log, progress, clock)
        if step == config.steps:
            break
        if clock.began is None:
            clock.start()
        if step % every == 0 or step == first:
            began = time.perf_counter()
            prepared = upcoming or next(cycles)
            upcoming = next(cycles, None) if trainer.table and trainer.table.host else None
            waited_s += time.perf_counter() - began
            batches, plan = to_device_all(prepared, world.device)
        watch.push(step, trainer.train_step(step, batches[step % every], plan, stop.signum > 0, upcoming and upcoming[1]))
        done = progress.step = step + 1
        seconds = progress.train_time_s = clock.seconds()
        rate = config.tokens_before(done) / seconds
        log.progress(done, watch.latest, rate, (config.steps - done) * seconds / done)
        if done % config.log_every == 0:
            watch.settle()
            log.step(done, seconds, "train_loss", watch.latest, tokens_per_s=round(rate))
        save = config.checkpoint_every and done % config.checkpoint_every == 0 and done < config.steps
        if watch.stop or save:
            watch.settle()
            trainer.settle()
            progress.train_time_s = clock.seconds()
        if watch.stop:
            checkpoints.stop(trainer, progress, log, stop)
        if save:
            checkpoints.save_or_warn(trainer, progress, log)
    vocab = trainer.model.head.shape[0]
    flops = sum(max(0, stage.end - max(first, stage.first)) * stage.batch_tokens * flops_per_token(config, vocab, stage.windows)
                for stage in config.stage_list)
    log.shares(world, clock.seconds() - started, waited_s, trainer, flops, peak_tflops(config, world), compiled_graphs() - graphs)
    progress.train_time_s = clock.seconds()
    conclude(trainer, log, tokenizer, progress, checkpoints if first < config.steps else None, val_loss)
    return val_loss


def conclude(trainer: Trainer, log: RunLog, tokenizer, progress: Progress, checkpoints: Checkpoints | None, val_loss: float) -> None:
    """The last checkpoint, a sample, the table's use, and the result as the last two lines, which a failed checkpoint must not lose."""
    config, failed = trainer.config, None
    if checkpoints and (config.checkpoint or config.checkpoint_every):
        try:
            log.line(f"checkpoint {checkpoints.save(trainer, progress)}")
        except SharedError as error:
            failed = error
    log.sample(trainer, tokenizer, config.steps)
    if trainer.table and log.main:
        for line in table_report(config, trainer.dataset, trainer.world.size, ngram_addresses, channels(config)):
            log.line(line)
    log.line(f"final step:{config.steps}/{config.steps} val_loss:{val_loss:.5f} train_time:{1e3 * progress.train_time_s:.0f}ms")
    outcome = f"met at step:{progress.met[0]} train_time:{1e3 * progress.met[1]:.0f}ms" if progress.met else "not met"
    log.line(f"target val_loss:{config.target_loss} {outcome}")
    if failed:
        raise failed


def validate(trainer: Trainer, log: RunLog, progress: Progress, clock: Clock) -> float:
    val_loss = trainer.evaluate(progress.step)
    log.step(progress.step, clock.seconds(), "val_loss", val_loss)
    if not math.isfinite(val_loss):
        raise SharedError(f"validation loss: found {val_loss} at step {progress.step}, expected a finite number")
    if progress.met is None and val_loss <= trainer.config.target_loss:
        progress.met = (progress.step, clock.seconds())
    return val_loss


# =====================================================================================================================
# Main.
# =====================================================================================================================

def main(argv: list[str] | None = None, stop: StopSignal | None = None) -> float:
    """Run what the command line asks for. Returns the last validation loss, or nan where there was none."""
    config, stop = parse_args(sys.argv[1:] if argv is None else argv), stop or StopSignal()
    if config.ranks:
        print("\n".join(plan_for(config)))
        return math.nan
    if config.device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the rows touched, and so the sizes, are new every cycle
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with join_world(config) as world:
        dataset = together(world, lambda: open_dataset(config))
        plan = make_plan(config, world, dataset.vocab_size, dataset.train.num_tokens)
        if world.main:
            print("\n".join(plan_lines(plan, world) + hash_lines(config)), flush=True)
        if config.table_report and world.main:
            print("\n".join(table_report(config, dataset, world.size, ngram_addresses, channels(config))))
        if config.dry_run or config.table_report:
            return math.nan
        if world.device.type == "cpu":
            keep_freed_memory()
        elif config.ngram_device == "cpu" and os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's, for work that the GPU does
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
        together(world, lambda: check_fits(plan, world))
        together(world, lambda: check_tokens(config, dataset, world))
        data = together(world, lambda: fingerprints(config, dataset))
        resumed = together(world, lambda: open_checkpoint(config, data, world)) if config.resume else None
        tokenizer = together(world, lambda: tokenizer_for_samples(config, dataset.vocab_size))
        log = together(world, lambda: RunLog(config, world, data, plan, resumed))
        ear = replace(world, store=world.store.clone())  # a connection of its own, for the thread that hears signals
        stop.log, stop.failure = functools.partial(log.line, screen=False), functools.partial(ear.first_error, "")
        try:
            return run(config, world, dataset, data, tokenizer, log, resumed, stop)
        except Stopped:
            raise
        except BaseException as error:
            stop.tell(f"error: {world.first_error(error_text(error))}")
            raise


def run(config: Config, world: World, dataset: Dataset, data: dict, tokenizer, log: RunLog, resumed: dict | None,
        stop: StopSignal) -> float:
    """Everything that a run does once it may start. Returns the last validation loss."""
    trainer, progress, run_ids = Trainer(config, world, dataset), Progress(), [log.run_id]
    dist.broadcast_object_list(run_ids)
    if trainer.table and trainer.table.kernel is None and config.ngram_kernel and trainer.table.rows.device.type == "cpu":
        log.line("the table's kernel did not compile (is there a C++ compiler, `c++`?); tensor operations do its work, slower")
    if dataset.canonical is not None:
        log.line(f"canonical ids: {len(dataset.canonical.unique()):,} classes of {dataset.vocab_size:,} tokens")
    if not config.eval_only:
        trainer.warm_up()
    if resumed:
        progress, run_ids = load_checkpoint(Path(config.resume), resumed, trainer, data), resumed["run_ids"] + run_ids
        log.line(f"resumed {config.resume} at step {progress.step}")
    if config.eval_only:
        val_loss = validate(trainer, log, progress, Clock(world, progress.train_time_s))
        for line in trainer.held_out(progress.step):
            log.line(line)
        log.sample(trainer, tokenizer, progress.step)
        return val_loss
    checkpoints = Checkpoints(config, world, data, run_ids)
    if config.checkpoint or config.checkpoint_every:
        together(world, lambda: world.main and checkpoints.check_folder())
    stop.training = True
    val_loss = train(trainer, log, tokenizer, progress, checkpoints, stop)
    stop.answered.set()
    if stop.signum:
        raise Stopped(stop.signum)  # too late to stop anything, but whoever sent it wants to know
    return val_loss


if __name__ == "__main__":
    status = exit_status(main)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)  # at once: a failed rank must not wait for its loader's thread, which may wait for a rank that is gone

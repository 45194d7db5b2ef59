"""What train_gpt.py needs around it, and what decides no number of a run: errors and ranks, signals, flags, the plan,
the log, checkpoints, clocks. `config` and `trainer` are train_gpt.py's Config and Trainer, handed in.
"""
from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import math
import mmap
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler


# =====================================================================================================================
# Errors: what a user can mend, and who tells it.
# =====================================================================================================================

class UserError(Exception):
    """A fault that the user can mend. The message names the thing, what was found, what was expected, and the remedy."""


class SharedError(UserError):
    """A UserError that all ranks raise alike, so that one of them tells it."""


class FollowingError(Exception):
    """This rank failed because another had failed first, which that rank tells."""


class LostRankError(UserError):
    """Another rank has died without a word. torchrun knows how."""


class Stopped(Exception):
    """A signal asked the run to end, and all ranks have ended after the same step."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


MEMORY_REMEDY = "lower --micro_batch_tokens or --head_chunk_tokens (see --dry_run)"


def error_text(error: BaseException) -> str:
    """One line that names the error, and what it means where memory ran out or a rank is gone."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".rstrip(": ")
    if lost_a_rank(error):
        return f"another rank is gone, perhaps killed for its memory (torchrun's summary tells which, and how): {text}"
    return text + (f"; {MEMORY_REMEDY}" if out_of_memory(error) else "")


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed since the process at its other end has ended: gloo's words, and NCCL's."""
    signs = "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited"
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


# =====================================================================================================================
# Ranks: who this process is among the others. Plain `python` is a world of one, and runs the same code.
# =====================================================================================================================

@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_size: int
    device: torch.device
    loader_group: dist.ProcessGroup  # gloo; used by the loader's thread alone, so that its collectives never meet training's
    store: dist.Store  # torchrun's, which outlives any rank

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """[first, last) of `count` things that belong to a rank (default: this one); uneven and empty shares are fine."""
        rank = self.rank if rank is None else rank
        return rank * count // self.size, (rank + 1) * count // self.size

    def first_error(self, mine: str) -> str:
        """What the first rank to fail said: `mine`, unless another was earlier."""
        try:
            return self.store.compare_set("first_error", "", mine).decode()
        except dist.DistError:  # torchrun itself is gone
            return mine


@contextmanager
def join_world(config):
    """Join torchrun's processes, or make a world of one; yields World and leaves the process group at the end."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device, backend = torch.device("cpu"), "gloo"
    if config.device == "cuda":
        found = torch.cuda.device_count()
        if local_rank >= found:
            raise UserError(f"--device=cuda: found {found} GPUs, expected one for each of the {local_size} processes "
                            f"of this host; start fewer processes, or use --device=cpu")
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    store = next(dist.rendezvous("env://", rank, size, timeout=timeout))[0] if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=size, timeout=timeout)
    world = World(rank, size, local_size, device, dist.new_group(backend="gloo", timeout=timeout), store)
    try:
        yield world
    except BaseException as error:
        if world.device.type == "cpu":  # NCCL may wait for a partner that is gone; the process is about to end anyhow
            dist.destroy_process_group()
        text = error_text(error)
        if not isinstance(error, Stopped) and world.first_error(text) != text:
            raise FollowingError(f"rank {rank} followed") from error
        if lost_a_rank(error):
            raise LostRankError(text) from error
        raise
    dist.destroy_process_group()


def together(world: World, action):
    """action() on every rank. Where it fails on any, all ranks raise the lowest failing rank's error; none goes on alone."""
    result = error = None
    try:
        result = action()
    except (UserError, OSError) as caught:
        error = str(caught)
    errors = [None] * world.size
    dist.all_gather_object(errors, error)
    for message in errors:
        if message is not None:
            raise SharedError(message)
    return result


class StopSignal:
    """SIGTERM and SIGINT. Before `training` they end the process at once; then `signum` is for the loop to see.

    A thread hears them, since the main thread may be inside a compiler, or wait for a rank that is gone. Under torchrun, which
    kills 30 seconds after its signal, the thread ends the process if the loop has not answered by then. Where a rank has failed,
    the signal is torchrun's, and there is nothing to wait for.
    """

    def __init__(self):
        self.signum, self.training, self.answered = 0, False, threading.Event()
        self.told, self.telling = False, threading.Lock()
        self.log, self.failure = lambda text: None, lambda: ""  # until there is a log, and a world

    def install(self) -> None:
        self.ears, mouth = socket.socketpair()
        mouth.setblocking(False)
        signal.set_wakeup_fd(mouth.detach())
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)
        threading.Thread(target=self.listen, daemon=True, name="signals").start()

    def tell(self, text: str) -> None:
        """Write why the run ends to the log, once, whichever thread comes first."""
        with self.telling:
            if not self.told:
                self.told = True
                self.log(text)

    def listen(self) -> None:
        self.signum = self.ears.recv(1)[0]
        reason, failure = str(Stopped(self.signum)), self.failure()
        if self.training and not failure:
            if "RANK" not in os.environ:
                self.ears.recv(1)  # asked again: at once
            elif self.answered.wait(timeout=25):
                return
            else:
                reason, failure = f"{reason}, but the step under way did not end; is a rank gone?", self.failure()
        self.tell(f"error: {failure}" if failure else reason)
        if not failure and os.environ.get("RANK", "0") == "0":
            print(f"\n{reason}", file=sys.stderr, flush=True)
        os._exit(128 + self.signum)


def exit_status(main) -> int:
    """Runs main(stop=...), its errors told as a user should see them: by the first rank to fail, last."""
    stop = StopSignal()
    stop.install()
    try:
        main(stop=stop)
        return 0
    except Stopped as stopped:
        return 128 + stopped.signum
    except Exception as error:
        lost = isinstance(error, LostRankError)
        if not lost and (isinstance(error, FollowingError) or isinstance(error, SharedError) and os.environ.get("RANK", "0") != "0"):
            time.sleep(3)  # the first rank to leave has torchrun end the others, so the one that tells the error goes first
        if isinstance(error, FollowingError):
            return 1
        if out_of_memory(error) and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(MEMORY_REMEDY)
        if not isinstance(error, UserError):
            traceback.print_exc()
        print(f"\nerror: {error_text(error)}", file=sys.stderr, flush=True)
        if lost:
            time.sleep(3)  # the one that was killed is the cause that torchrun shall see
        elif "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().record_exception(error)  # for torchrun's own summary, which ends the screen
    return 1


# =====================================================================================================================
# Flags: a command line made from the fields of a dataclass.
# =====================================================================================================================

def flag(default, text: str):
    return field(default=default, metadata={"help": text})


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise SharedError(f"{message} (--help lists all flags)")


def parse_ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip("()[] ").split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected whole numbers with commas between") from None


def parse_flags(config_class, argv: list[str], description: str) -> dict:
    """Field name -> value for the flags in argv. Raises SharedError that names an unknown flag or a bad value; --help exits."""
    parser = Parser(prog="train_gpt.py", allow_abbrev=False, description=description)
    for f in fields(config_class):
        kind, default = type(f.default), ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else \
            dict(type=parse_ints if kind is tuple else kind, metavar=kind.__name__.upper())
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS,
                            help=f"{f.metadata['help']} (default {default})".replace("%", "%%"), **how)
    return vars(parser.parse_args([re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), argument) for argument in argv]))


def check_config(config, tracks: dict, orders: dict, channel_bounds) -> None:
    """Raise SharedError for the first value that cannot be: of which flag, what was found, what was expected."""
    def need(ok: bool, name: str, expected: str):
        if not ok:
            raise SharedError(f"--{name}: found {getattr(config, name)!r}, expected {expected}")

    for name in ("steps", "seq_len", "batch_tokens", "val_tokens", "layers", "model_dim", "heads", "head_chunk_tokens",
                 "ngram_update_every", "ngram_heads", "epochs", "timeout_s", "log_every", "checkpoint_keep"):
        need(getattr(config, name) >= 1, name, "at least 1")
    need(config.ranks == 0 or (config.ranks > 0 and config.dry_run), "ranks", "a number of ranks, together with --dry_run")
    need(not config.eval_only or config.resume, "eval_only", "--resume, which says what to evaluate")
    for name in ("micro_batch_tokens", "val_every", "sample_tokens", "ngram_rows", "ngram_signs", "warmup_steps", "checkpoint_every"):
        need(getattr(config, name) >= 0, name, "0 or more")
    for name in (f.name for f in fields(config) if isinstance(f.default, float)):
        need(math.isfinite(getattr(config, name)) and getattr(config, name) >= 0, name, "a finite number, 0 or more")
    for name in ("adam_beta1", "adam_beta2", "ngram_beta2", "muon_momentum"):
        need(getattr(config, name) < 1, name, "less than 1")
    need(config.rotary_base > 1, "rotary_base", "more than 1")
    need(0 <= config.seed < 2**63, "seed", "0 to 2^63 - 1")
    need("/" not in config.run_id, "run_id", "a file name without /")
    for name in ("batch_tokens", "val_tokens", "micro_batch_tokens"):
        need(getattr(config, name) % config.seq_len == 0, name, f"a multiple of --seq_len={config.seq_len}")
    need(config.track in ("auto", *tracks), "track", "one of " + ", ".join(tracks))
    need(config.device in ("auto", "cpu", "cuda"), "device", "cpu or cuda")
    need(config.warmup_steps >= config.compile, "warmup_steps", "at least 1 with --compile, which else ran on the clock")
    need(config.model_dim % (2 * config.heads) == 0, "heads", f"a divisor of --model_dim={config.model_dim}, the quotient even")
    need(0 <= config.cooldown <= 1, "cooldown", "a fraction from 0 to 1")
    types = ("bfloat16", "float32")
    for name, choices in {"dtype": types, "ngram_dtype": types, "ngram_second_moment": ("row", "element"), "ngram_device": ("auto", "cpu"),
                          "ngram_combine": ("sum", "concat"), "ngram_gate": ("scale", "context")}.items():
        need(getattr(config, name) in choices, name, " or ".join(choices))
    channels = len(config.ngram_orders) * config.ngram_heads
    need(config.ngram_combine == "sum" or not config.ngram_rows or config.ngram_dim % channels == 0, "ngram_dim", f"a multiple of the {channels} slices (orders x heads)")
    need(all(0 <= block < config.layers for block in config.ngram_layers), "ngram_layers", f"blocks from 0 to {config.layers - 1}")
    for name in ("ngram_layers", "value_embeds"):
        need(len(getattr(config, name)) == len(set(getattr(config, name))), name, "each block once")
    need(1 <= config.ngram_dim <= config.model_dim, "ngram_dim", f"1 to --model_dim={config.model_dim}")
    need(0 < len(config.ngram_orders) == len(set(config.ngram_orders)) and set(config.ngram_orders) <= orders.keys(), "ngram_orders",
         "different orders out of " + ",".join(map(str, orders)))
    need(len(config.ngram_split) in (0, len(config.ngram_orders)) and all(w > 0 for w in config.ngram_split), "ngram_split",
         f"one positive whole number for each of the {len(config.ngram_orders)} orders")
    need(config.stage_list[-1].end == config.steps, "stages", "the last one to end at 1")
    for stage in config.stage_list:
        need(stage.first <= stage.end, "stages", "ends in the order of time")
        need(0 < stage.batch_tokens <= config.batch_tokens, "stages", "batches from one row to all of --batch_tokens")
        need(0 < stage.length <= config.seq_len, "stages", f"segments from 1 token to --seq_len={config.seq_len}")
        need(0 < stage.windows[0] <= stage.windows[1], "stages", "windows of at least 1 token, the short one first")
    need(config.ngram_rows < 2**31, "ngram_rows", "fewer than 2^31 rows")
    need(config.ngram_rows > 0 or not config.table_report, "ngram_rows", "a table to report on")
    if config.ngram_rows:
        smallest = min(high - low for low, high in channel_bounds(config))
        need(smallest >= 2, "ngram_rows", f"at least 2 rows a hash, one being reserved (found {smallest})")


# =====================================================================================================================
# The plan: what a run will need, worked out from the config alone and printed before anything is allocated.
# =====================================================================================================================

STAGING_BYTES = 32 << 20  # of a buffer between host and device; longer ones fill the links no better


def plan_bytes(config, world: World, parameters: int, moments: int, vocab: int, flops_per_token: int, tokens_on_disk: int) -> dict:
    """Parameters, tokens, bytes a rank by kind (estimates from above), and exchange bytes a step, as a flat dict.

    `parameters` and `moments` count the model's numbers beside the table, `vocab` its padded rows of the head.
    """
    size, activation = world.size, getattr(torch, config.dtype).itemsize
    micro_tokens = config.most_micro_rows(size) * config.seq_len
    widths = 22 + 5 * (config.ngram_gate == "context")
    per_token = config.layers * (widths * config.model_dim + config.seq_len // 4) + 8 * config.model_dim + 2 * config.ngram_dim
    plan = {
        "dense_parameters": parameters, "table_parameters": config.ngram_rows * config.ngram_row_dim,
        "train_tokens_needed": config.tokens_before(config.steps) + 1, "train_tokens_on_disk": tokens_on_disk,
        "weights_and_gradients_bytes": 8 * parameters, "optimizer_bytes": 4 * (moments + parameters) // size,
        "host_" * (world.device.type == "cuda") + "warm_up_copy_bytes": 4 * (parameters + moments // size),
        "activations_bytes": micro_tokens * per_token * activation,
        "logits_bytes": 3 * 4 * min(config.head_chunk_tokens, micro_tokens) * vocab,
        "dense_exchange_bytes_per_step": 2 * 4 * parameters * (size - 1) // size, "flops_per_token": flops_per_token,
    }
    if config.ngram_rows:
        plan |= table_plan(config, world, tokens_on_disk)
    plan |= step_time_bounds(config, world, plan)
    for place in ("", "host_"):
        if parts := parts_of(plan, place):
            plan[f"{place}bytes_per_rank"] = sum(plan[name] for name in parts)
    return plan


def parts_of(plan: dict, place: str) -> list[str]:
    """What a plan counts on the device (place "") or, beside a GPU, in host memory ("host_")."""
    return [name for name in plan if name.endswith("_bytes") and name.startswith("host_") == bool(place)]


PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40": 181, "4090": 165}  # dense bf16, from the makers' data sheets


def peak_tflops(config, world: World) -> float:
    """Of one rank's device; 0 where nobody said."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" and torch.cuda.is_available() else ""
    return config.peak_tflops or next((peak for part, peak in PEAK_TFLOPS.items() if part in name), 0.0)


def step_time_bounds(config, world: World, plan: dict) -> dict:
    """Below these a step of the last stage cannot take: its products at the device's peak, its exchange at the links' bandwidth."""
    bounds, peak = {}, peak_tflops(config, world)
    if peak:
        bounds["least_compute_ms_per_step"] = round(1e-9 * plan["flops_per_token"] * config.stage_list[-1].batch_tokens / world.size / peak, 3)
    if config.link_gbs:
        sent = sum(value for name, value in plan.items() if name.endswith("exchange_bytes_per_step"))
        bounds["least_exchange_ms_per_step"] = round(1e-6 * sent / config.link_gbs, 3)
    return bounds


def table_plan(config, world: World, tokens_on_disk: int) -> dict:
    """The table's part of the plan. In host memory rows and state count only as far as the run can touch them."""
    size, reads = world.size, len(config.ngram_orders) * config.ngram_heads
    shard = -(-config.ngram_rows // size)
    dim = config.ngram_row_dim
    row = dim * getattr(torch, config.ngram_dtype).itemsize
    state = 4 + 4 * (1 if config.ngram_second_moment == "row" else dim)
    cycle_reads = -(-config.batch_tokens // config.seq_len // size) * config.seq_len * config.ngram_update_every * reads
    cycle_rows = min(config.ngram_rows, cycle_reads)
    rows_bytes, state_bytes = shard * row, shard * state
    apart = config.ngram_device == "cpu"  # in the hands of HostRows
    if world.device.type == "cpu" or apart:
        tokens = min(config.tokens_before(config.steps), tokens_on_disk or math.inf)
        touched = min(shard, tokens * reads * 5 // 4 // size)  # hashes load the owners evenly, but not exactly
        rows_bytes = min(rows_bytes, touched * (row + mmap.PAGESIZE))  # a row's first and last page hold others' bytes too
        state_bytes = min(state_bytes, touched * (state + 2 * mmap.PAGESIZE))
    exchanged, copies = cycle_rows * (size - 1) // size, "host_" * (world.device.type != "cpu")
    host = copies if apart else ""
    return {
        f"{host}table_rows_bytes": rows_bytes, f"{host}table_state_bytes": state_bytes,
        **({f"{host}staging_bytes": 2 * STAGING_BYTES, "table_parts_bytes": 2 * STAGING_BYTES} if apart else {}),  # and their other ends
        "table_cache_bytes": 2 * cycle_rows * row * ((size > 1) + apart) * (9 if apart else 8) // 8,  # the brought rows' sizes are rounded up
        "table_gradients_bytes": (1 + (size > 1) + apart) * 4 * cycle_rows * dim,
        f"{copies}table_warm_up_copy_bytes": cycle_rows * (row + state), "sign_pool_bytes": max(1, config.ngram_signs) * dim,
        "table_plans_bytes": 16 * (6 * cycle_reads + reads * config.val_tokens // size),
        "table_exchange_bytes_per_step": exchanged * (row + 4 * dim + 8) // config.ngram_update_every,
    }


def plan_lines(plan: dict, world: World) -> list[str]:
    lines = [f"plan for {world.size} rank{'s' * (world.size > 1)} on {world.device.type}"]
    for name, value in plan.items():
        shown = f"{value / 2**20:,.1f} MiB" if "bytes" in name else f"{value:,}"
        lines.append(f"  {re.sub('_bytes(?=$|_per_step)', '', name).replace('_', ' '):<30}{shown:>20}{' a rank' * name.endswith('_bytes')}")
    return lines


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks: mapping and clearing them anew takes longer than the arithmetic on them."""
    if platform.libc_ver()[0] == "glibc":
        M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20)):
            ctypes.CDLL(None).mallopt(option, value)


def available_bytes(world: World, place: str) -> int:
    """Memory that one rank may still take: free on its GPU, or its part of what is available on the host (for the CPU, or "host_")."""
    if world.device.type == "cuda" and not place:
        return torch.cuda.mem_get_info(world.device)[0]
    meminfo, cgroup = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if meminfo.exists():
        available = int(re.search(r"MemAvailable:\s*(\d+)", meminfo.read_text())[1]) << 10
    if (cgroup / "memory.max").exists() and (cgroup / "memory.max").read_text().strip() != "max":
        cache = int(re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)[1])
        used = int((cgroup / "memory.current").read_text()) - cache
        available = min(available, int((cgroup / "memory.max").read_text()) - used)
    return available // world.local_size


def check_fits(plan: dict, world: World) -> None:
    """Refuse a run that cannot fit, before it allocates, and name the flag that shrinks its largest part."""
    remedies = {"table_rows": "--ngram_rows", "table_state": "--ngram_rows", "table_cache": "--batch_tokens",
                "table_gradients": "--batch_tokens", "activations": "--micro_batch_tokens", "logits": "--head_chunk_tokens"}
    for place in ("", "host_"):
        needed, available = plan.get(f"{place}bytes_per_rank", 0), available_bytes(world, place)
        if needed > available:
            largest = max(parts_of(plan, place), key=plan.get)
            part = largest.removeprefix("host_").removesuffix("_bytes")
            remedy = remedies.get(part, "--model_dim or --layers")
            if part in ("table_rows", "table_state") and world.device.type == "cuda" and not place:
                remedy += ", or keep the table in host memory with --ngram_device=cpu"
            raise UserError(f"{place.replace('_', ' ')}memory: found {available / 2**30:.2f} GiB available to each of the {world.local_size} ranks "
                            f"of this host, expected {needed / 2**30:.2f} GiB by the plan, of which {part} takes {plan[largest] / 2**30:.2f}; "
                            f"lower {remedy} (see --dry_run)")


# =====================================================================================================================
# Kernel: the table's loops on the CPU, compiled from table_kernel.cpp. They compute what its tensor operations do.
# =====================================================================================================================

class TableKernel:
    """table_kernel.cpp compiled for rows of one type and this machine, kept in __pycache__; runs on as many threads as torch."""

    def __init__(self, dtype: str):
        source = Path(__file__).resolve().with_name("table_kernel.cpp")
        key = hashlib.sha256(source.read_bytes() + f"{dtype} {cpu_name()}".encode()).hexdigest()[:16]
        library = source.parent / "__pycache__" / f"table_kernel_{key}.so"
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            part = library.with_suffix(f".{os.getpid()}.part")
            options = ["-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC", f"-DROW={dtype}"]
            subprocess.run(["c++", *options, source, "-o", part], check=True, capture_output=True)
            part.rename(library)
        self.library, self.threads = ctypes.CDLL(str(library)), torch.get_num_threads()
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="table")

    def __call__(self, name: str, count: int, *arguments) -> None:
        """Run function `name` over [0, count) with the contiguous tensors, whole numbers and floats that it takes."""
        kinds = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_float, Tensor: lambda t: ctypes.c_void_p(t.data_ptr())}
        values = [kinds[type(argument)](argument) for argument in arguments]
        cuts = [ctypes.c_int64(count * i // self.threads) for i in range(self.threads + 1)]
        function = getattr(self.library, name)
        list(self.pool.map(lambda first, last: function(first, last, *values), cuts, cuts[1:]))


def table_kernel(config, device: torch.device) -> TableKernel | None:
    """The kernel for rows on `device`, or None on a GPU, where a compiler is missing or fails, or where it cannot be kept."""
    if device.type != "cpu" or not config.ngram_kernel:
        return None
    try:
        return TableKernel(config.ngram_dtype)
    except (OSError, subprocess.CalledProcessError):
        return None


# =====================================================================================================================
# Log: one file a run, opened exclusively by rank 0; the source beside it once a folder, by its hash.
# =====================================================================================================================

SOURCES = ("train_gpt.py", "tokens.py", "harness.py", "host_rows.py", "table_kernel.cpp")  # kept with the logs; source_sha256 is the first one's


class RunLog:
    """Writes `out/run_id.txt` and the screen. On a terminal the training steps share one live line. Silent but on rank 0."""

    def __init__(self, config, world: World, data: dict, plan: dict, resumed: dict | None = None):
        self.main, self.total, self.run_id = world.main, config.steps, ""
        self.live, self.lost = sys.stdout.isatty(), False
        if not self.main:
            return
        folder = Path(config.out)
        stamp = f"{datetime.now():%Y-%m-%d_%H%M%S}_{config.track}_seed{config.seed}_{os.urandom(2).hex()}"
        self.run_id = config.run_id or stamp
        if config.eval_only:
            self.file = open(os.devnull, "w")  # an evaluation is no run
            return
        path, here = folder / f"{self.run_id}.txt", Path(__file__).parent
        sources = {name: (here / name).read_bytes() for name in SOURCES if (here / name).exists()}  # the kernel is optional
        digests = {name: hashlib.sha256(source).hexdigest() for name, source in sources.items()}
        try:
            if folder.exists() and not folder.is_dir():
                raise UserError(f"--out={folder}: found a file, expected a folder for the log")
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "x", encoding="utf-8", buffering=1)
            for name, source in sources.items():
                copy = folder / f"{Path(name).stem}_{digests[name][:16]}{Path(name).suffix}"
                if not copy.exists():
                    part = copy.with_suffix(f".{os.getpid()}.part")
                    part.write_bytes(source)
                    part.rename(copy)
        except FileExistsError:
            raise UserError(f"{path}: found a log of that name, expected none; choose another --run_id or --out") from None
        except OSError as error:
            raise UserError(f"{path}: found {error.strerror}, expected to write the log there; choose another --out") from None
        header = run_header(config, world, data, plan)
        if resumed:
            header["resumed"] = {key: resumed[key] for key in ("run_ids", "step")}
        self.line("run:" + json.dumps({"format": 1, "run_id": self.run_id, **header, "source_sha256": digests["train_gpt.py"],
                                        "sources": digests}), screen=False)
        print(f"log {path}")

    def line(self, text: str, screen: bool = True) -> None:
        if self.main:
            try:
                self.file.write(text + "\n")
            except OSError as error:  # what is not written waits for space
                if not self.lost:
                    print(f"warning: {self.file.name}: found {error.strerror}, expected to write the log there; training goes on",
                          file=sys.stderr, flush=True)
                self.lost = True
            if screen:
                print(("\r\033[K" if self.live else "") + text, flush=True)

    def step(self, step: int, train_time_s: float, key: str, loss: float, **more) -> None:
        average = train_time_s / step if step else math.nan
        extra = "".join(f" {name}:{value}" for name, value in more.items())
        self.line(f"step:{step}/{self.total} {key}:{loss:.5f} train_time:{1e3 * train_time_s:.0f}ms "
                  f"step_avg:{1e3 * average:.2f}ms{extra}", screen=key == "val_loss" or not self.live)

    def sample(self, trainer, tokenizer, step: int) -> None:
        """A sample of text, untimed. A collective."""
        config = trainer.config
        if config.sample_tokens:
            ids = trainer.sample(step, tokenizer.encode_ordinary(config.sample) if config.sample else [])
            text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
            self.line("sample:\n" + "\n".join("  | " + line for line in text.splitlines()))

    def shares(self, world: World, seconds: float, waited_s: float, trainer, flops: float, peak: float, compiled: int) -> None:
        """Where the training time went: `flops` of all ranks, against `peak` TFLOP/s of one (0: unknown)."""
        self.line(f"waited for data {waited_s:.2f} s, table {trainer.table_time.seconds():.2f} s of {seconds:.2f} s")
        if trainer.table and trainer.table.host:
            host_s = trainer.host_time.seconds()
            self.line(f"waited for rows in host memory {host_s:.2f} s ({host_s / max(seconds, 1e-9):.1%} of the time); the host's thread worked "
                      f"{trainer.table.host.thread.worked_s:.2f} s, evaluations included")
        if peak and seconds:
            reached = 1e-12 * flops / world.size / seconds
            self.line(f"{reached:.3f} TFLOP/s a rank, MFU {reached / peak:.1%} of {peak:g}")
        if compiled:
            self.line(f"warning: {compiled} graphs were compiled on the clock")

    def progress(self, step: int, loss: float, tokens_per_s: float, left_s: float) -> None:
        if self.main and self.live:
            print(f"\r\033[Kstep {step}/{self.total}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
                  f"{left_s // 60:.0f}:{left_s % 60:02.0f} left", end="", flush=True)


def run_header(config, world: World, data: dict, plan: dict) -> dict:
    """What made the run, for the log's first line."""
    def git(*arguments) -> str | None:
        try:
            command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git here, or no repository
            return None

    cuda, changes = world.device.type == "cuda", git("status", "--porcelain")
    return {
        "date": datetime.now().isoformat(timespec="seconds"), "config": asdict(config), "seed": config.seed, "world_size": world.size,
        "device_name": torch.cuda.get_device_name(world.device) if cuda else "cpu", "cpu_name": cpu_name(),
        "cpu_threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(),
        "git_commit": git("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes),
        "data": {name: data[name] for name in ("train", "val", "vocab_size")}, "target_loss": config.target_loss, "clock": "train-only", "plan": plan,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


# =====================================================================================================================
# Checkpoints: a folder that is whole or not there. Parameters and moments by name (dense.pt, whole, from rank 0), each rank's
# touched table rows (table*.pt) and its part of an update cycle under way (rank*.pt), and manifest.json with their checksums.
# =====================================================================================================================

CHECKPOINT_FORMAT = 1


@dataclass
class Progress:
    """Where a run stands, besides its tensors. The step alone gives schedules, stream position and table plans."""
    step: int = 0
    train_time_s: float = 0.0
    met: tuple[int, float] | None = None  # step and training seconds at which the target was first met


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_checkpoint(resume: str, out: str) -> Path:
    """The folder that --resume means. Raises SharedError."""
    if resume != "latest":
        return Path(resume)
    latest = Path(out) / "checkpoints" / "latest"
    if not latest.is_file():
        raise SharedError(f"{latest}: found no such file, expected it to name the latest checkpoint; name a checkpoint's folder with "
                          f"--resume=PATH, or its run's --out")
    name = latest.read_text(errors="replace").strip()
    if not name.isprintable() or not (latest.parent / name / "manifest.json").is_file():
        raise SharedError(f"{latest}: found {name!r}, expected the name of a checkpoint beside it; name one with --resume=PATH")
    return latest.parent / name


def read_manifest(path: Path) -> dict:
    """manifest.json of a checkpoint. Raises SharedError where it is not there, damaged, or something else."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        digest = manifest.pop("sha256")
    except OSError as error:
        raise SharedError(f"{path}/manifest.json: found {error.strerror}, expected a checkpoint's folder; see --resume") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        manifest, digest = {}, None
    if digest != manifest_digest(manifest) or manifest.get("format") != CHECKPOINT_FORMAT:
        raise SharedError(f"{path}/manifest.json: found something else or a damaged file, expected a checkpoint's manifest of format "
                          f"{CHECKPOINT_FORMAT}; use an older checkpoint")
    return manifest


def manifest_digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_files(path: Path, manifest: dict, world: World) -> None:
    """Raise UserError where a part of a checkpoint is missing or is not what was written. Each rank reads its share."""
    for name, expected in list(manifest["files"].items())[world.rank::world.size]:
        part = path / name
        if not part.exists() or part.stat().st_size != expected["bytes"] or sha256(part) != expected["sha256"]:
            found = f"{part.stat().st_size} bytes, or a wrong checksum" if part.exists() else "no such file"
            raise UserError(f"{part}: found {found}, expected {expected['bytes']} bytes as they were written; the checkpoint is damaged: "
                            f"use an older one")


def write_file(path: Path, content: dict, **more) -> dict:
    """torch.save, down to the disk. Returns the manifest's entry."""
    try:
        with open(path, "xb") as file:
            torch.save(content, file)
        flush_to_disk(path)
    except (OSError, RuntimeError) as error:  # torch makes its own of a failed write; the cause is behind it
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise UserError(f"{path}: found {getattr(cause, 'strerror', None) or cause}, expected to write a checkpoint there") from None
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path), **more}}


def abandoned(part: Path) -> bool:
    """Whether whoever wrote there is dead, which the lock tells; where there is none, an hour must have passed."""
    try:
        with open(part / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - part.stat().st_mtime > 3600


class Checkpoints:
    """Writes a run's checkpoints to `out/checkpoints` and keeps the newest; run_ids are its own, last, and those it resumes."""

    def __init__(self, config, world: World, data: dict, run_ids: list[str]):
        self.config, self.world, self.data, self.run_ids = config, world, data, run_ids
        self.folder, self.lock = Path(config.out) / "checkpoints", None  # the open file that says its writer lives

    def save(self, trainer, progress: Progress) -> Path:
        """Write a checkpoint and make it the latest. A collective; where it fails, all ranks raise SharedError and nothing remains."""
        world, path = self.world, self.folder / f"{self.run_ids[-1]}_step{progress.step:06d}"
        part = self.folder / f".{path.name}.part"
        dense = trainer.optimizer.saved()
        try:
            together(world, lambda: world.main and self.begin(part))
            files = together(world, lambda: self.write_parts(part, trainer, progress.step, dense))
            gathered = [None] * world.size
            dist.all_gather_object(gathered, files)
            manifest = {"format": CHECKPOINT_FORMAT, "run_ids": self.run_ids, **asdict(progress), "world_size": world.size,
                        "updates": trainer.optimizer.updates, "table_updates": trainer.table.updates if trainer.table else 0,
                        "torch": torch.__version__, "data": self.data, "config": asdict(self.config),
                        "files": {name: entry for files in gathered for name, entry in files.items()}}
            together(world, lambda: world.main and self.finish(part, path, manifest))
        except SharedError:
            if world.main:
                shutil.rmtree(part, ignore_errors=True)
            raise
        finally:
            if self.lock:
                self.lock.close()
        return path

    def save_or_warn(self, trainer, progress: Progress, log: RunLog) -> None:
        """A checkpoint on the way. Where it cannot be written, training is worth more than it."""
        try:
            log.line(f"checkpoint {self.save(trainer, progress)}", screen=False)
        except SharedError as error:
            log.line(f"warning: no checkpoint at step {progress.step}: {error}; training goes on")

    def stop(self, trainer, progress: Progress, log: RunLog, signal_: StopSignal) -> None:
        """End the run after a signal to any rank, with a checkpoint if the run makes any. Raises Stopped on all ranks."""
        signal_.answered.set()
        stopped, kept = Stopped(signal_.signum or signal.SIGTERM), "without a checkpoint (see --checkpoint)"
        if self.config.checkpoint or self.config.checkpoint_every:
            kept = f"checkpoint {self.save(trainer, progress)}"
        log.line(f"{stopped} after step {progress.step}, {kept}")
        raise stopped

    def check_folder(self) -> None:
        """Before hours of training: whether a checkpoint could be written."""
        probe = self.folder / f".{self.run_ids[-1]}_step0.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise UserError(f"{self.folder}: found {error.strerror}, expected a folder to write checkpoints to; choose another --out") from None

    def begin(self, part: Path) -> None:
        """Make an empty folder to write to, and sweep what killed runs left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*.part"):
            if self.is_mine(left.name[1:].removesuffix(".part").removesuffix(".removed")) or abandoned(left):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        part.mkdir()
        self.lock = open(part / "lock", "w")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self.lock, fcntl.LOCK_EX)

    def is_mine(self, name: str) -> bool:
        """Whether this is exactly the name of a checkpoint of the run or its predecessors; what a user made of one is the user's."""
        run_id, _, step = name.rpartition("_step")
        return run_id in self.run_ids and step.isdecimal()

    def write_parts(self, part: Path, trainer, step: int, dense: dict) -> dict:
        files, rank = {}, f"{self.world.rank:04d}"
        if self.world.main:
            files |= write_file(part / "dense.pt", dense)
        random_state = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else torch.get_rng_state()
        files |= write_file(part / f"rank{rank}.pt", {"random_state": random_state, **trainer.cycle_under_way(step)})
        for i, rows in enumerate(trainer.table.saved_parts() if trainer.table else ()):
            if len(rows["ids"]):
                files |= write_file(part / f"table{rank}_{i:04d}.pt", rows, first=int(rows["ids"][0]), last=int(rows["ids"][-1]))
        return files

    def finish(self, part: Path, path: Path, manifest: dict) -> None:
        (part / "manifest.json").write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}, indent=1))
        (part / "latest").write_text(path.name)
        (part / "lock").unlink()
        flush_to_disk(part / "manifest.json"), flush_to_disk(part / "latest"), flush_to_disk(part)
        if path.exists():  # a run that resumed from an older checkpoint comes by again
            self.remove(path)
        part.rename(path)
        flush_to_disk(self.folder)
        (path / "latest").replace(self.folder / "latest")
        flush_to_disk(self.folder)
        older = [old for old in self.folder.iterdir() if self.is_mine(old.name) and old != path]
        older.sort(key=lambda old: old.stat().st_mtime, reverse=True)
        for old in older[self.config.checkpoint_keep - 1:]:
            self.remove(old)

    def remove(self, path: Path) -> None:
        """Under another name first, so that nothing half-removed looks whole."""
        shutil.rmtree(path.rename(self.folder / f".{path.name}.removed.part"))


def load_checkpoint(path: Path, manifest: dict, trainer, data: dict) -> Progress:
    """Give a trainer, of a world of any size, the state that a checkpoint holds. Its files have been checked."""
    def read(name: str) -> dict:
        return torch.load(path / name, map_location="cpu", mmap=True, weights_only=True)

    world, table, ranks = trainer.world, trainer.table, manifest["world_size"]
    trainer.optimizer.load(read("dense.pt"), manifest["updates"])
    if table:
        table.updates = manifest["table_updates"]
        for name, entry in manifest["files"].items():
            if name.startswith("table") and entry["first"] < table.first_row + len(table.rows) and entry["last"] >= table.first_row:
                table.load_part(read(name))
        parts = [read(f"rank{rank:04d}.pt") for rank in range(world.rank, ranks, world.size)]
        trainer.carry_on(manifest["step"], [part for part in parts if "ids" in part])
    if (world.size, trainer.config.device) == (ranks, manifest["config"]["device"]):  # a GPU's state is no CPU's
        state = read(f"rank{world.rank:04d}.pt")["random_state"].clone()
        (torch.cuda.set_rng_state if world.device.type == "cuda" else torch.set_rng_state)(state)
    same_target = manifest["config"]["target_loss"] == trainer.config.target_loss and manifest["data"]["val"] == data["val"]
    met = tuple(manifest["met"]) if manifest["met"] and same_target else None
    return Progress(manifest["step"], manifest["train_time_s"], met)


def open_checkpoint(config, data: dict, world: World) -> dict:
    """The manifest of the checkpoint to resume, its files checked, and its data set compared with the one at hand."""
    path = Path(config.resume)
    manifest = read_manifest(path)
    there, here = manifest["data"]["shards"], data["shards"]
    if not (config.spread_rows or config.epochs > 1):  # the stream only grows where shards are added behind
        here = here[:len(there)]
    if here != there:
        raise UserError(f"{config.data}: found another data set (train shards {', '.join(here)}), expected the one that {path} was trained "
                        f"on ({', '.join(there)}); name its folder with --data")
    check_files(path, manifest, world)
    return manifest


# =====================================================================================================================
# Clocks: they never wait for a GPU where it could work on.
# =====================================================================================================================

class LossWatch:
    """Reads each step's loss back a little later than it was made, so that a GPU never waits, and stops a run that diverged.

    What train_step returns is equal on all ranks, so all stop at the same step, for a bad loss or for a signal.
    """

    def __init__(self, world: World):
        self.cuda, self.pending, self.latest, self.stop = world.device.type == "cuda", deque(), math.nan, False

    def push(self, step: int, sums: Tensor) -> None:
        event = None
        if self.cuda:
            sums = torch.empty(2, pin_memory=True).copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((step, sums, event))
        self.settle(lag=2 if self.cuda else 0)

    def settle(self, lag: int = 0) -> None:
        while len(self.pending) > lag:
            step, sums, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            self.latest, wishes = sums.tolist()
            self.stop |= wishes > 0
            if not math.isfinite(self.latest):
                raise SharedError(f"training loss: found {self.latest} after step {step}, expected a finite number; lower the "
                                  f"learning rates (--muon_lr, --adam_lr, --ngram_lr)")


class TimeShare:
    """Seconds that the device spends inside `with` blocks, measured without waiting for it."""

    def __init__(self, world: World):
        self.cuda, self.total, self.events = world.device.type == "cuda", 0.0, deque()

    def __enter__(self) -> None:
        self.began = self.now()

    def __exit__(self, *_) -> None:
        ended = self.now()
        if self.cuda:
            self.events.append((self.began, ended))
            while len(self.events) > 1 and self.events[0][1].query():  # what is over need not be kept
                began, ended = self.events.popleft()
                self.total += began.elapsed_time(ended) / 1e3
        else:
            self.total += ended - self.began

    def now(self) -> float | torch.cuda.Event:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """So far; waits for the device."""
        if self.events:
            self.events[-1][1].synchronize()
        self.total += sum(began.elapsed_time(ended) for began, ended in self.events) / 1e3
        self.events.clear()
        return self.total


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


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0

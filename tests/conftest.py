"""Shared by the tests: shards written without the project's own writer, and functions run on several real ranks."""
from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt

torch.set_num_threads(1)  # the tests' tensors are too small for more

VOCAB, DOC_START = 61, 60
TINY = ["--track=cpu", "--device=cpu", "--steps=20", "--batch_tokens=1536", "--seq_len=32", "--layers=2",
        "--model_dim=32",
        "--heads=2", "--ngram_dim=24", "--ngram_rows=4001", "--ngram_signs=64", "--val_tokens=2048", "--val_every=10",
        "--head_chunk_tokens=200", "--sample_tokens=8", "--adam_lr=0.008", "--muon_lr=0.023", "--dtype=float32"]
# With staged.Staged, which has what is no flag: every part of the recipe that the cpu track leaves out.
RECIPE = ["--value_embeds=0,1", "--tie_until=0.6", "--weight_decay=0.1"]


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int = VOCAB, doc_start: int = DOC_START, **header) -> Path:
    head = np.zeros(256, np.int32)
    count = header.get("count", len(tokens))
    head[:5] = header.get("magic", 20240520), header.get("version", 1), count, vocab_size, doc_start
    path.write_bytes(head.tobytes() + np.asarray(tokens).astype("<u2").tobytes())
    return path


def markov_tokens(count: int, seed: int) -> np.ndarray:
    """Documents of a sparse second-order chain: each pair of tokens has two likely successors, so n-grams help."""
    rng = np.random.default_rng(seed)
    successors = np.random.default_rng(1).integers(0, VOCAB - 1, (VOCAB, VOCAB, 2))
    tokens, choice, ends = [DOC_START, 0], rng.integers(0, 2, count), rng.random(count) < 0.01
    while len(tokens) < count:
        i = len(tokens)
        tokens.append(DOC_START if ends[i] else int(successors[tokens[-2], tokens[-1], choice[i]]))
    return np.array(tokens[:count])


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_shard(folder / "tiny_train_000001.bin", markov_tokens(30_000, 2))
    write_shard(folder / "tiny_train_000002.bin", markov_tokens(20_001, 3))
    write_shard(folder / "tiny_val_000000.bin", markov_tokens(5_000, 4))
    return folder


def run_trainer(*arguments, ranks: int = 1, timeout_s: int = 120,
                script: str = "train_gpt.py") -> subprocess.CompletedProcess:
    """The trainer, or a variant's script, as a user starts it: plain python, or torchrun with several processes."""
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *launch, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def on_ranks(size: int, function, *arguments, flags: list[str], config_class=train_gpt.Config) -> list:
    """function(config, world, *arguments) on `size` gloo processes; each rank's result. It must be picklable."""
    return start_ranks(size, in_world, function, arguments, flags, config_class)


def main_on_ranks(size: int, flags: list[str], **classes) -> list[float]:
    """train_gpt.main(flags, **classes) on `size` processes, without torchrun's seconds; each rank's result."""
    return start_ranks(size, call_main, flags, classes)


def start_ranks(size: int, function, *arguments) -> list:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_gpt"])
    with context.Pool(size) as pool:
        calls = [pool.apply_async(on_rank, (rank, size, port, function, arguments)) for rank in range(size)]
        return [call.get(timeout=120) for call in calls]


def on_rank(rank: int, size: int, port: int, function, arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return function(*arguments)


def in_world(function, arguments, flags: list[str], config_class):
    config = train_gpt.parse_args(flags, config_class)
    with train_gpt.join_world(config) as world:
        return function(config, world, *arguments)


def call_main(flags: list[str], classes: dict) -> float:
    return train_gpt.main(flags, **classes)

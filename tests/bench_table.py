"""What one step of the n-gram table costs on the CPU, against its alternatives. Not run by the tests.

    python tests/bench_table.py [--rounds 7]

One step is: read 16,384 tokens x 2 orders x 768, their gradient, and the update. All contenders run in turn, round
after round; medians are printed. Every row was touched before its clock starts; first touches have a line of their own.
In an environment that has fbgemm-gpu-cpu beside torch (1.8.0 loads beside torch 2.13.0), its table-batched embedding is
timed too.
"""
from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt import Config, NgramTable, join_world, keep_freed_memory

TOKENS, ORDERS, DIM, SIGNS = 16_384, 2, 768, 8192
RECORD_ROWS, SMALL_ROWS, TOUCHED, PLANS = 84_602_880, 377_280, 24_000, 4


def reads(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows, signs int64 [1, 2, 16384] that touch exactly TOUCHED rows spread over the table, each order its half."""
    generator = torch.Generator().manual_seed(seed)
    half = num_rows // ORDERS
    rows = []
    for order in range(ORDERS):
        span = half // (TOUCHED // ORDERS)
        unique = order * half + torch.arange(TOUCHED // ORDERS) * span
        unique += torch.randint(0, span, unique.shape, generator=generator)
        repeats = unique[torch.randint(0, len(unique), (TOKENS - len(unique),), generator=generator)]
        rows.append(torch.cat((unique, repeats))[torch.randperm(TOKENS, generator=generator)])
    return torch.stack(rows)[None], torch.randint(0, SIGNS, (1, ORDERS, TOKENS), generator=generator)


class Ours:
    def __init__(self, num_rows: int, dtype: str, world, compiled: bool = True):
        config = Config(ngram_rows=num_rows, ngram_dim=DIM, model_dim=DIM, ngram_dtype=dtype, ngram_signs=SIGNS)
        self.table = NgramTable(config, world)
        if not compiled:
            self.table.loops = None
        self.cycles = [self.table.route(*reads(num_rows, seed)) for seed in range(PLANS)]
        self.grad = torch.randn(TOKENS, DIM)
        self.phases = {}

    def step(self, i: int) -> None:
        table, cycle = self.table, self.cycles[i % PLANS]
        marks = [time.perf_counter()]
        fetched = table.fetch(cycle)
        marks.append(time.perf_counter())
        table.read(fetched, cycle.reads[0], cycle.signs[0])
        marks.append(time.perf_counter())
        grads = torch.empty(cycle.asked, DIM)
        table.add_grad(grads, cycle.slots[0], cycle.signs[0], self.grad, fresh=True)
        marks.append(time.perf_counter())
        table.update(cycle, grads, 0.1)
        marks.append(time.perf_counter())
        for phase, a, b in zip(("fetch", "read", "gradient", "update"), marks, marks[1:]):
            self.phases.setdefault(phase, []).append(b - a)


class Embedding:
    """torch.nn.Embedding and an optimizer of torch's, on the same reads."""

    def __init__(self, num_rows: int, sparse: bool):
        self.weight = torch.nn.Embedding(num_rows, DIM, sparse=sparse)
        parameters = list(self.weight.parameters())
        self.optimizer = torch.optim.SparseAdam(parameters, lr=0.1) if sparse else \
            torch.optim.Adam(parameters, lr=0.1, fused=True)
        self.pool = torch.randint(0, 2, (SIGNS, DIM)).float() * 2 - 1
        self.reads = [reads(num_rows, seed) for seed in range(PLANS)]
        self.grad = torch.randn(TOKENS, DIM)

    def step(self, i: int) -> None:
        rows, signs = self.reads[i % PLANS]
        out = sum(self.weight(rows[0, c]) * self.pool[signs[0, c]] for c in range(ORDERS))
        out.backward(self.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Fbgemm:
    """fbgemm's table-batched embedding with row-wise Adagrad on the same reads, without signs, which it lacks."""

    def __init__(self, num_rows: int):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (ComputeDevice, EmbeddingLocation,
                                                                            PoolingMode,
                                                                            SplitTableBatchedEmbeddingBagsCodegen)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.1, pooling_mode=PoolingMode.SUM, device=torch.device("cpu"))
        self.reads = [reads(num_rows, seed)[0][0].T.flatten() for seed in range(PLANS)]
        self.offsets, self.grad = torch.arange(0, ORDERS * TOKENS + 1, ORDERS), torch.randn(TOKENS, DIM)

    def step(self, i: int) -> None:
        self.tables(self.reads[i % PLANS], self.offsets).backward(self.grad)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    source, target, times = torch.randn(1 << 26), torch.empty(1 << 26), []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * 4 * source.numel() / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    keep_freed_memory()
    with join_world(Config(device="cpu")) as world:
        contenders, first = {}, {}
        for name, make in {
            "table bfloat16, record rows": lambda: Ours(RECORD_ROWS, "bfloat16", world),
            "table bfloat16, small": lambda: Ours(SMALL_ROWS, "bfloat16", world),
            "table float32, record rows": lambda: Ours(RECORD_ROWS, "float32", world),
            "table float32, small": lambda: Ours(SMALL_ROWS, "float32", world),
            "table float32, small, not compiled": lambda: Ours(SMALL_ROWS, "float32", world, compiled=False),
            "Embedding(sparse) + SparseAdam, small": lambda: Embedding(SMALL_ROWS, sparse=True),
            "Embedding + Adam(fused), small": lambda: Embedding(SMALL_ROWS, sparse=False),
            **({"fbgemm, row-wise Adagrad, small": lambda: Fbgemm(SMALL_ROWS)} if find_spec("fbgemm_gpu") else {}),
        }.items():
            contenders[name] = make()
            began = time.perf_counter()
            for i in range(PLANS):
                contenders[name].step(i)
            first[name] = (time.perf_counter() - began) / PLANS
            if isinstance(contenders[name], Ours):
                contenders[name].phases.clear()
        times, shuffle = {name: [] for name in contenders}, random.Random(0)
        for i in range(args.rounds * PLANS):
            # nobody always runs on what another left in the caches
            for name in shuffle.sample(list(contenders), len(contenders)):
                began = time.perf_counter()
                contenders[name].step(i)
                times[name].append(time.perf_counter() - began)
        report(contenders, first, {name: statistics.median(t) for name, t in times.items()})


def report(contenders: dict, first: dict, median: dict) -> None:
    print(f"{TOKENS:,} tokens x {ORDERS} orders x {DIM}, {TOUCHED:,} touched rows, {torch.get_num_threads()} threads; "
          f"record rows {RECORD_ROWS:,}, small {SMALL_ROWS:,}\n")
    print(f"{'':40}{'ms a step':>10}{'first touch':>13}{'  to table float32, small':>25}")
    for name, seconds in median.items():
        print(f"{name:40}{1e3 * seconds:10.1f}{1e3 * first[name]:13.1f}"
              f"{seconds / median['table float32, small']:25.2f}")
    for dtype in ("bfloat16", "float32"):
        ratio = median[f"table {dtype}, record rows"] / median[f"table {dtype}, small"]
        print(f"record rows over small, {dtype}: {ratio:.2f}")
    bandwidth = copy_bandwidth()
    print(f"\nlarge copy: {bandwidth / 1e9:.1f} GB/s read and written; the bytes each phase must move, over its time, "
          f"as a share of that")
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        row, wide, reads_ = size * DIM, 4 * DIM, TOKENS * ORDERS
        least = {"read": reads_ * 2 * row + TOKENS * wide,
                 "gradient": reads_ * row + TOKENS * wide + TOUCHED * wide, "update": TOUCHED * (2 * row + wide)}
        phases = contenders[f"table {dtype}, small"].phases
        print(f"  {dtype:9}" + "  ".join(
            f"{phase} {1e3 * statistics.median(phases[phase]):.1f} ms "
            f"{count / statistics.median(phases[phase]) / bandwidth:.0%}"
            for phase, count in least.items()))


if __name__ == "__main__":
    main()

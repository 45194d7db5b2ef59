"""Where a training step's time goes, and the share of the machine's speed that the model reaches. Not run by the tests.

    python tests/bench_step.py [--rounds 7] [trainer flags]

FLOPs are those of the model in forward and backward, as GPT.flops_per_token counts them. They are held against two
measures of what matrix multiplication allows, timed in the same rounds: the model's own products alone, at their own
shapes, and a 2048 x 2048 product. Medians.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from train_gpt import Trainer


def own_products(trainer: Trainer):
    """A function that does the model's matrix products of forward and backward, and nothing else."""
    config, products, dtype = trainer.config, [], trainer.model.dtype
    rows = config.micro_rows(1, config.batch_tokens)
    tokens = rows * config.seq_len
    for name, p in trainer.model.named_parameters():
        if name == "head" or (name.startswith("blocks.") and not name.endswith("_gate")):
            weight = torch.randn(p.shape, dtype=dtype).flatten(0, -2)
            if name.endswith("mlp_down"):
                weight = weight.T
            at_once = min(tokens, config.head_chunk_tokens) if name == "head" else tokens
            x, grad = (torch.randn(at_once, width, dtype=dtype) for width in weight.shape[::-1])
            products += (tokens // at_once) * [(x, weight.T), (grad, weight), (grad.T, x)]
    heads = (rows * config.heads, config.seq_len)
    q, scores = (torch.randn(*heads, width, dtype=dtype)
                 for width in (config.model_dim // config.heads, config.seq_len))
    products += config.layers * [(q, q.mT), (scores, q), (q, q.mT), (scores, q), (scores, q), (scores, q)]

    def run() -> None:
        for _ in range(config.batch_tokens // tokens):
            for a, b in products:
                a @ b
    return run


def parts_of_a_step(trainer: Trainer) -> dict:
    """Name -> function that does this part of a step alone."""
    table, (batches, cycle) = trainer.table, trainer.prepare(0)
    matrix = torch.randn(2048, 2048, dtype=trainer.model.dtype)
    batch, memory = batches[0], None
    parts = {"matmul": lambda: matrix @ matrix, "own products": own_products(trainer),
             "loader (in its thread)": lambda: trainer.prepare(0)}
    if table:
        fetched = table.fetch(cycle)
        grads, slots, reads, signs = torch.empty(cycle.asked,
                                                 fetched.shape[1]), cycle.slots[0], cycle.reads[0], cycle.signs[0]
        memory = table.read(fetched, reads, signs)
        parts |= {"table fetch": lambda: table.fetch(cycle), "table read": lambda: table.read(fetched, reads, signs),
                  "table gradient": lambda: table.add_grad(grads, slots, signs, memory, True),
                  "table update": lambda: table.update(cycle, grads, 0.0)}

    def forward_and_backward():
        for m, (tokens, targets, starts) in enumerate(zip(batch.tokens, batch.targets, batch.starts)):
            part = None
            if memory is not None:
                part = memory[m * tokens.numel():(m + 1) * tokens.numel()]
                part = part.view(*tokens.shape, -1).detach().requires_grad_()
            trainer.forward(tokens, starts, part, targets, **trainer.stage_inputs(0, starts)).backward()

    return parts | {"forward and backward": forward_and_backward,
                    "Muon and Adam": lambda: trainer.optimizer.step(0.0, 0.9, trainer.config.batch_tokens, tied=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args, flags = parser.parse_known_args()
    train_gpt.keep_freed_memory()
    config = train_gpt.parse_args(flags)
    with train_gpt.join_world(config) as world:
        trainer = Trainer(config, world, train_gpt.open_dataset(config))
        trainer.warm_up()
        parts = parts_of_a_step(trainer)
        times = {name: [] for name in parts}
        for _ in range(args.rounds):
            for name, part in parts.items():
                began = time.perf_counter()
                part()
                times[name].append(time.perf_counter() - began)
    seconds = {name: statistics.median(t) for name, t in times.items()}
    peak, own = 2 * 2048**3 / seconds.pop("matmul"), seconds.pop("own products")
    flops = trainer.model.flops_per_token(config.stage_list[0].windows) * config.batch_tokens
    speed = flops / seconds["forward and backward"]
    total = sum(s for name, s in seconds.items() if not name.startswith("loader"))
    print(f"{config.layers} x {config.model_dim}, {config.batch_tokens:,} tokens a step, "
          f"{torch.get_num_threads()} threads")
    for name, s in seconds.items():
        print(f"  {name:24}{1e3 * s:9.1f} ms{s / total:8.1%} of the step")
    print(f"forward and backward: {own / seconds['forward and backward']:.0%} of its own products' speed, "
          f"{1e3 * own:.0f} ms alone; {speed / 1e9:.0f} GFLOP/s, "
          f"{speed / peak:.0%} of a 2048 x 2048 product's {peak / 1e9:.0f}")


if __name__ == "__main__":
    main()

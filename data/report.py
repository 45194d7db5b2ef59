"""What n-grams shards hold and how they fill a table: to choose its rows and their split between orders.

    python data/report.py --data=data/torch_source --ngram_rows=1000000
    python data/report.py --track=fineweb --device=cpu --ngram_split=1,3 --ranks=8

Counts exactly, and trains nothing. Flags are the trainer's; --ranks says among how many owners the rows are divided.
For each order: distinct n-grams and reads, rows that any of them uses, and the part of the reads whose row another
n-gram uses too.
"""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_gpt.py says where the table keeps an n-gram
from train_gpt import (Config, Dataset, UserError, make_batch, ngram_addresses, open_dataset, parse_args, predecessors,
                       run_command, sort_unique)

REPORT_TOKENS = 1 << 23  # enough to see the trend, seconds to count


def ngram_keys(tokens: Tensor, starts: Tensor, order: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [..., L], starts bool -> the n-gram that ends at each position as an int64, and whether its segment
    holds all of it."""
    keys = sum(tokens.flatten().roll(back) << 16 * back for back in range(order))
    return keys.numpy(), (predecessors(starts.flatten()) >= order - 1).numpy()


def table_report(config: Config, dataset: Dataset, owners: int) -> list[str]:
    """Of the run's tokens: distinct n-grams, used rows and shared reads of each order, and used rows by owner."""
    of_run, most = config.tokens_before(config.steps), max(1, REPORT_TOKENS // config.seq_len)
    count = min(of_run // config.seq_len, dataset.train.num_rows, most)
    batch = make_batch(dataset.train.read(0, count), count, count, dataset.doc_start)
    tokens = batch.tokens.flatten()
    rows, _ = ngram_addresses(tokens, batch.starts.flatten(), config)
    lines = [f"table report over {len(tokens):,} of the run's {of_run:,} tokens: "
             f"{config.ngram_rows:,} rows, {owners} rank{'s' * (owners > 1)}"]
    owner_ends = [(rank + 1) * config.ngram_rows // owners for rank in range(owners)]
    owner_rows = 0
    for channel, row in zip(config.channels, rows):
        ngram, complete = ngram_keys(tokens, batch.starts, channel.order)
        ngram, channel_rows = ngram[complete], channel.high - channel.low
        used, slots = sort_unique(row.numpy()[complete])
        # An n-gram has one row, so counting n-grams at their first occurrence counts the different ones of each row.
        first = np.unique(ngram, return_index=True)[1]
        collides = (np.bincount(slots[first], minlength=len(used)) > 1)[slots]
        owner_rows += np.diff(np.searchsorted(used, owner_ends), prepend=0)
        shared = collides.mean() if len(collides) else 0.0
        lines.append(f"  order {channel.order}: {len(first):,} distinct n-grams in {len(ngram):,} reads; "
                     f"{len(used):,} of {channel_rows:,} rows used ({len(used) / channel_rows:.1%}); "
                     f"{shared:.1%} of reads share a row with another n-gram")
    low, high = owner_rows.min(), owner_rows.max()
    times = high / max(1, owner_rows.mean())
    return lines + [f"  used rows by owner: {low:,} to {high:,} ({times:.2f} times the mean at most)"]


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & {*argv}:
        print(__doc__, "The trainer's flags:\n", sep="\n")
    config = parse_args([*argv, "--dry_run"])  # beside which alone --ranks may stand
    if not config.ngram_rows:
        raise UserError("--ngram_rows: found 0, expected a table to report on")
    print("\n".join(table_report(config, open_dataset(config), config.ranks or 1)))


if __name__ == "__main__":
    run_command(main)

"""Look into a checkpoint: evaluate it, see what its table is worth and where, and let it continue a text.

    python records/look.py latest --prompt "def forward(self, "         the latest checkpoint of logs/ (see --out)
    python records/look.py logs/checkpoints/NAME --val_tokens=131072    with flags that a resumed run may change
    python records/look.py latest --variant my/variant.py               a checkpoint that a variant wrote
    torchrun --standalone --nproc_per_node=8 records/look.py latest     on several ranks

The lines "held out" give loss and next-token accuracy on validation tokens with the table and with zeros in place of
what it reads ("off"), in all and by the n-gram's count in training. Nothing is trained and no log is written.
"""
from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.report import ngram_keys
from train_gpt import (GPT, SOFTCAP, TOKENIZER_FILE, Batch, Config, Dataset, NgramTable, Trainer, UserError, World,
                       check_fits, check_tokens, find_checkpoint, identify_data, join_world, keep_freed_memory,
                       load_checkpoint, load_tokenizer, make_batch, make_plan, open_checkpoint, open_dataset,
                       parse_args, read_manifest, run_command, squashed_logits, together, variant_of)

# Classes of positions that the held-out lines tell apart: [low, high) of the count of the n-gram that ends there.
COUNTS = {"cut short by its segment's start": (-1, 0), "count 0": (0, 1), "count 1": (1, 2), "count 2 to 9": (2, 10),
          "count 10 to 99": (10, 100), "count 100 or more": (100, math.inf)}


# ---- what the table is worth ----------------------------------------------------------------------------------------

def training_counts(config: Config, dataset: Dataset, step: int, batches: list[Batch], classes: Tensor | None = None
                    ) -> dict[int, np.ndarray]:
    """order -> int64 [N]: for each position of the batches, how often the steps before `step` met the n-gram that ends
    there; -1 where its segment is too short for one. Tokens read again in a later epoch count once. Where a variant's
    table hashes `classes` of tokens, int64 [vocab_size], these are what an n-gram consists of.
    """
    def keys_of(batch: Batch, order: int) -> tuple[np.ndarray, np.ndarray]:
        return ngram_keys(batch.tokens if classes is None else classes[batch.tokens], batch.starts, order)

    stream, found, counted = dataset.train, {}, {}
    for order in config.ngram_orders:
        of_batches = zip(*(keys_of(batch, order) for batch in batches))
        keys, complete = (np.concatenate(parts) for parts in of_batches)
        known, at = np.unique(keys, return_inverse=True)
        found[order], counted[order] = (complete, at), (known, np.zeros(len(known), np.int64))
    for stage in config.stage_list:
        first, last = (min(config.tokens_before(min(at, step)) // config.seq_len, stream.num_rows)
                       for at in (stage.first, stage.end))
        rows = max(1, (1 << 20) // config.seq_len)  # at once: memory must not grow with what was trained on
        for low in range(first, last, rows):
            count = min(rows, last - low)
            batch = make_batch(stream.read(low, count), count, count, dataset.doc_start, stage.length)
            for order, (known, times) in counted.items():
                keys, complete = keys_of(batch, order)
                at = np.searchsorted(known, keys[complete]).clip(max=len(known) - 1)
                times += np.bincount(at[known[at] == keys[complete]], minlength=len(known))
    return {order: np.where(complete, counted[order][1][at], -1) for order, (complete, at) in found.items()}


def scores(model: GPT, tokens: Tensor, starts: Tensor, memory: Tensor | None, targets: Tensor, masks: tuple,
           rotary: Tensor, tied: bool) -> Tensor:
    """float32 [2, B * L]: each position's loss in nats, and 1 where the likeliest token is the target."""
    x = model.hidden(tokens, starts, memory, masks, rotary).flatten(0, 1)
    head, chunk, parts = (model.embed if tied else model.head).to(model.dtype), model.config.head_chunk_tokens, []
    for part, target in zip(x.split(chunk), targets.flatten().split(chunk)):
        logits = SOFTCAP * squashed_logits(part, head)
        losses = F.cross_entropy(logits, target, reduction="none", ignore_index=-1)
        parts.append(torch.stack((losses, logits.argmax(-1) == target)))
    return torch.cat(parts, dim=1)


@torch.no_grad()
def held_out(trainer: Trainer, step: int) -> list[str]:
    """Loss and accuracy on validation tokens with the table and off, in all and by count in training. A collective."""
    score, found = torch.compile(scores, dynamic=False) if trainer.flex else scores, []
    for tokens, starts, memory, targets in trainer.val_parts():
        both = [score(trainer.model, tokens, starts, read, targets, **trainer.stage_inputs(step, starts))
                for read in ((None,) if memory is None else (memory, torch.zeros_like(memory)))]
        rows = torch.cat((both[0], both[-1], torch.ones_like(both[0][:1]))).double()
        found.append(rows.mul_(targets.flatten() >= 0).cpu())
    found = torch.cat(found, dim=1)  # float64 [5, N]: loss and accuracy with the table, the same off, 1 for a target

    def summary(where: Tensor) -> tuple[int, str]:
        """How many of some positions there are on all ranks, and loss and accuracy over them."""
        sums = found[:, where].sum(1)
        dist.all_reduce(sums)
        loss, accuracy, loss_off, accuracy_off = (sums[:4] / sums[4].clamp(min=1)).tolist()
        off = ("", "") if trainer.table is None else (f" (off {loss_off:.5f})", f" (off {accuracy_off:.4f})")
        return int(sums[4]), f"{int(sums[4]):,} tokens, loss {loss:.5f}{off[0]}, accuracy {accuracy:.4f}{off[1]}"

    everywhere, batches = torch.ones_like(found[0], dtype=torch.bool), [batch for batch, _ in trainer.val]
    lines = [f"held out: {summary(everywhere)[1]}; by the n-gram's count in training:"]
    classes = getattr(trainer.table, "classes", None)
    for order, counts in training_counts(trainer.config, trainer.dataset, step, batches, classes).items():
        parts = {name: summary(torch.from_numpy((low <= counts) & (counts < high)))
                 for name, (low, high) in COUNTS.items()}
        lines += [f"  order {order}, {name}: {text}" for name, (count, text) in parts.items() if count]
    return lines


# ---- which checkpoint, and whose classes read it --------------------------------------------------------------------

def load_variant(path: Path | None) -> tuple[type, type, type]:
    """The classes that stand in for Config, GPT and NgramTable: those of a variant's script, or the trainer's."""
    if path is None:
        return Config, GPT, NgramTable
    if not path.is_file():
        raise UserError(f"--variant={path}: found no such file, expected the script that wrote the checkpoint")
    name = f"variant_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclass and inspect look for it
    spec.loader.exec_module(module)
    own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
    chosen = []
    for base in (Config, GPT, NgramTable):
        derived = [c for c in own if issubclass(c, base)]
        last = [c for c in derived if not any(c in other.__mro__[1:] for other in derived)]
        if len(last) > 1:
            raise UserError(f"--variant={path}: found {len(last)} classes that stand in for {base.__name__} "
                            f"({', '.join(c.__name__ for c in last)}), expected one at most")
        chosen += last or [base]
    return tuple(chosen)


def choose(argv: list[str]) -> tuple[Config, str, tuple]:
    """The checkpoint's configuration with the flags given, the prompt, and the classes. Raises UserError."""
    parser = argparse.ArgumentParser(prog="records/look.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder, or `latest` of --out; comes first")
    parser.add_argument("--prompt", default="", help="text that the sample continues (needs a tokenizer file)")
    parser.add_argument("--out", default=Config.out, help=f"where `latest` looks (default {Config.out})")
    parser.add_argument("--variant", type=Path, metavar="FILE.py", help="script of the variant that wrote it")
    args, flags = parser.parse_known_args(argv)
    if argv[0].startswith("-"):
        raise UserError(f"{argv[0]}: found a flag first, expected a checkpoint's folder or `latest`")
    classes, path = load_variant(args.variant), find_checkpoint(args.checkpoint, args.out)
    there, here = read_manifest(path)["variant"], list(variant_of(*classes))
    if there != here:
        raise UserError(f"{path}: found a checkpoint of {', '.join(there)}, expected one of "
                        f"{', '.join(here)}; name the script that wrote it with --variant")
    config = parse_args([*flags, f"--resume={path}"], classes[0])
    if args.prompt and not config.sample_tokens:
        config = replace(config, sample_tokens=Config.sample_tokens)
    if config.device == "cpu" and "--compile" not in flags:  # one evaluation is over before its graphs were made
        config = replace(config, compile=False)
    return config, args.prompt, classes


def open_tokenizer(config: Config, vocab_size: int, prompt: str):
    """The tokenizer if a sample is wanted, None where ids must do."""
    tokenizer = load_tokenizer(config.data, vocab_size) if config.sample_tokens else None
    if prompt and tokenizer is None:
        raise UserError(f"{config.data}: found no {TOKENIZER_FILE}, expected it beside the shards to encode --prompt")
    return tokenizer


def open_trainer(config: Config, world: World, classes: tuple) -> tuple[Trainer, int]:
    """A trainer as the checkpoint left it, after the checks of a resumed run, and its step. A collective."""
    dataset = together(world, lambda: open_dataset(config))
    plan = make_plan(config, world, dataset.vocab_size, dataset.train.num_tokens, classes[1])
    together(world, lambda: (check_fits(plan, world), check_tokens(config, dataset)))
    data = identify_data(config, dataset, world)
    manifest = together(world, lambda: open_checkpoint(config, data, world, list(variant_of(*classes))))
    trainer = Trainer(config, world, dataset, *classes[1:])
    return trainer, load_checkpoint(Path(config.resume), manifest, trainer, data).step


def main(argv: list[str] | None = None) -> float:
    """Print what there is to see. Returns the validation loss."""
    config, prompt, classes = choose(sys.argv[1:] if argv is None else argv)
    with join_world(config) as world:
        def show(*lines: str) -> None:
            if world.main:
                print(*lines, sep="\n", flush=True)

        if world.device.type == "cpu":
            keep_freed_memory()
        tokenizer = together(world, lambda: open_tokenizer(config, open_dataset(config).vocab_size, prompt))
        trainer, step = open_trainer(config, world, classes)
        val_loss = trainer.evaluate(step)
        show(config.resume, f"step:{step}/{config.steps} val_loss:{val_loss:.5f}")
        show(*held_out(trainer, step))
        if config.sample_tokens:
            ids = trainer.sample(step, config.sample_tokens, tokenizer.encode_ordinary(prompt) if prompt else [])
            text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
            show("sample:", *("  | " + line for line in text.splitlines()))
    return val_loss


if __name__ == "__main__":
    run_command(main)

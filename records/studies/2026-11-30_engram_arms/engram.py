"""A variant of the trainer with the parts of Engram (arXiv:2601.07372), each by a flag: several hashes an order, slices
instead of sums, a gate by context, chosen blocks, canonical token ids; and a second moment for each element of a row.

    python records/studies/2026-11-30_engram_arms/engram.py --ngram_heads=2 --help

Without a flag of its own it trains what train_gpt.py trains, bit for bit.
"""
from __future__ import annotations

import functools
import itertools
import math
import re
import sys
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import train_gpt
from train_gpt import ROW_MULTIPLIERS, SIGN_MULTIPLIERS, SIGN_POOL_SEED, Channel, RMSNorm, Rule, UserError, flag


@functools.cache
def channel_hash(order: int, head: int, heads: int, rows: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Modulus of a hash, for `rows` that are not reserved, and its multipliers of row and sign.

    The first head has the trainer's multipliers; one head alone has its modulus too, all rows; the k-th of several has
    the k-th largest prime that fits (1 where there is none).
    """
    primes = (n for n in range(rows, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    modulus = rows if heads == 1 else next(itertools.islice(primes, head, None), 1)
    if head == 0:
        return modulus, ROW_MULTIPLIERS[order], SIGN_MULTIPLIERS[order]
    generator = torch.Generator().manual_seed(SIGN_POOL_SEED + 1000 * order + head)
    drawn = torch.randint(1 << 15, (2, order), generator=generator) * 2 + 1  # odd and below 2^16, as the others
    return modulus, *(tuple(factors) for factors in drawn.tolist())


def canonical_ids(folder: str | Path, vocab_size: int) -> np.ndarray:
    """int64 [vocab_size]: for each token id the smallest whose text is the same but for case, accents and white space.

    NFKC, accents off, lower case, runs of white space to one blank, none of it at the ends (of white space alone one
    blank remains). A token that is no whole text, one that nothing is left of, and the document start stand alone. Of
    GPT-2's 50,257 tokens that makes 32,974 classes (published: 32,980).
    """
    tokenizer = train_gpt.load_tokenizer(folder, vocab_size)
    if tokenizer is None:
        raise UserError(f"{folder}: found no {train_gpt.TOKENIZER_FILE}, expected the one of the shards for "
                        f"--ngram_canonical; make the shards with data/text.py")
    first: dict[str, int] = {}
    ids = np.arange(vocab_size)
    for token in range(vocab_size - 1):
        with suppress(UnicodeDecodeError):
            text = unicodedata.normalize("NFKD", tokenizer.decode_single_token_bytes(token).decode())
            text = "".join(c for c in text if not unicodedata.combining(c)).lower()
            text = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text))
            text = text.strip() or text
            if text:
                ids[token] = first.setdefault(text, token)
    return ids


@dataclass(frozen=True)
class EngramConfig(train_gpt.Config):
    ngram_heads: int = flag(1, "hashes an order, each with rows and multipliers of its own, and a prime modulus where "
                               "there are several")
    ngram_canonical: bool = flag(False, "hash classes of tokens that differ in case, accents or white space alone")
    ngram_combine: str = flag("sum", "sum the rows of all hashes, or concat: each is a slice of ngram_dim")
    ngram_gate: str = flag("scale", "what a block takes in: scale, a trained number times the memory, or context, a "
                                    "gated projection of it")
    ngram_layers: tuple = flag((), "blocks, counted from 0, that take the memory in; empty: all")
    ngram_second_moment: str = flag("row", "second moment of the row-sparse Adam: one a row, or one an element")

    def check(self) -> None:
        self.need(self.ngram_heads >= 1, "ngram_heads", "at least 1")
        for name, values in {"ngram_combine": ("sum", "concat"), "ngram_gate": ("scale", "context"),
                             "ngram_second_moment": ("row", "element")}.items():
            self.need(getattr(self, name) in values, name, " or ".join(values))
        self.need(len(set(self.ngram_layers) & set(range(self.layers))) == len(self.ngram_layers), "ngram_layers",
                  f"blocks from 0 to {self.layers - 1}, each once")
        super().check()

    def check_table(self) -> None:
        super().check_table()
        slices = len(self.channels) if self.ngram_combine == "concat" else 1
        self.need(self.ngram_dim % slices == 0, "ngram_dim", f"a multiple of the {slices} slices (orders x heads)")

    @functools.cached_property
    def channels(self) -> tuple[Channel, ...]:
        """Orders first, then heads, each with an equal part of its order's rows."""
        heads, channels = self.ngram_heads, []
        for order, (first, last) in zip(self.ngram_orders, train_gpt.channel_bounds(self)):
            for head in range(heads):
                low, high = (first + (last - first) * i // heads for i in (head, head + 1))
                channels.append(Channel(order, low, high, *channel_hash(order, head, heads, high - low - 1)))
        return tuple(channels)

    @property
    def ngram_row_dim(self) -> int:
        return self.ngram_dim // len(self.channels) if self.ngram_combine == "concat" else self.ngram_dim

    @property
    def ngram_state_bytes(self) -> int:
        return 8 if self.ngram_second_moment == "row" else 4 + 4 * self.ngram_row_dim

    @property
    def memory_layers(self) -> tuple[int, ...]:
        return self.ngram_layers or tuple(range(self.layers))


class EngramGPT(train_gpt.GPT):
    rules = train_gpt.RULES | {"ngram_keys": Rule("muon"), "ngram_values": Rule("muon")}

    def __init__(self, config: EngramConfig, vocab_size: int):
        super().__init__(config, vocab_size)
        self.gated, blocks = config.ngram_rows > 0 and config.ngram_gate == "context", len(config.memory_layers)
        if config.ngram_rows:
            self.ngram_scales = nn.Parameter(torch.full((blocks,), 0.05))
        if self.gated:
            self.ngram_keys = nn.Parameter(torch.empty(blocks, config.model_dim, config.ngram_dim))
            self.ngram_values = nn.Parameter(torch.empty_like(self.ngram_keys))
            self.kept_widths += 5

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        bound = (3 / self.config.ngram_dim) ** 0.5
        for weight in (self.ngram_keys, self.ngram_values) if self.gated else ():
            weight.uniform_(-bound, bound, generator=generator)

    def pad_memory(self, memory: Tensor) -> Tensor:
        return memory if self.gated else super().pad_memory(memory)

    def add_memory(self, x: Tensor, memory: Tensor, i: int) -> Tensor:
        """scale: a trained number times the memory. context: the number times sigmoid(RMSNorm(x) . RMSNorm(W_K e) /
        sqrt(d)) W_V e, so that a row which does not fit where it is read stays out."""
        if i not in self.config.memory_layers:
            return x
        k = self.config.memory_layers.index(i)
        if not self.gated:
            return super().add_memory(x, memory, k)
        key, value = (F.linear(memory, weight[k].to(x.dtype)) for weight in (self.ngram_keys, self.ngram_values))
        fit = (RMSNorm.apply(x) * RMSNorm.apply(key)).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
        return x + self.ngram_scales[k].to(x.dtype) * torch.sigmoid(fit) * value

    def flops_per_token(self, windows: tuple[int, int]) -> int:
        return super().flops_per_token(windows) + (12 * self.ngram_keys.numel() if self.gated else 0)


class EngramTable(train_gpt.NgramTable):
    def __init__(self, config: EngramConfig, world: train_gpt.World):
        super().__init__(config, world)
        self.classes = None
        if config.ngram_canonical:
            self.classes = torch.from_numpy(canonical_ids(config.data, train_gpt.open_dataset(config).vocab_size))
        if config.ngram_second_moment == "element":
            self.second = train_gpt.zeros_where_touched(self.rows.shape, torch.float32, self.rows.device)

    def addresses(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows, signs = super().addresses(tokens if self.classes is None else self.classes[tokens], starts)
        if self.config.ngram_combine == "sum":
            return rows, signs
        return rows.mT.reshape(1, -1), signs.mT.reshape(1, -1)  # a position's slices behind each other: one channel

    def update_rows(self, ids: Tensor, grads: Tensor, update: int, lr: float) -> None:
        if self.config.ngram_second_moment == "row":
            return super().update_rows(ids, grads, update, lr)
        beta2, wd = self.config.ngram_beta2, self.config.ngram_wd
        for low in range(0, len(ids), self.block):
            at, grad = ids[low:low + self.block], grads[low:low + self.block]
            owed = torch.pow(beta2, (update - self.last.index_select(0, at)).double()).float()
            second = torch.addcmul(grad.square() * (1 - beta2), owed[:, None], self.second.index_select(0, at))
            rows = train_gpt.row_adam_update(self.rows.index_select(0, at).float(), grad, second, update, lr, beta2, wd)
            self.rows.index_copy_(0, at, rows.to(self.rows.dtype))
            self.second.index_copy_(0, at, second)
            self.last.index_fill_(0, at, update)


if __name__ == "__main__":
    train_gpt.run_command(train_gpt.main, config_class=EngramConfig, model_class=EngramGPT, table_class=EngramTable)

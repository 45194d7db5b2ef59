"""Tokens: shards on disk, one stream of rows, batches made ahead in a thread; the tokenizer beside the shards; what n-grams they hold.

`config` is train_gpt.py's Config and `world` harness.py's World, both handed in. The data scripts write what this reads.
"""
from __future__ import annotations

import base64
import hashlib
import math
import re
import unicodedata
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness import UserError


# =====================================================================================================================
# Shards on disk.
# =====================================================================================================================

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
GPT2_VOCAB_SIZE, GPT2_DOC_START = 50257, 50256


@dataclass(frozen=True)
class Shard:
    """One token file: 256 int32 of header (magic, version, tokens, vocabulary size, document-start token), then uint16."""
    path: Path
    num_tokens: int
    vocab_size: int
    doc_start: int

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """uint16 [count] from position `first`, to the end by default. Read, not mapped: memory must not grow with the data."""
        count = self.num_tokens - first if count is None else count
        tokens = np.fromfile(self.path, dtype=np.uint16, count=count, offset=SHARD_HEADER_BYTES + 2 * first)
        if len(tokens) != count:
            raise UserError(f"{self.path}: found {len(tokens)} tokens from {first} on, expected {count}; the file has changed")
        return tokens

    def check_ids(self) -> None:
        """Read the whole file once; raise UserError where an id is not below the vocabulary size."""
        for start in range(0, self.num_tokens, 1 << 24):
            largest = int(self.read(start, min(1 << 24, self.num_tokens - start)).max())
            if largest >= self.vocab_size:
                raise UserError(f"{self.path}: found token id {largest}, expected ids below its vocabulary size "
                                f"{self.vocab_size}; it was made with another tokenizer or is damaged: make it anew")


def open_shard(path: str | Path) -> Shard:
    """Read and check a shard's header and size. Raises UserError with path, found and expected."""
    path = Path(path)
    size = path.stat().st_size
    if size < SHARD_HEADER_BYTES:
        raise UserError(f"{path}: found {size} bytes, expected at least the {SHARD_HEADER_BYTES} of a shard header; "
                        f"delete it and fetch or make it again")
    header = np.fromfile(path, dtype=np.int32, count=256)
    if (header[0], header[1]) != (SHARD_MAGIC, SHARD_VERSION):
        raise UserError(f"{path}: found magic {header[0]} version {header[1]}, expected {SHARD_MAGIC} version "
                        f"{SHARD_VERSION}; this is not a token shard")
    num_tokens = int(header[2])
    if num_tokens <= 0 or size != SHARD_HEADER_BYTES + 2 * num_tokens:
        raise UserError(f"{path}: found {size} bytes, expected {SHARD_HEADER_BYTES + 2 * num_tokens} for the {num_tokens} "
                        f"tokens its header promises; it is cut short or damaged: fetch or make it again")
    vocab_size = int(header[3]) or GPT2_VOCAB_SIZE
    doc_start = int(header[4]) if header[3] else GPT2_DOC_START
    if not 0 <= doc_start < vocab_size <= 1 << 16:
        raise UserError(f"{path}: found vocabulary size {vocab_size} and document-start token {doc_start}, expected "
                        f"0 <= document start < vocabulary size <= 65536; the header is damaged: make it again")
    return Shard(path, num_tokens, vocab_size, doc_start)


def fingerprint(shard: Shard, more: str = "") -> str:
    """Of the shard's name, header and size, and of 64 spans of 1,024 tokens spread over it."""
    digest = hashlib.sha256(f"{shard.path.name} {shard.num_tokens} {shard.vocab_size} {shard.doc_start} {more}".encode())
    width = min(1024, shard.num_tokens)
    for i in range(64):
        digest.update(shard.read(i * (shard.num_tokens - width) // 63, width).tobytes())
    return digest.hexdigest()[:16]


# =====================================================================================================================
# One stream of rows, and the data set that a run reads.
# =====================================================================================================================

class TokenStream:
    """Shards one behind the other, cut into rows of seq_len inputs and the token behind each (targets).

    Row i of the stream is tokens [i * seq_len, (i + 1) * seq_len] of the data. With `spread` the rows come in golden-ratio
    order instead: any few consecutive ones lie evenly over the whole data, which stands in for a shuffle of long documents.
    """

    def __init__(self, shards: list[Shard], seq_len: int, spread: bool):
        self.shards, self.seq_len = shards, seq_len
        self.ends = np.cumsum([shard.num_tokens for shard in shards])
        self.num_tokens = int(self.ends[-1])
        self.num_rows = (self.num_tokens - 1) // seq_len  # the last input needs a target too
        self.stride = golden_stride(self.num_rows) if spread else 1

    def read(self, first: int, count: int) -> Tensor:
        """int64 [count, seq_len + 1]: rows first.. of the stream, which starts over at its end."""
        rows = np.empty((count, self.seq_len + 1), np.int64)  # uint16 has no modulo and no look-up in torch
        for i in range(count):
            row = (first + i) * self.stride % self.num_rows
            rows[i] = self.read_span(row * self.seq_len, self.seq_len + 1)
        return torch.from_numpy(rows)

    def read_span(self, first: int, count: int) -> np.ndarray:
        parts, index = [], int(np.searchsorted(self.ends, first, side="right"))
        while count > 0:
            shard = self.shards[index]
            offset = first - (int(self.ends[index]) - shard.num_tokens)
            part = shard.read(offset, min(count, shard.num_tokens - offset))
            parts.append(part)
            first, count, index = first + len(part), count - len(part), index + 1
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


def golden_stride(num_rows: int) -> int:
    """A stride near num_rows / golden ratio, without a common factor, whose multiples modulo num_rows lie the most evenly."""
    def largest_quotient(stride: int) -> int:  # of the continued fraction; the multiples bunch up where it is large
        a, b, largest = num_rows, stride, 1
        while b:
            largest, a, b = max(largest, a // b), b, a % b
        return largest

    golden = max(1, round(num_rows * (math.sqrt(5) - 1) / 2))
    near = [stride for stride in range(golden, golden + 200) if math.gcd(stride, num_rows) == 1]
    return min(near, key=largest_quotient)


@dataclass(frozen=True)
class Dataset:
    train: TokenStream
    val: TokenStream
    vocab_size: int
    doc_start: int
    canonical: Tensor | None  # int64 [vocab_size]: with --ngram_canonical, the class of each token

    def classes(self, tokens: Tensor) -> Tensor:
        """What the table hashes in place of the tokens."""
        return tokens if self.canonical is None else self.canonical[tokens]


def open_dataset(config) -> Dataset:
    """Find the shards and check their headers and sizes."""
    folder, found = Path(config.data).resolve(), {}
    for split in ("train", "val"):
        paths = sorted(folder.glob(f"*_{split}_*.bin"))
        if not paths:
            raise UserError(f"{folder}: found no *_{split}_*.bin, expected token shards; make them with `python data/text.py` "
                            f"(or `python data/fineweb.py` for the fineweb track), or name their folder with --data")
        found[split] = [open_shard(path) for path in paths]
    shards = found["train"] + found["val"]
    first = shards[0]
    for shard in shards:
        if (shard.vocab_size, shard.doc_start) != (first.vocab_size, first.doc_start):
            raise UserError(f"{shard.path}: found vocabulary size {shard.vocab_size} and document start {shard.doc_start}, "
                            f"expected {first.vocab_size} and {first.doc_start} as in {first.path}; keep one data set a folder")
    train = TokenStream(found["train"], config.seq_len, config.spread_rows)
    val = TokenStream(found["val"][:1], config.seq_len, config.spread_rows)  # by name: the first, however many were fetched
    canonical = torch.from_numpy(canonical_ids(config.data, first.vocab_size)) if config.ngram_canonical and config.ngram_rows else None
    return Dataset(train, val, first.vocab_size, first.doc_start, canonical)


def check_tokens(config, dataset, world) -> None:
    """Refuse a run for which there are too few tokens, or whose shards hold an id they must not; each rank reads its share."""
    train, val, needed = dataset.train, dataset.val, config.tokens_before(config.steps) + 1
    rows = config.tokens_before(config.steps) // config.seq_len
    if rows > train.num_rows * config.epochs and not config.eval_only:
        epochs = -(-rows // max(1, train.num_rows))
        again = f", or read them again with --epochs={epochs}" if train.num_rows else ""
        raise UserError(f"{config.data}: found {train.num_tokens:,} train tokens, expected {needed:,} for {config.steps} steps; "
                        f"fetch or make more (`python data/fineweb.py N`, `python data/text.py`), "
                        f"run fewer --steps{again}")
    if config.val_tokens > val.num_rows * config.seq_len:
        raise UserError(f"{val.shards[0].path}: found {val.num_tokens:,} validation tokens, expected "
                        f"{config.val_tokens + 1:,}; use --val_tokens={val.num_rows * config.seq_len} or make a larger validation shard")
    for shard in (train.shards + val.shards)[world.rank::world.size]:
        shard.check_ids()


def fingerprints(config, dataset) -> dict:
    """16 hex digits each for the first train shard, which tells data sets apart, for what validation reads, and for all train shards."""
    spread = config.seq_len if dataset.val.stride > 1 else 0  # spread rows are other tokens at another row length
    shards = [fingerprint(shard) for shard in dataset.train.shards]
    return {"train": shards[0], "val": fingerprint(dataset.val.shards[0], f"{config.val_tokens} {spread}"),
            "vocab_size": dataset.vocab_size, "shards": shards}


# =====================================================================================================================
# Batches: each rank's slice of a step, in micro-batches.
# =====================================================================================================================

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
    """rows int64 [n, seq_len + 1] -> Batch of ceil(count / micro_rows) micro-batches, the missing rows padded.

    A segment begins at each document start, at each row's first token, and every `length` tokens of the row; nothing of a segment
    depends on another.
    """
    micro_batches = -(-count // micro_rows)
    missing = micro_batches * micro_rows - len(rows)
    tokens = F.pad(rows[:, :-1], (0, 0, 0, missing), value=doc_start)
    targets = F.pad(rows[:, 1:], (0, 0, 0, missing), value=-1)
    starts = tokens == doc_start
    starts[:, ::length or starts.shape[1]] = True
    return Batch(*(t.reshape(micro_batches, micro_rows, -1) for t in (tokens, targets, starts)))


def rank_batch(stream: TokenStream, first_row: int, num_rows: int, micro_rows: int, doc_start: int, world,
               length: int | None = None) -> Batch:
    """This rank's slice of rows [first_row, first_row + num_rows) of the stream; all ranks get as many micro-batches."""
    first, last = world.share(num_rows)
    return make_batch(stream.read(first_row + first, last - first), -(-num_rows // world.size), micro_rows, doc_start, length)


def load_ahead(prepare, calls: range, ahead: int = 4):
    """Yield prepare(call) for each call, made in one background thread up to `ahead` calls before it is asked for.

    The training thread alone decides what is asked for, so all ranks ask for the same, the collectives inside `prepare` find
    their partners, and a stop that all ranks share leaves none of them waiting.
    """
    pool, pending = ThreadPoolExecutor(1, thread_name_prefix="loader"), deque()
    try:
        for call in (*calls, *[None] * ahead):
            if call is not None:
                pending.append(pool.submit(prepare, call))
            if pending and (call is None or len(pending) > ahead):
                yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# =====================================================================================================================
# Tokenizer: text to ids and back, for samples and for data/text.py. Training itself never needs it.
# =====================================================================================================================

TOKENIZER_FILE = "tokenizer.tiktoken"
# GPT-2's split into words, which BPE never merges across; one pattern serves every tokenizer that data/text.py writes.
TOKENIZER_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def tokenizer_encoding(tokens: list[bytes]):
    """tiktoken.Encoding in which a token's id is its place in the list, and the document start is the id behind them."""
    import tiktoken  # here, since training never needs it
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken.Encoding("shards", pat_str=TOKENIZER_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": len(tokens)})


def load_tokenizer(folder: str | Path):
    """The tiktoken.Encoding of the tokenizer file beside the shards, or None where there is none."""
    path = Path(folder) / TOKENIZER_FILE
    if not path.exists():
        return None
    try:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        ranks = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
        return tokenizer_encoding([ranks[i] for i in range(len(lines))])
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: found a damaged line ({error}), expected a token in base64 and its rank on each; make the "
                        f"shards again with `python data/text.py`") from None


def tokenizer_for_samples(config, vocab_size: int):
    """The tokenizer if the run will print text, None where ids must do. Raises UserError before a run that could not end well."""
    if not config.sample_tokens:
        return None
    tokenizer = load_tokenizer(config.data)
    if tokenizer is None and config.sample:
        raise UserError(f"{config.data}: found no {TOKENIZER_FILE}, expected it beside the shards to encode --sample")
    if tokenizer is not None and tokenizer.n_vocab != vocab_size:
        raise UserError(f"{config.data}/{TOKENIZER_FILE}: found {tokenizer.n_vocab} ids, expected the shards' "
                        f"{vocab_size}; make the shards again, or use --sample_tokens=0")
    return tokenizer


def canonical_ids(folder: str | Path, vocab_size: int) -> np.ndarray:
    """int64 [vocab_size]: for each token id the smallest id whose text is the same but for case, accents and white space.

    Engram's canonical ids (arXiv:2601.07372): NFKC, accents off, lower case, runs of white space to one blank, none of it at the ends
    (of white space alone one blank remains). A token that is no whole text, one that nothing is left of, and the document start stand
    alone. Of GPT-2's 50,257 tokens that makes 32,974 classes (published: 32,980). Raises UserError where no tokenizer lies beside the shards.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None or tokenizer.n_vocab != vocab_size:
        raise UserError(f"{folder}: found {'no' if tokenizer is None else 'another'} {TOKENIZER_FILE}, expected the one of the shards for "
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


# =====================================================================================================================
# N-grams of a text, and how they fill a table: to choose its size and the split between orders. Counts exactly, by sorting.
# =====================================================================================================================

def predecessors(segment_starts: Tensor) -> Tensor:
    """bool [T] -> int64 [T]: how many tokens of its segment stand before each position."""
    position = torch.arange(len(segment_starts), device=segment_starts.device)
    return position - torch.where(segment_starts, position, 0).cummax(0).values if len(position) else position


def sort_unique(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] below 2^31 -> (sorted unique ids, int64 [n] index of each id among them).

    One in-place sort of (id, position) packed in 64 bits: numpy sorts that several times faster than np.unique would.
    """
    packed = ids << 32 | np.arange(len(ids))
    packed.sort()
    order, ids = packed & 0xFFFFFFFF, packed >> 32
    first = np.ones(len(ids), bool)
    first[1:] = ids[1:] != ids[:-1]
    slots = np.empty(len(ids), np.int64)
    slots[order] = np.cumsum(first) - 1
    return ids[first], slots


REPORT_TOKENS = 1 << 23  # enough to see the trend, seconds to count


def ngram_keys(tokens: Tensor, starts: Tensor, order: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [..., L], starts bool -> the n-gram that ends at each position as an int64, and whether its segment holds all of it."""
    keys = sum(tokens.flatten().roll(back) << 16 * back for back in range(order))
    return keys.numpy(), (predecessors(starts.flatten()) >= order - 1).numpy()


TIMES_TRAINED = {"cut short by its segment's start": (-1, 0), "never met": (0, 1), "met once": (1, 2), "met 2 to 9 times": (2, 10),
                 "met 10 to 99 times": (10, 100), "met 100 times or more": (100, math.inf)}  # the classes that an evaluation tells apart


def times_trained(config, dataset: Dataset, step: int, batches: list[Batch]) -> dict[int, np.ndarray]:
    """order -> int64 [N], for all positions of the batches: how often the steps before `step` met the n-gram that ends there.

    -1 where its segment is too short for one. Tokens read again in a later epoch count once.
    """
    stream, found, counted = dataset.train, {}, {}
    for order in config.ngram_orders:
        keys, complete = (np.concatenate(parts) for parts in zip(*(ngram_keys(dataset.classes(b.tokens), b.starts, order) for b in batches)))
        known, at = np.unique(keys, return_inverse=True)
        found[order], counted[order] = (complete, at), (known, np.zeros(len(known), np.int64))
    for stage in config.stage_list:
        first, last = (min(config.tokens_before(min(at, step)) // config.seq_len, stream.num_rows) for at in (stage.first, stage.end))
        rows = max(1, (1 << 20) // config.seq_len)  # at once: memory must not grow with what was trained on
        for low in range(first, last, rows):
            count = min(rows, last - low)
            batch = make_batch(stream.read(low, count), count, count, dataset.doc_start, stage.length)
            for order, (known, times) in counted.items():
                keys, complete = ngram_keys(dataset.classes(batch.tokens), batch.starts, order)
                at = np.searchsorted(known, keys[complete]).clip(max=len(known) - 1)
                times += np.bincount(at[known[at] == keys[complete]], minlength=len(known))
    return {order: np.where(complete, counted[order][1][at], -1) for order, (complete, at) in found.items()}


def table_report(config, dataset: Dataset, world_size: int, addresses, channels: list[tuple]) -> list[str]:
    """Distinct n-grams, used rows and colliding reads of each order, and the rows' spread over owners, for the run's tokens.

    `addresses` and `channels` are train_gpt.py's ngram_addresses and channels(config).
    """
    stream = dataset.train
    count = min(config.tokens_before(config.steps) // config.seq_len, stream.num_rows, max(1, REPORT_TOKENS // config.seq_len))
    batch = make_batch(stream.read(0, count), count, count, dataset.doc_start)
    tokens = dataset.classes(batch.tokens.flatten())
    rows, _ = addresses(tokens, batch.starts.flatten(), config)
    lines = [f"table report over {len(tokens):,} of the run's {config.tokens_before(config.steps):,} tokens: "
             f"{config.ngram_rows:,} rows, {world_size} rank{'s' * (world_size > 1)}"]
    owner_ends = [(rank + 1) * config.ngram_rows // world_size for rank in range(world_size)]
    owner_rows = 0
    for (order, _, low, high, *_), row in zip(channels, rows):
        ngram, complete = ngram_keys(tokens, batch.starts, order)
        ngram = ngram[complete]
        used, slots = sort_unique(row.numpy()[complete])
        # An n-gram has one row, so counting n-grams at their first occurrence counts the different ones of each row.
        first = np.unique(ngram, return_index=True)[1]
        collides = (np.bincount(slots[first], minlength=len(used)) > 1)[slots]
        owner_rows += np.diff(np.searchsorted(used, owner_ends), prepend=0)
        share = collides.mean() if len(collides) else 0.0
        lines.append(f"  order {order}: {len(first):,} distinct n-grams in {len(ngram):,} reads; {len(used):,} of "
                     f"{high - low:,} rows used ({len(used) / (high - low):.1%}); {share:.1%} of reads share a row with another n-gram")
    low, high = owner_rows.min(), owner_rows.max()
    lines.append(f"  used rows by owner: {low:,} to {high:,} ({high / max(1, owner_rows.mean()):.2f} times the mean at most)")
    return lines

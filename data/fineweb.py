"""Fetch FineWeb's GPT-2 token shards, and check folders of shards.

    python data/fineweb.py [N] [--out DIR] [--tokenizer]  the first N training shards (default 5, of 103) and validation
    python data/fineweb.py verify DIR [DIR ...]           every *.bin in these folders, of any vocabulary

A shard holds 100 million tokens in 200 MB. What is there and whole stays; what is missing or broken is fetched,
checked, and only then given its final name, so running it again repairs. HF_ENDPOINT and HF_TOKEN are honoured.
`verify` reads every token, and names a file whose tokens are not those of its hash in shards.json, which was kept when
the shard came or when a run first read it.
"""
from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_gpt.py defines the shard format
from train_gpt import (GPT2_DOC_START, GPT2_VOCAB_SIZE, SHARD_HASHES, TOKENIZER_FILE, Shard, UserError, flush_to_disk,
                       lock_folder, open_shard, run_command, save_shard_hashes, shard_hashes, tokenizer_encoding,
                       written_whole)

REPO = "kjj0/fineweb10B-gpt2"
NUM_TRAIN_SHARDS = 103
PRESET_SHARDS = 5  # what the fineweb presets read: 419 million tokens


# ---- fetching -------------------------------------------------------------------------------------------------------

def shard_names(num_train: int) -> list[str]:
    """The validation shard's name and those of the first num_train training shards."""
    return ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, num_train + 1))]


def open_fineweb_shard(path: Path) -> Shard:
    """Check header and size, and that the vocabulary is GPT-2's. Raises UserError."""
    shard = open_shard(path)
    if (shard.vocab_size, shard.doc_start) != (GPT2_VOCAB_SIZE, GPT2_DOC_START):
        raise UserError(f"{path}: found vocabulary size {shard.vocab_size} and document start {shard.doc_start}, "
                        f"expected GPT-2's {GPT2_VOCAB_SIZE} and {GPT2_DOC_START}; fetch it again")
    return shard


def reason(error: Exception) -> str:
    """Why a shard is not there, with the address that was asked."""
    from huggingface_hub.errors import HfHubHTTPError
    cause = error if isinstance(error, HfHubHTTPError | UserError) else error.__cause__ or error
    if isinstance(cause, HfHubHTTPError):
        return f"the hub answered {cause.response.status_code} at {str(cause.response.url).partition('?')[0]}"
    asked = os.environ.get("HF_ENDPOINT") or "the hub's own address (HF_ENDPOINT names another)"
    first_line = (str(cause).strip() or "no details").splitlines()[0]
    return f"what came from {asked} is broken: {first_line}" if isinstance(cause, UserError) else \
        f"{type(cause).__name__} at {asked}: {first_line}"


def fetch_shard(name: str, out: Path, staging: Path) -> list:
    """Bring one shard into out, checked whole; returns its entry for the hashes.

    huggingface_hub resumes what broke off, and waits and tries again as the hub asks. What comes broken, from the hub
    or from the client's own cache, is fetched once more.
    """
    from huggingface_hub import hf_hub_download
    for is_last in (False, True):
        path = Path(hf_hub_download(REPO, name, repo_type="dataset", local_dir=staging, force_download=is_last,
                                    endpoint=os.environ.get("HF_ENDPOINT") or None))
        try:
            digest, status = open_fineweb_shard(path).hash(), path.stat()
        except UserError:
            path.unlink()       # or the next call would take it for whole
            if is_last:
                raise
            continue
        flush_to_disk(path)
        path.replace(out / name)
        return [status.st_size, status.st_mtime_ns, digest]


def in_threads(function: Callable, names: list[str], workers: int) -> Iterator[tuple[str, list | Exception]]:
    """(name, function(name) or what it raised) as they are ready. Daemon threads: Ctrl-C need not wait for 200 MB."""
    todo, done = queue.SimpleQueue(), queue.SimpleQueue()
    for name in [*names, *[None] * workers]:
        todo.put(name)

    def work() -> None:
        while name := todo.get():
            try:
                done.put((name, function(name)))
            except Exception as error:      # the other shards are fetched all the same
                done.put((name, error))

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    return (done.get() for _ in names)


def missing_shards(names: list[str], out: Path) -> list[str]:
    """The names that out lacks or holds broken; says which are broken."""
    missing = []
    for name in names:
        try:
            open_fineweb_shard(out / name)
        except FileNotFoundError:
            missing.append(name)
        except UserError as error:
            print(f"{error}; fetching it", file=sys.stderr)
            missing.append(name)
    return missing


def fetch_shards(num_train: int, out: Path, workers: int) -> None:
    """Bring the first num_train training shards and the validation shard into out. A UserError names the missing."""
    names, failed, hashes, staging = shard_names(num_train), {}, {}, out / ".fetch"
    with lock_folder(out, "fetching shards"):
        todo = missing_shards(names, out)
        print(f"{out}: {len(names) - len(todo)} of {len(names)} shards are there, {len(todo)} to fetch", flush=True)
        for name, result in in_threads(lambda name: fetch_shard(name, out, staging), todo, workers):
            if isinstance(result, Exception):
                failed[name] = reason(result)
                print(f"{name}: {failed[name]}", file=sys.stderr)
            else:
                hashes[name] = result
                print(f"{name}: fetched, {open_shard(out / name).num_tokens:,} tokens", flush=True)
        others = sorted(path for path in out.glob("*.bin") if path.name not in failed.keys() | hashes.keys())
        whole = [open_shard(path) for path in others]
        save_shard_hashes(out, hashes | (shard_hashes(whole) if whole else {}))
        if not failed:
            shutil.rmtree(staging, ignore_errors=True)      # else it holds what the next call resumes
    if failed:
        lines = "".join(f"\n  {name}: {failed[name]}" for name in todo if name in failed)
        raise UserError(f"{out}: {len(failed)} of {len(names)} shards are missing:{lines}\nRun the same command again "
                        f"to fetch these alone, or put them there by hand; they are in the Hugging Face dataset {REPO}")
    print(f"{out}: all {len(names)} shards are there")


# ---- verifying ------------------------------------------------------------------------------------------------------

def verify_folder(folder: Path) -> list[str]:
    """Check every *.bin in folder: header, size, ids, hash, one vocabulary for all, training and validation present.

    Prints a line a file and a summary. Returns the faults, each naming its file.
    """
    if not folder.is_dir():
        return [f"{folder}: found no such folder"]
    faults, first, kept = [], None, {}
    with suppress(OSError, ValueError):
        kept = json.loads((folder / SHARD_HASHES).read_text())
    tokens = {"_train_": 0, "_val_": 0}
    files = sorted(folder.glob("*.bin"))
    for file in files:
        try:
            shard = open_shard(file)
            digest = shard.hash()
            if file.name in kept and kept[file.name][2] != digest:
                raise UserError(f"{file}: found tokens of hash {digest[:16]}, expected {kept[file.name][2][:16]} as in "
                                f"{SHARD_HASHES}; fetch or make it again, or delete {SHARD_HASHES} if you replaced it")
            first = first or shard
            if (shard.vocab_size, shard.doc_start) != (first.vocab_size, first.doc_start):
                raise UserError(f"{file}: found vocabulary size {shard.vocab_size} and document start "
                                f"{shard.doc_start}, expected {first.vocab_size} and {first.doc_start} as in "
                                f"{first.path.name}; keep one tokenizer's shards in a folder")
        except (UserError, OSError) as error:
            faults.append(str(error))
            print(f"BAD {error}")
            continue
        for part in tokens:
            tokens[part] += shard.num_tokens if part in file.name else 0
        print(f"ok  {file}: {shard.num_tokens:,} tokens, vocabulary {shard.vocab_size:,}")
    num_bad = len(faults)
    faults += [f"{folder}: found no whole *{part}*.bin, expected one at least" for part, n in tokens.items() if n == 0]
    print(f"{folder}: {len(files)} shards, {num_bad} bad, {tokens['_train_']:,} tokens for training, "
          f"{tokens['_val_']:,} for validation")
    return faults


def verify(folders: list[Path]) -> None:
    """Check folders of shards; raise UserError that names every fault."""
    faults = [fault for folder in folders for fault in verify_folder(folder)]
    if faults:
        raise UserError(f"{len(faults)} faults:" + "".join(f"\n  {fault}" for fault in faults))


def write_tokenizer(path: Path) -> None:
    """GPT-2's tokens in tiktoken's file format. Raises UserError where tiktoken cannot get them."""
    from text import gpt2_tokens, tokenizer_text  # data/text.py; the shards need none of it
    content = tokenizer_text(tokenizer_encoding(gpt2_tokens()))
    with written_whole(path) as part:
        part.write_bytes(content)
    print(f"{path}: written")


# ---- command line ---------------------------------------------------------------------------------------------------

def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="data/fineweb.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    if argv[:1] == ["verify"]:
        parser.add_argument("verify", choices=["verify"])
        parser.add_argument("folders", metavar="DIR", nargs="+", type=Path)
        return parser.parse_args(argv)
    parser.add_argument("num_train", metavar="N", nargs="?", type=int, default=PRESET_SHARDS,
                        help=f"training shards; default: {PRESET_SHARDS}, as the presets read")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="folder for the shards; default: data/fineweb10B")
    parser.add_argument("--workers", type=int, default=4, help="downloads at a time; more brings 429s; default: 4")
    parser.add_argument("--tokenizer", action="store_true", help="put GPT-2's vocabulary beside the shards too, for "
                        "samples of text")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    if "folders" in args:
        verify(args.folders)
        return
    if not 1 <= args.num_train <= NUM_TRAIN_SHARDS:
        raise UserError(f"N={args.num_train}: expected 1 to {NUM_TRAIN_SHARDS}, the training shards of {REPO}")
    if args.workers < 1:
        raise UserError(f"--workers={args.workers}: expected 1 or more")
    # Read when huggingface_hub is imported; Xet would keep chunks in a cache of its own.
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    fetch_shards(args.num_train, args.out, args.workers)
    if args.tokenizer:
        write_tokenizer(args.out / TOKENIZER_FILE)


if __name__ == "__main__":
    run_command(main)

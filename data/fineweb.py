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
import errno
import json
import os
import queue
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_gpt.py defines the shard format
from train_gpt import (GPT2_DOC_START, GPT2_VOCAB_SIZE, SHARD_HASHES, TOKENIZER_FILE, Shard, UserError, flush_to_disk,
                       lock_folder, open_shard, run_command, save_shard_hashes, shard_hashes, tokenizer_encoding,
                       written_whole)

REPO = "kjj0/fineweb10B-gpt2"
NUM_TRAIN_SHARDS = 103
PRESET_SHARDS = 5  # what the fineweb presets read: 419 million tokens
MAX_BACKOFF_S = 60.0
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


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


def backoff_s(tries_so_far: int, base_s: float, retry_after_s: float) -> float:
    """Seconds to wait: base_s doubled with every try, up to MAX_BACKOFF_S, times 0.5 to 1.5 so that workers spread out.

    Never less than retry_after_s, what the server asked for.
    """
    return max(retry_after_s, min(MAX_BACKOFF_S, base_s * 2.0 ** (tries_so_far - 1)) * random.uniform(0.5, 1.5))


@dataclass(frozen=True)
class Failure:
    """Why a try at fetching failed, and whether another can help."""
    reason: str
    is_final: bool
    hub_answered: bool
    retry_after_s: float = 0.0


def diagnose(error: Exception) -> Failure:
    """Read an exception of huggingface_hub or of the checks that follow it."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    # huggingface_hub wraps what went wrong before a forced download began, and raises as it is what went wrong in it.
    began = not (isinstance(error, ValueError) and isinstance(error.__cause__, Exception))
    if not began:
        error = error.__cause__
    first_line = (str(error).strip() or "no details").splitlines()[0]
    if isinstance(error, UserError):
        return Failure(f"what the hub sent is broken: {first_line}", is_final=False, hub_answered=True)
    if isinstance(error, HfHubHTTPError):
        status, headers = error.response.status_code, error.response.headers
        if status == 404:
            return Failure(f"the hub has no such file (404) in dataset {REPO}", is_final=True, hub_answered=True)
        retry_after = headers.get("Retry-After", "")
        return Failure(f"the hub answered {status} at {str(error.response.url).partition('?')[0]}", is_final=status < 500 and status not in (408, 429),
                       hub_answered=True, retry_after_s=float(retry_after) if retry_after.isdigit() else 0.0)
    is_final = isinstance(error, OfflineModeIsEnabled) or getattr(error, "errno", None) in DISK_FAULTS
    asked = os.environ.get("HF_ENDPOINT") or "the hub's own address (HF_ENDPOINT names another)"
    return Failure(f"{type(error).__name__} at {asked}: {first_line}", is_final, hub_answered=began)


@dataclass
class Fetcher:
    """Fetches shards into `out` through the folder `staging` on the same disk. `stop` ends it between tries; `hashes`
    are those of shard_hashes of what has come."""
    out: Path
    staging: Path
    max_tries: int
    base_s: float
    stop: threading.Event = field(default_factory=threading.Event)
    hub_answered: threading.Event = field(default_factory=threading.Event)
    hashes: dict[str, list] = field(default_factory=dict)

    def fetch(self, name: str) -> str | None:
        """Fetch one shard, with retries. Returns None, or the reason why it is not there."""
        for tries in range(1, self.max_tries + 1):
            if self.stop.is_set():
                return "given up, as the hub could not be reached"
            try:
                self._download(name)
                return None
            except Exception as error:      # whatever it was, the other shards go on and this one is named at the end
                failure = diagnose(error)
            if failure.hub_answered:
                self.hub_answered.set()
            if failure.is_final or tries == self.max_tries:
                break
            wait_s = backoff_s(tries, self.base_s, failure.retry_after_s)
            sys.stderr.write(f"{name}: {failure.reason}; next try in {wait_s:.1f} s "     # one write: threads share it
                             f"({tries} of {self.max_tries} failed)\n")
            self.stop.wait(wait_s)
        if not self.hub_answered.is_set():
            self.stop.set()     # nobody has reached the hub: spare the user the same wait for every other shard
        return failure.reason

    def _download(self, name: str) -> None:
        from huggingface_hub import hf_hub_download
        # Forced, and into a folder of our own: neither reads nor leaves a copy in the hub's cache, broken or not.
        path = Path(hf_hub_download(REPO, name, repo_type="dataset", local_dir=self.staging, force_download=True,
                                    endpoint=os.environ.get("HF_ENDPOINT") or None))
        self.hub_answered.set()
        digest, status = open_fineweb_shard(path).hash(), path.stat()
        flush_to_disk(path)
        path.replace(self.out / name)
        self.hashes[name] = [status.st_size, status.st_mtime_ns, digest]


def each_in_threads(function: Callable[[str], str | None], names: list[str], num_workers: int
                    ) -> Iterator[tuple[str, str | None]]:
    """(name, function(name)) as they are ready. Daemon threads, so that Ctrl-C need not wait for 200 MB to arrive."""
    todo, done = queue.SimpleQueue(), queue.SimpleQueue()
    for name in names:
        todo.put(name)

    def work() -> None:
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            done.put((name, function(name)))

    for _ in range(num_workers):
        threading.Thread(target=work, daemon=True).start()
    for _ in names:
        yield done.get()


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """An empty folder inside out, gone afterwards. Raises UserError where another run is fetching into out."""
    staging = out / ".fetch"
    with lock_folder(out, "fetching shards"):
        try:
            shutil.rmtree(staging, ignore_errors=True)      # a killed run's
            staging.mkdir(exist_ok=True)
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


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


def fetch_shards(num_train: int, out: Path, num_workers: int, max_tries: int, base_s: float) -> None:
    """Bring the first num_train training shards and the validation shard into out. A UserError names the missing."""
    names = shard_names(num_train)
    with staging_folder(out) as staging:
        todo = missing_shards(names, out)
        print(f"{out}: {len(names) - len(todo)} of {len(names)} shards are there, {len(todo)} to fetch")
        fetcher = Fetcher(out, staging, max_tries, base_s)
        reasons = {}
        try:
            for name, reason in each_in_threads(fetcher.fetch, todo, num_workers):
                if reason is None:
                    print(f"{name}: fetched, {open_shard(out / name).num_tokens:,} tokens", flush=True)
                else:
                    reasons[name] = reason
        finally:
            fetcher.stop.set()
        whole = [open_shard(path) for path in sorted(out.glob("*.bin")) if path.name not in {*reasons, *fetcher.hashes}]
        save_shard_hashes(out, fetcher.hashes | (shard_hashes(whole) if whole else {}))
    if reasons:
        lines = "".join(f"\n  {name}: {reasons[name]}" for name in todo if name in reasons)
        raise UserError(f"{out}: {len(reasons)} of {len(names)} shards are missing:{lines}\nRun the same command again "
                        f"to fetch these alone, or put them into that folder by hand; they are in the Hugging Face "
                        f"dataset {REPO}.")
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
    parser.add_argument("--tries", type=int, default=6, help="at each shard; default: 6")
    parser.add_argument("--backoff_s", type=float, default=1.0, help="wait after the first failure, doubled with each "
                        "further one; default: 1")
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
    for flag, least in (("workers", 1), ("tries", 1), ("backoff_s", 0)):
        if not (value := getattr(args, flag)) >= least:
            raise UserError(f"--{flag}={value}: expected {least} or more")
    # Read when huggingface_hub is imported. Xet would keep chunks in a cache of its own and answer to no retry of ours.
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    fetch_shards(args.num_train, args.out, args.workers, args.tries, args.backoff_s)
    if args.tokenizer:
        write_tokenizer(args.out / TOKENIZER_FILE)


if __name__ == "__main__":
    run_command(main)

"""Read training logs: this trainer's, and every form the speedrun's history has kept.

`read_log(path)` returns the runs of one file. It holds one file's bytes at a time and keeps of them only the
evaluations, so memory does not grow with the size of the logs. Forms it knows:

    run:{json}                                         the header of this trainer's logs
    step:N/TOTAL val_loss:X train_time:T(ms|s) ...     one evaluation; N updates are done
    step:N/TOTAL [train_loss:X] train_time:T ...       progress
    s:N tel:X  /  s:N trl:X ...                        the same two in logs of 2024, without times
    error: text                                        in a failed run

A log may begin with the trainer's whole source, whose lines can look like results, set apart by lines of 100 `=`.
"""
from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = 1
UNKNOWN = "unknown"
CLOCK_ALL, CLOCK_RESTART = "all steps", "from step 10"

_LINE = rb"^(?:step:(\d{1,15})(?:/(\d{1,15}))?|s:(\d{1,15})) ([^\r\n]*)"     # step, TOTAL, step of an s: line, the rest
_RESULT = re.compile(_LINE, re.M)
_OWN = re.compile(_LINE + rb"|^(run:\{[^\r\n]*)|^(error: ?[^\r\n]*)|^(final step:)", re.M)
_VAL = re.compile(rb"(?:^|(?<=\s))(?:val_loss|tel):(\S+)")
_TIME = re.compile(rb"(?:^|(?<=\s))train_time:(\d+(?:\.\d+)?)(ms|s)(?!\S)")
_AVG = re.compile(rb"(?:^|(?<=\s))step_avg:(\d+(?:\.\d+)?)ms(?!\S)")
_BAD_LOSS = re.compile(rb"(?:train_loss|val_loss|tel|trl):[+-]?(?:nan|inf)", re.I)
_PYTHON = re.compile(rb"^(?:import \w|from \S+ import |def \w|class \w|if __name__|@\w|\"\"\"|''')", re.M)
_ENVIRONMENT = re.compile(rb"^(?:Running py|\+-{20}|nvidia-smi)", re.M | re.I)
_TORCH = re.compile(rb"^Running pytorch (\S+)", re.M | re.I)
_DEVICE_AND_WORLD = re.compile(rb"^Running pytorch .* on (\S.*?) with world_size (\d+)", re.M | re.I)
_SMI_DEVICE = re.compile(rb"^\|\s+\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s+\|", re.M)


class LogError(Exception):
    """A file that holds no run; the message says what was found instead."""


@dataclass(slots=True)
class Run:
    """One run. `steps`, `losses` and `times_ms` have one entry an evaluation; a time that the log lacks is nan."""
    path: Path
    index: int = 0                      # its place in its file, from 0
    header: dict = field(default_factory=dict)   # the run: line; empty in logs of other trainers
    torch: str = UNKNOWN
    device: str = UNKNOWN
    world_size: str = UNKNOWN
    clock: str = UNKNOWN
    total: int | None = None            # the TOTAL of step:N/TOTAL
    last_step: int = 0                  # of any line, evaluation or not
    steps: array = field(default_factory=lambda: array("q"))
    losses: array = field(default_factory=lambda: array("d"))
    times_ms: array = field(default_factory=lambda: array("d"))
    failure: str | None = None          # why the run does not count, or None
    repeated_step: int | None = None    # a step evaluated more than once; its last evaluation counts
    several_in_file: bool = False
    resumed_from: str | None = None     # the run that it resumed, where that one's log is not among those read

    @property
    def name(self) -> str:
        return f"{self.path.name}#{self.index + 1}" if self.several_in_file else self.path.name

    @property
    def config(self) -> dict:
        return self.header.get("config") or {}

    @property
    def sources(self) -> dict[str, str]:
        """{source file: sha256}; logs of one-file trainers name only that one, other trainers' none."""
        digest = self.header.get("source_sha256")
        return self.header.get("sources") or ({"train_gpt.py": digest} if digest else {})

    @property
    def resumed(self) -> dict | None:
        """{"run_ids": [its predecessors], "step"} of a run that resumed a checkpoint."""
        found = self.header.get("resumed")
        return found if found and found.get("run_ids") and isinstance(found.get("step"), int) else None

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def final_loss(self) -> float:
        return self.losses[-1]

    @property
    def final_step(self) -> int:
        return self.steps[-1]

    @property
    def train_time_ms(self) -> float:
        return self.times_ms[-1]

    @property
    def ended_early(self) -> bool:
        return self.total is not None and len(self.steps) > 0 and self.final_step < self.total

    @property
    def target_loss(self) -> float | None:
        return self.header.get("target_loss")

    @property
    def data(self) -> str:
        """Fingerprints of the training and validation data and the vocabulary size, joined by '/'."""
        data = self.header.get("data")
        if not data:
            return UNKNOWN
        return "/".join(str(data.get(key, "?")) for key in ("train", "val")) + f"/{data.get('vocab_size', '?')}"

    def comparable(self) -> dict[str, str]:
        """What must agree before two runs may be pooled or ranked together. 'unknown' is a value like any other."""
        target = UNKNOWN if self.target_loss is None else f"{self.target_loss:g}"
        return {"data": self.data, "target": target, "world_size": self.world_size, "device": self.device,
                "torch": self.torch, "clock": self.clock}

    def first_met(self, target: float) -> tuple[int, float] | None:
        """(step, train_time_ms) of the first evaluation after step 0 at or below `target`, or None."""
        for step, loss, time_ms in zip(self.steps, self.losses, self.times_ms):
            if step > 0 and loss <= target:
                return step, time_ms
        return None

    def curve_digest(self) -> bytes:
        """Equal for the same run read from two files."""
        parts = (self.steps.tobytes(), self.losses.tobytes(), self.times_ms.tobytes(), str(self.total).encode())
        return hashlib.blake2b(b"|".join(parts), digest_size=16).digest()


# ---- one file -------------------------------------------------------------------------------------------------------

def read_log(path: str | Path) -> list[Run]:
    """All runs of the file, failed ones too. Raises LogError where there is none, OSError where it cannot be read."""
    path = Path(path)
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if b"\0" in data[:4096]:
        raise LogError("not a text file")
    if b"\r\n" in data:
        data = data.replace(b"\r\n", b"\n")
    cut_at = len(data) if data.endswith(b"\n") else data.rfind(b"\n") + 1     # where a last line without newline begins
    reader = _Reader(path, cut_at)
    own_start = 0 if data.startswith(b"run:{") else data.find(b"\nrun:{") + 1
    has_header = data.startswith(b"run:{") or own_start > 0
    for start, end in _log_spans(data[:own_start] if has_header else data):
        reader.read_foreign(data, start, end)
    if has_header:
        reader.read_own(data, own_start)
    reader.note_cut_step(data)
    runs = reader.finish()
    if not runs:
        raise LogError("no run in it: no line begins with step: or s: outside its source" if data.strip() else "empty")
    return runs


def _separators(data: bytes) -> list[tuple[int, int]]:
    """(start, end) of every line that is 100 `=` or thereabouts and nothing else."""
    found, bar, at = [], b"=" * 80, data.find(b"=" * 80)
    while at >= 0:
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        if (at == 0 or data[at - 1:at] == b"\n") and not data[at:end].strip(b"= "):
            found.append((at, end))
        at = data.find(bar, end)
    return found


def _log_spans(data: bytes) -> list[tuple[int, int]]:
    """The parts of a file that are log and not source, as (start, end).

    The source stands before the first separator, or between the first two where the file begins with one. Later blocks
    are log, up to where one that another separator follows turns into Python: files that were joined. The last block,
    or a file without separators, is log from the end of the Python that it may begin with.
    """
    start, spans, before_first = 0, [], True
    for sep_start, sep_end in _separators(data):
        if data[start:sep_start].strip():
            spans.append((start, _source_start(data, start, sep_start, before_first)))
            before_first = False
        start = sep_end
    return [*spans, (_source_end(data, start), len(data))]


def _source_start(data: bytes, start: int, end: int, is_first: bool) -> int:
    """Where in a block that a separator follows the source begins (`end` if it holds none)."""
    python = _PYTHON.search(data, start, end)
    if not is_first:
        return python.start() if python else end
    first_line = data[start:end].lstrip()[:80]
    if _RESULT.match(first_line):
        return python.start() if python else end
    if not python and _ENVIRONMENT.search(data, start, end):
        return end
    return start


def _source_end(data: bytes, start: int) -> int:
    """Where the log begins in a block that no separator follows: at once, or after the last line of its Python."""
    python, result = _PYTHON.search(data, start), _RESULT.search(data, start)
    if not python or (result and result.start() < python.start()):
        return start
    end = max(match.end() for match in _PYTHON.finditer(data, start))
    if data.count(b'"""', start, end) % 2:         # that line opens a string: the source ends with it
        closing = data.find(b'"""', end)
        return len(data) if closing < 0 else closing + 3
    return end


class _Reader:
    """Collects the runs of one file, line by line. One run ends where the step falls, the total changes, or at run:."""

    def __init__(self, path: Path, cut_at: int):
        self.path, self.cut_at = path, cut_at
        self.cut = False                     # whether the last line is a result that was cut
        self.runs: list[Run] = []
        self.run: Run | None = None
        self.environment: list[bytes] = []   # the text since the last result
        self.last_val_line = b""

    def read_foreign(self, data: bytes, start: int, end: int) -> None:
        text_start = start
        for match in _RESULT.finditer(data, start, end):
            if self._is_new_run(match):
                self.environment.append(data[text_start:match.start()])
                self._begin_foreign()
            self._result(match)
            text_start = match.end()
        self.environment = [data[text_start:end]] if text_start > start else [*self.environment, data[start:end]]

    def read_own(self, data: bytes, start: int) -> None:
        finished = False     # what follows the final line may be a sample of text and look like anything
        for match in _OWN.finditer(data, start):
            if match[5]:
                self._begin_own(match[5])
                finished = False
            elif match[6]:
                if not finished:
                    self.run.failure = self.run.failure or match[6].decode(errors="replace").strip()[:200]
            elif match[7]:
                finished = True
            elif not finished and match[4] is not None:
                if self._is_new_run(match):
                    self._begin(header=self.run.header)
                self._result(match)

    def note_cut_step(self, data: bytes) -> None:
        """A last line cut before its first value ('step:12', 'ste') matches no form, but shows a killed run."""
        tail = data[self.cut_at:]
        if tail and not _RESULT.match(tail) and (tail.startswith((b"step:", b"s:")) or b"step:".startswith(tail)):
            self.cut = True

    def finish(self) -> list[Run]:
        if self.run is not None and self.cut and (self.run.total is None or self.run.ended_early or not self.run.steps):
            self.run.failure = self.run.failure or f"cut mid-line after step {self.run.last_step}"
        for run in self.runs:
            run.several_in_file = len(self.runs) > 1
            run.failure = run.failure or _why_failed(run)
        return self.runs

    def _is_new_run(self, match: re.Match) -> bool:
        step, total = int(match[1] or match[3]), int(match[2]) if match[2] else None
        return self.run is None or (len(self.run.steps) + self.run.last_step > 0
                                    and (step < self.run.last_step or total != self.run.total))

    def _begin(self, **fields) -> None:
        self.run = Run(self.path, len(self.runs), **fields)
        self.runs.append(self.run)
        if self.run.header:
            _fill_from_header(self.run)

    def _begin_own(self, line: bytes) -> None:
        try:
            header = json.loads(line[4:])
            problem = _header_problem(header)
        except ValueError:
            header, problem = {}, "its run: line is cut or is not JSON"
        self._begin(header={} if problem else header)
        self.run.failure = problem

    def _begin_foreign(self) -> None:
        text = b"\n".join(self.environment)
        self.environment = []
        before = self.run
        self._begin()
        if before is not None and not _ENVIRONMENT.search(text):     # a later run of the same file
            self.run.torch, self.run.device, self.run.world_size = before.torch, before.device, before.world_size
            return
        if torch := _TORCH.search(text):
            self.run.torch = torch[1].decode(errors="replace")
        devices = [name.decode(errors="replace") for name in _SMI_DEVICE.findall(text)]
        if both := _DEVICE_AND_WORLD.search(text):
            self.run.device, self.run.world_size = both[1].decode(errors="replace"), both[2].decode()
        elif devices:
            self.run.device, self.run.world_size = " + ".join(sorted(set(devices))), str(len(devices))

    def _result(self, match: re.Match) -> None:
        """Take in one step: or s: line."""
        run, rest = self.run, match[4]
        step, total = int(match[1] or match[3]), int(match[2]) if match[2] else None
        is_val = b"val_loss:" in rest or b"tel:" in rest
        if match.start() >= self.cut_at and not self._is_whole(rest, is_val):
            self.cut, rest = True, rest.rpartition(b" ")[0]
            is_val = bool(_VAL.search(rest) and _TIME.search(rest))
        run.total, run.last_step = total, step
        if (b"nan" in rest or b"inf" in rest or b"NaN" in rest) and _BAD_LOSS.search(rest):
            run.failure = run.failure or f"loss not finite at step {step}"
        if run.clock == UNKNOWN and step > 10:
            run.clock = _clock_rule(step, rest)
        if is_val and (val := _VAL.search(rest)):
            self.last_val_line = rest
            _add_evaluation(run, step, val[1], _TIME.search(rest))

    def _is_whole(self, rest: bytes, is_val: bool) -> bool:
        """Whether a last line without newline ends as the evaluation before it does, or, as the first, with a unit."""
        if not is_val or not rest.strip():
            return False
        if not self.last_val_line:
            return re.search(rb"\d(?:ms|s)$", rest) is not None
        return _last_token_shape(rest) == _last_token_shape(self.last_val_line)


def _last_token_shape(line: bytes) -> tuple[bytes, int]:
    """(key, characters behind the decimal point, unit included) of a line's last key:value."""
    key, _, value = line.split()[-1].partition(b":")
    digits_and_unit = value.partition(b".")[2] if b"." in value else value.lstrip(b"0123456789")
    return key, len(digits_and_unit)


def _header_problem(header: object) -> str | None:
    """What is wrong with a run: line's JSON, or None."""
    if not isinstance(header, dict):
        return "its run: line is not a JSON object"
    if header.get("format", FORMAT) != FORMAT:
        return f"its run: line has format {header['format']!r}, expected {FORMAT}: read it with a newer compare.py"
    kinds = {"config": dict, "data": dict, "target_loss": int | float, "run_id": str, "date": str, "source_sha256": str,
             "sources": dict, "resumed": dict}
    for key, kind in kinds.items():
        if not isinstance(header.get(key), kind | None):
            return f"its run: line has {key} {header[key]!r:.40}, which is not of its type"
    return None


def _add_evaluation(run: Run, step: int, value: bytes, time: re.Match | None) -> None:
    try:
        loss = float(value)
    except ValueError:
        loss = math.nan
    if not math.isfinite(loss):
        found = value.decode(errors="replace")[:20]
        run.failure = run.failure or f"val_loss:{found} at step {step}"
    time_ms = float(time[1]) * (1.0 if time[2] == b"ms" else 1000.0) if time else math.nan
    if len(run.steps) and run.steps[-1] == step:
        run.repeated_step = step
        run.losses[-1], run.times_ms[-1] = loss, time_ms
        return
    run.steps.append(step)
    run.losses.append(loss)
    run.times_ms.append(time_ms)


def _clock_rule(step: int, rest: bytes) -> str:
    """Which steps the clock counts, from the first line past step 10: train_time / step_avg is their number."""
    time, average = _TIME.search(rest), _AVG.search(rest)
    if not time or not average or not float(average[1]):
        return UNKNOWN
    counted = float(time[1]) * (1.0 if time[2] == b"ms" else 1000.0) / float(average[1])
    if abs(counted - step) < 2.5:
        return CLOCK_ALL
    return CLOCK_RESTART if abs(counted - (step - 10)) < 2.5 else UNKNOWN


def _fill_from_header(run: Run) -> None:
    header = run.header
    run.torch, run.clock = str(header.get("torch", UNKNOWN)), str(header.get("clock", UNKNOWN))
    run.world_size, run.device = str(header.get("world_size", UNKNOWN)), str(header.get("device_name", UNKNOWN))
    if run.device == "cpu":      # "cpu" alone would pool machines that differ tenfold
        run.device = f"{header.get('cpu_name') or 'cpu'}, {header.get('cpu_threads', '?')} threads"


def _why_failed(run: Run) -> str | None:
    """Why a run does not count. Other trainers' logs may end before TOTAL: a choice, which is shown, not a failure."""
    of_total = f" of {run.total}" if run.total is not None else ""
    if not run.steps or (run.final_step == 0 and run.total != 0):
        return f"no evaluation after step 0 (stopped at step {run.last_step}{of_total})"
    if run.last_step > run.final_step:
        return f"no final evaluation: stopped at step {run.last_step}{of_total}, last evaluated at {run.final_step}"
    if run.header and run.ended_early:
        return f"stopped at step {run.last_step}{of_total}"
    return None

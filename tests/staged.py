"""A variant with all that the cpu track has no flag for: two stages, skips, and a momentum that falls at the end."""
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt


@dataclass(frozen=True)
class Staged(train_gpt.Config):
    stages: tuple = (dict(until=1 / 3, batch=1 / 2, windows=(8, 16), lr=0.7), dict(windows=(16, 32)))
    skips: bool = True
    muon_momentum_cooldown: int = 5


if __name__ == "__main__":
    train_gpt.run_command(train_gpt.main, config_class=Staged)

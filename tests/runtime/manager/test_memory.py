"""How a manager's process looks after its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROUNDS = 20
BUFFERS = 8
BUFFER_BYTES = 1_000_000
PAGES_A_ROUND = BUFFERS * BUFFER_BYTES // 4096

COMMITS = f"""
import resource
from outfitter_service import memory

memory.tune()

def commit():
    return [b"x" * {BUFFER_BYTES} for _ in range({BUFFERS})]

commit()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    commit()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

SERVE = """
import anyio, gc, sys
from outfitter_service import cli, memory

anyio.run = lambda *_, **__: print(gc.get_threshold() == memory.GC_THRESHOLDS, gc.get_freeze_count() > 0)
cli.main(["serve", "--config", sys.argv[1], "--host", "h"])
"""


def test_the_buffers_of_one_commit_serve_the_next_instead_of_going_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", COMMITS], capture_output=True, check=True, text=True)
    assert int(done.stdout) < PAGES_A_ROUND  # each round costs so many page faults where nothing is kept


def test_what_was_loaded_before_is_not_searched_for_garbage() -> None:
    program = "import gc\nfrom outfitter_service import memory\nmemory.tune()\nprint(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert int(done.stdout) > 1000


def test_serve_looks_after_its_memory_before_it_begins(tmp_path: Path) -> None:
    config = tmp_path / "outfitter.toml"
    config.write_text(f'bus = "sqlite://{tmp_path}/bus.db"\nexternal-resources = []\n')
    done = subprocess.run([sys.executable, "-c", SERVE, str(config)], capture_output=True, check=True, text=True)
    assert done.stdout == "True True\n"

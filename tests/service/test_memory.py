"""How a manager's process looks after its memory."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_buffers_of_one_commit_serve_the_next_instead_of_going_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", COMMITS], capture_output=True, check=True, text=True)
    assert int(done.stdout) < PAGES_A_ROUND  # each round costs so many page faults where nothing is kept


def test_what_was_loaded_before_is_not_searched_for_garbage() -> None:
    program = "import gc\nfrom outfitter_service import memory\nmemory.tune()\nprint(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert int(done.stdout) > 1000

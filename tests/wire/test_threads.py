"""Threads of one process whose first messages come at the same moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "v0.1"

FIRST_MESSAGES = """
import sys, threading
from pathlib import Path

sys.setswitchinterval(1e-6)
golden = Path(sys.argv[1])
unknown = b'{"type":"register","host":"h","worker":"w","incarnation":"1","resources":{"gpu":{"amount":1,"size":2}}}'
wrong = b'{"type":"register","host":"h","worker":"w","incarnation":"1","resources":{"gpu":{"amount":0}}}'

def refused():
    try:
        codec.decode_registration(wrong)
    except codec.WireError as error:
        assert error.field == "$.resources.gpu.amount", error
    else:
        raise AssertionError("it was taken")

work = [
    lambda: codec.decode_ledger((golden / "allocation-with-survivors.json").read_bytes()),
    lambda: codec.decode_ledger((golden / "host-with-names.json").read_bytes()),
    lambda: codec.decode_history((golden / "put.json").read_bytes()),
    lambda: codec.decode_registration((golden / "register-full.json").read_bytes()),
    lambda: codec.decode_dead_letter((golden / "dead-letter.json").read_bytes()),
    lambda: codec.decode_registration(unknown, warnings=[]),
    refused,
] * 2
ready, done = threading.Barrier(len(work)), []

def run(each):
    global codec
    ready.wait()
    from outfitter_proto import codec
    each()
    done.append(each)

threads = [threading.Thread(target=run, args=[each]) for each in work]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done) == len(work))
"""


def test_threads_decode_their_first_messages_at_once() -> None:
    first = [sys.executable, "-c", FIRST_MESSAGES, str(GOLDEN)]
    for _ in range(3):
        done = subprocess.run(first, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")

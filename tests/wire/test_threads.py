"""Threads of one process whose first messages come at the same moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "v0.1"

FIRST_MESSAGES = """
import sys, threading
from pathlib import Path
from outfitter_proto import codec

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
    ready.wait()
    each()
    done.append(each)

threads = [threading.Thread(target=run, args=[each]) for each in work]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done) == len(work))
"""


FORKED_MEANWHILE = """
import os, sys, threading
from pathlib import Path
from outfitter_proto import codec

body = Path(sys.argv[1], "allocation-allocated.json").read_bytes()
sys.setswitchinterval(1e-6)
thread = threading.Thread(target=codec.decode_ledger, args=[body])
thread.start()
while not codec._DECODER_LOCK.locked() and thread.is_alive():
    pass
child = os.fork()
if child == 0:
    codec.decode_ledger(body)
    os._exit(7)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_threads_decode_their_first_messages_at_once() -> None:
    first = [sys.executable, "-c", FIRST_MESSAGES, str(GOLDEN)]
    for _ in range(3):
        done = subprocess.run(first, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_process_that_is_forked_while_a_thread_makes_a_decoder_decodes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED_MEANWHILE, str(GOLDEN)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr

"""Pipes of keepers, beside threads that open files."""

import subprocess
import sys

SCRIPT = """
import asyncio, os, threading
import uvloop
from workers.sandbox.sandbox import read_pipe

faults, over = [], threading.Event()

def open_files():
    while not over.is_set():
        try:
            file = os.open(os.devnull, os.O_RDONLY)
            os.fstat(file)
            os.close(file)
        except OSError as fault:
            faults.append(fault)

async def read_pipes():
    for _ in range(3_000):
        ours, theirs = os.pipe()
        with open(ours, "rb", 0) as pipe:
            reader, transport = await read_pipe(pipe)
            os.close(theirs)
            assert await reader.read() == b""
            transport.close()
            await asyncio.sleep(0)

threads = [threading.Thread(target=open_files) for _ in range(3)]
for thread in threads:
    thread.start()
before = len(os.listdir("/proc/self/fd"))
try:
    uvloop.run(read_pipes())
finally:
    over.set()
    for thread in threads:
        thread.join()
assert not faults, faults[:3]
assert len(os.listdir("/proc/self/fd")) < before + 10, "each pipe is closed"
"""


def test_the_end_of_a_pipe_closes_no_other_file() -> None:
    """uvloop closes a descriptor twice, if the file object closes it too. The second time, it may be another file's."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)

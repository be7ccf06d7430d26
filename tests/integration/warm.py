"""A process that has imported what ranks import, and forks into them when it is asked to.

Two ranks begin within a tenth of a second so; by themselves they import for longer than most of them run. It is started
as `python -m tests.integration.warm FD`. Through that socket come lists of {module, words, env, errors}, one a line;
for each list the process ids go back, and when all have ended their exit codes.
"""

import json
import os
import random
import runpy
import socket
import sys

import accelerate  # noqa: F401
import datasets  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as own, own.makefile("rw", encoding="utf-8") as asked:
        for line in iter(asked.readline, ""):
            pids = []
            for one in json.loads(line):
                pid = os.fork()
                if not pid:
                    become(**one)
                    return
                pids.append(pid)
            print(json.dumps(pids), file=asked, flush=True)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            print(json.dumps(codes), file=asked, flush=True)


def become(module: str, words: list[str], env: dict[str, str], errors: str) -> None:
    """Does what `python -m module words` does, in this environment and with standard error in this file."""
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    random.seed()  # numbers that nobody has seeded differ between processes
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

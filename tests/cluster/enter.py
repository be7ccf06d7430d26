"""Runs a command on a host: `python -E -S enter.py PARENT PID FOLDER COMMAND...`, PID being the host's first process.

The command has this process's environment and streams, gets the signals that this process gets, and dies with it; this
process ends as the command does.
"""

import os
import signal
import sys

import namespaces as ns

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(parent: int, host: int, folder: str, command: list[str]) -> None:
    """Enters the host, runs the command and ends as it does."""
    ns.die_with(parent)
    ns.enter(host, ns.ALL)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pid = os.fork()
    if pid == 0:
        ns.die_with(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setsid()
        try:
            os.chdir(folder)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])

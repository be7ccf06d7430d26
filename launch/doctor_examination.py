"""The doctor's questions, put to all hosts at once; the last is an all-reduce over all of them."""

import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.doctor_checks import COMPARED, Seen, problems, table
from launch.doctor_line import LOADER, Line, NoAnswer, on_each
from launch.environment import handed_on
from launch.hostfile import Host, few
from launch.ssh import Place

ANSWER_S = 15.0  # what a host has for the connection and its first answer
CONNECT_S = 3.0
NUMBERS = 4 << 20  # of the large all-reduce: 16 MiB
RANK = Path(__file__).resolve().parent.parent / "normscale" / "doctor_rank.py"
HERE = "this machine"


def argv_of(host: Host | None, place: Place) -> tuple[str, ...]:
    """Returns what starts Python on a host, or here, with the questions on its standard input."""
    if host is None:
        return (sys.executable, "-c", LOADER)
    return place.ssh_to(host.name, place.within([place.python, "-c", LOADER]), lost_after_s=ANSWER_S)


class Examination:
    """The hosts while they are asked; without any, this machine is, twice, to have somebody to talk to."""

    def __init__(self, hosts: Sequence[Host], place: Place, port: int | None, limit_s: float) -> None:
        self.place, self.port, self.limit_s, self.remote = place, port, limit_s, bool(hosts)
        self.seen = [Seen(host) for host in hosts] or [Seen(Host(HERE, 1))]
        self.lines: list[Line] = []

    def _start(self, host: Host) -> Line:
        folder = None if self.remote else self.place.folder
        return Line(host.name, argv_of(host if self.remote else None, self.place), folder)

    def close(self) -> None:
        """Ends all connections."""
        on_each(self.lines, Line.close)

    def run(self, wanted: list[dict[str, Any]], sharing: Sequence[str]) -> int:
        """Asks, says what was found, and returns the exit code."""
        for seen in self.seen:
            try:
                self.lines.append(self._start(seen.host))
            except NoAnswer as error:
                seen.gone = str(error)
        self._ask_each(wanted)
        self._share(wanted)
        if self.remote and len(self._there()) > 1:
            self._connect()
        print("\n".join(table(self.seen)), flush=True)
        reduced, wrong = self._reduce()
        print(f"\n{reduced}")
        found = problems(self.seen, sharing) + wrong
        print("".join(f"{line}\n" for line in ["", *found, ""] if found), end="")
        print("no problem found" if not found else f"{len(found)} problem{'s' * (len(found) > 1)} found")
        return 1 if found else 0

    def _there(self) -> list[Seen]:
        return [seen for seen in self.seen if not seen.gone]

    def _all(self, do: str, limit_s: float, /, **words: Any) -> dict[str, Any]:
        """Returns each host's answer to a question; a host that gives none is gone."""
        return self._noted(on_each(self._lines(), lambda line: line.ask(do, limit_s, **words)))

    def _noted(self, answers: dict[str, Any]) -> dict[str, Any]:
        for seen in self.seen:
            if isinstance(error := answers.get(seen.name), NoAnswer):
                seen.gone = str(error)
                del answers[seen.name]
        return answers

    def _lines(self) -> list[Line]:
        names = {seen.name for seen in self._there()}
        return [line for line in self.lines if line.name in names]

    def _ask_each(self, wanted: list[dict[str, Any]]) -> None:
        addresses = [seen.address for seen in self.seen] if self.remote else []

        def ask(line: Line) -> tuple[Any, ...]:
            facts = line.ask("facts", ANSWER_S, packages=list(COMPARED))
            clock = line.offset(ANSWER_S) if self.remote else None
            return (
                facts,
                clock,
                line.ask("names", ANSWER_S, hosts=addresses),
                line.ask("paths", ANSWER_S, wanted=wanted),
            )

        answers = self._noted(on_each(self.lines, ask))
        for seen in self._there():
            seen.facts, seen.clock, seen.names, seen.paths = answers[seen.name]

    def _share(self, wanted: list[dict[str, Any]]) -> None:
        """Finds which hosts see what the first one writes."""
        there = self._there()
        if len(there) < 2:
            return
        token = f".normscale-doctor-{secrets.token_hex(8)}"
        for one in (path for path in wanted if path["write"]):
            first = self._lines()[0]
            if any(path["wrong"] for path in there[0].paths if path["key"] == one["key"]):
                continue
            try:
                first.ask("leave", ANSWER_S, path=one["path"], token=token)
                answers = self._all("sees", ANSWER_S, path=one["path"], token=token)
                first.ask("remove", ANSWER_S, path=one["path"], token=token)
            except NoAnswer as error:
                there[0].gone = str(error)
                return
            for seen in there:
                if seen.name in answers:
                    seen.shared[one["key"]] = answers[seen.name]

    def _connect(self) -> None:
        """Lets every host connect to every other."""
        ports = self._all("listen", ANSWER_S)
        there = self._there()
        others = [(seen.address, ports[seen.name]["port"]) for seen in there if "port" in ports[seen.name]]
        for name, unreached in self._all("connect", ANSWER_S, others=others, limit_s=CONNECT_S).items():
            next(seen for seen in there if seen.name == name).unreached = unreached
        self._all("silence", ANSWER_S)

    def _reduce(self) -> tuple[str, list[str]]:
        """Returns what an all-reduce over the hosts came to, and what was wrong with it."""
        there = self._there()
        packages = [seen.facts["packages"].get("torch") for seen in there]
        if not there or not all(packages) or any(seen.unreached for seen in there):
            return "all-reduce: not tried", []
        lines = self._lines()
        try:
            if len(lines) == 1:  # one machine talks to itself
                lines.append(self._start(there[0].host))
                lines[1].name += " again"
                self.lines.append(lines[1])
            cuda = len(there) > 1 and all(seen.facts["gpus"] for seen in there)
            cuda = cuda and not any(version.endswith("+cpu") for version in packages)
            with tempfile.TemporaryDirectory(prefix="normscale-doctor-") as folder:
                return self._reduce_over(lines, "nccl" if cuda else "gloo", there[0].address, folder)
        except NoAnswer as error:
            return "all-reduce: not tried", [f"{there[0].name}: {error}"]

    def _reduce_over(self, lines: list[Line], backend: str, master: str, folder: str) -> tuple[str, list[str]]:
        settings: dict[str, Any] = {"world": len(lines), "backend": backend, "numbers": NUMBERS}
        settings["limit_s"] = self.limit_s
        environ = handed_on(os.environ) | ({} if backend == "nccl" else {"CUDA_VISIBLE_DEVICES": ""})
        if self.remote:
            asked = lines[0].ask("free", ANSWER_S, port=self.port or 0)
            if "wrong" in asked:
                why = f"port {self.port}: {asked['wrong'].lower()}; choose another with --port"
                return "all-reduce: not tried", [f"{lines[0].name}: {why}"]
            settings |= {"master": master, "port": asked["port"]}
        else:  # nothing listens beyond this machine
            settings["file"] = f"{folder}/store"
            environ["GLOO_SOCKET_IFNAME"] = "lo"
        source, ranks = RANK.read_text(encoding="utf-8"), {line.name: rank for rank, line in enumerate(lines)}

        def reduce(line: Line) -> Any:
            own = settings | {"rank": ranks[line.name]}
            words = {"source": source, "settings": own, "environ": environ, "limit_s": self.limit_s}
            return line.ask("rank", self.limit_s + ANSWER_S, **words)

        return _judged(on_each(lines, reduce), settings, self.limit_s)


def _judged(answers: dict[str, Any], settings: dict[str, Any], limit_s: float) -> tuple[str, list[str]]:
    failed = {
        name: str(answer) if isinstance(answer, NoAnswer) else answer["wrong"]
        for name, answer in answers.items()
        if isinstance(answer, NoAnswer) or "wrong" in answer
    }
    what = f"all-reduce ({settings['backend']}, {settings['world']} ranks: {few(list(answers))})"
    if failed:
        line = f"{'; '.join(f'{name}: {why}' for name, why in failed.items())}"
        mend = "look at the names and firewalls above, or set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        return f"{what}: failed within {limit_s:g} s", [f"all-reduce: {line}; {mend}"]
    latency_s = max(answer["latency_s"] for answer in answers.values())
    rate = min(answer["bytes_s"] for answer in answers.values())
    return f"{what}: {1e3 * latency_s:.2f} ms for 8 bytes, {rate / 1e9:.3g} GB/s for 16 MiB", []

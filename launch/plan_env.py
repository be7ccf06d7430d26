"""What a launcher tells the ranks to hold themselves to; normscale.train.rendezvous checks it before the first step."""

from collections.abc import Sequence

from normscale.planned import VARIABLE, Planned, code_hash, config_hash


def plan_env(args: Sequence[str], world: int | None, hosts: Sequence[str] | None = None) -> dict[str, str]:
    """Returns the variable that every rank gets; `args` are CONFIG and its key=value words, as the ranks get them.

    `world` is None where the launch leaves the number of ranks open, `hosts` where it leaves the hosts open.
    """
    planned = Planned(world, None if hosts is None else tuple(hosts), config_hash(args), code_hash())
    return {VARIABLE: planned.text()}

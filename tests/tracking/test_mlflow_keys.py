"""A run has at most MAX_KEYS metrics in MLflow, whatever another loop records, and whenever it does."""

import torch
from torch import Tensor, nn

import normscale
from normscale.tracking import mlflow_layout as layout
from normscale.tracking import mlflow_pages as pages
from normscale.tracking.draw import Look
from normscale.tracking.reader import read_run
from normscale.tracking.record import MAX_KEYS, OF_TRAINERS, QUANTITIES, USER
from normscale.tracking.show import show
from normscale.tracking.spool import SpoolWriter
from tests.monitor.made import adamw, batches, net, record
from tests.tracking.made import make_foreign

REGISTERED = {name for name, quantity in QUANTITIES.items() if quantity.mlflow}


def sent(record):
    """Returns the keys of a record's points in the order in which they are sent."""
    return list(dict.fromkeys(point.key for point in layout.points(record)))


def test_registered_keys_are_of_sections_each_of_one_quantity():
    keys = [QUANTITIES[name].mlflow for name in REGISTERED]
    assert len(keys) == len(set(keys)) <= MAX_KEYS == 80
    assert all(layout.key_of(key) == key and "/" in key for key in keys)
    assert QUANTITIES.keys() >= OF_TRAINERS


def test_own_scalars_have_the_room_that_is_left_the_first_first_and_the_rest_is_named(runs):
    found = read_run(runs / make_foreign(runs, steps=2, **{f"n{number:03d}": 1.0 for number in range(100)}))
    keys = sent(found)
    theirs = [key for key in keys if key.startswith(USER)]
    room = MAX_KEYS - len(REGISTERED - OF_TRAINERS)
    assert theirs == [f"user/n{number:03d}" for number in range(room)]
    assert keys[-room:] == theirs
    left = [f"n{number:03d}" for number in range(room, 100)]
    assert layout.without_keys(found) == left
    page = pages.run_page(found, "finished", "7", "R", {})
    (told,) = [line for line in page.split("\n") if line.startswith("| not charted |")]
    assert told.startswith(f"| not charted | {len(left)} of its own scalars")
    assert f": {', '.join(left[:50])} and {len(left) - 50} more" in told
    shown = " ".join(" ".join(show(found, False, Look(100, False, False))).split())
    assert f"{len(left)} of its own scalars have no room in MLflow's charts" in shown
    assert left[0] in shown
    few = read_run(runs / make_foreign(runs, "few", steps=2, acc=0.5))
    assert "no room" not in "\n".join(show(few, False, Look(100, False, False)))
    assert "not charted" not in pages.run_page(few, "finished", "7", "R", {})


def test_what_is_sent_early_and_what_comes_later_are_eighty_keys_together(runs):
    """75 scalars of the loop's own at the first sync, then all that a monitor can record."""
    with SpoolWriter(runs / "late", 1) as spool:
        spool.start(run_id="late", config={"loop": {"lr": 1e-3}})
        spool.metrics(1, 1, {"loss_train": 3.0} | {f"user/n{number}": 1.0 for number in range(75)})
        early = sent(read_run(runs / "late"))
        spool.metrics(2, 2, dict.fromkeys(REGISTERED - OF_TRAINERS, 1.0) | {"user/n75": 1.0})
        later = sent(read_run(runs / "late"))
        spool.end("finished", 0, dict.fromkeys(REGISTERED - OF_TRAINERS, 1.0))
    ended = sent(read_run(runs / "late"))
    assert len({*early, *later, *ended}) <= MAX_KEYS
    theirs = [[key for key in keys if key.startswith(USER)] for keys in (early, later, ended)]
    assert theirs[0] == theirs[1] == theirs[2] != []


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


def test_a_monitored_run_with_everything_on_has_all_that_room_is_kept_for_and_no_more(tmp_path):
    """So that a quantity that a monitor begins to record has its room, and one that it cannot have takes none."""

    def loss_of(model, batch):
        return model(batch)["logits"].square().mean()

    model, data, scaler = WithLogits(), batches(24), torch.amp.GradScaler("cpu")
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, loss_of, runs=tmp_path, every=1, clip=1.0, update_batch=data[0])
    for batch in data:
        with monitor.micro_batch(batch):
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
        monitor.step(optimizer, loss, scaler=scaler)
        optimizer.zero_grad()
    found = record(monitor)
    assert (found.series.keys() | found.summary.keys()) & QUANTITIES.keys() == QUANTITIES.keys() - OF_TRAINERS

"""What several commands need: a configuration, a folder of runs, errors that name the option."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normscale.errors import BadInput, StoreError

if TYPE_CHECKING:
    from normscale.config.load import Loaded

DEFAULT_RUNS, DEFAULT_URI = "runs", "sqlite:///mlflow.db"


def load(words: Sequence[str], command: str) -> "Loaded":
    from normscale.config.load import read
    from normscale.tracking.find import refuse_folded

    if not words or ("=" in words[0] and not os.path.exists(words[0])):  # False also for what cannot be a name
        raise BadInput(
            f"{command}: no configuration; name a YAML file first, as in: {command} configs/train/quick.yaml"
        )
    refuse_folded(Path(words[0]))
    return read(Path(words[0]), words[1:])


def check_folder(folder: Path, key: str, made: bool) -> None:
    """Raises BadInput unless a folder of runs is there; with `made`, unless its name could be a folder's."""
    from normscale.config.sources import plain

    shown = plain(str(folder), 200)
    try:
        found = folder.is_dir()
        os.lstat(folder / ("x" * 100) / ("x" * 20))  # a run and a file in it
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{key}: {shown} cannot be a folder ({reason}); choose another") from None
    if not made and not found:
        raise BadInput(f"{key}: {shown} is not a folder of runs; train something first, or name the folder with {key}")


@contextlib.contextmanager
def uri_option(option: str = "--uri") -> Iterator[None]:
    """Lets an error about the store name the option that gave it here, instead of the configuration's key."""
    try:
        yield
    except StoreError as error:
        said = str(error).replace("tracking.uri: ", f"{option}: ", 1).replace("tracking.uri=sqlite", f"{option} sqlite")
        if option == "--store":  # which is a server's, and no server
            said = said.replace("http://<host>:<port>", "postgresql://<user>@<host>/<name>")
        raise StoreError(said) from error


def rank() -> int:
    word = os.environ.get("RANK", "0")
    return int(word) if word.isdigit() else 0

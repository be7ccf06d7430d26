"""What a user can meet: one base class, one class per kind of mistake.

Every message is one line that names the thing, the place and the mend. The command line prints it and exits with
`exit_code`: 1 the run failed, 2 bad input, 3 stopped on non-finite values.
"""


class NormscaleError(Exception):
    """Base of every error that normscale raises on purpose."""

    exit_code = 1


class BadInput(NormscaleError):
    """Something the user wrote or pointed at cannot be used; nothing was started or overwritten."""

    exit_code = 2


class ConfigError(BadInput):
    """A configuration key, value or combination of values is wrong.

    `key` is the dotted key at fault where there is one, so that whoever knows the sources can add file and line.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class BackendError(ConfigError):
    """The backend that `model.backend` names cannot run the norms of this model here."""

    def __init__(self, message: str, key: str | None = "model.backend") -> None:
        super().__init__(message, key)


class DataError(BadInput):
    """A corpus cannot be read, is too short, or is not reachable. The message begins with the key at fault."""

    @property
    def key(self) -> str:
        """The dotted key that the message is about."""
        return str(self).partition(":")[0]


class StoreError(BadInput):
    """A folder or database that records should go to cannot be written or read."""


class LaunchError(BadInput):
    """A launcher was asked for something it cannot start."""


class RunFailed(NormscaleError):
    """A run or a worker ended without a result."""


class ReplayRefused(NormscaleError):
    """A step that was not finite cannot be run again under hooks; where it went wrong is told by other signs."""


class NonFiniteStop(NormscaleError):
    """Training stopped because a loss or a gradient was not finite."""

    exit_code = 3


def nearest(word: str, allowed: list[str] | tuple[str, ...]) -> str:
    """Returns "; did you mean 'x'?" for the allowed name closest to `word` in any case, or an empty string."""
    import difflib

    by_lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""

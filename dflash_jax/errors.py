"""Every error that this library raises on purpose: one small tree under `DFlashError`.

A message says what is wrong with the number, what would be right and which option to change. The
classes say only who has to act; nothing here formats messages and nothing here imports the package.
"""


class DFlashError(Exception):
    """Base of all errors raised on purpose; the command line prints them without a traceback."""


class ConfigError(DFlashError, ValueError):
    """A configuration value is wrong, missing, or not supported; refused before weights load."""


class CheckpointError(DFlashError, ValueError):
    """A checkpoint's files do not hold what its config or index promises."""


class RequestError(DFlashError, ValueError):
    """One request cannot be served; nothing else is affected."""


class MemoryPlanError(DFlashError, ValueError):
    """The configuration needs more memory than the device has; names what would fit."""


class DownloadError(DFlashError, RuntimeError):
    """A file could not be fetched; says what to place where."""


class EngineError(DFlashError, RuntimeError):
    """The engine itself failed after start; open requests end with this error."""

"""One file per task; each has `make(config) -> Task`."""

"""Schema of the transfer queue."""

from pydantic import PositiveFloat, PositiveInt

from tailrace.config.base import Config


class QueueConfig(Config):
    """Bounds of the transfer queue."""

    max_rows: PositiveInt = 65536
    """Rows stored at the most; producers wait beyond that."""
    max_bytes: PositiveInt = 4 * 2**30
    """Bytes of cells stored at the most; producers wait beyond that."""
    lease_s: PositiveFloat = 600.0
    """Seconds after which the rows of a worker that gives no sign of life go back; one at work renews its claim."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds that a put or a claim waits at the most."""

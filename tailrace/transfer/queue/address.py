"""The address of a queue across processes: a file that its clients read. The file holds a token, so it is private."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Self

import msgspec

from tailrace.errors import UNREADABLE, UserError, one_line
from tailrace.transfer.wire.sockets import reachable


class QueueAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The endpoints of a queue's controllers, and the token that lets a client in."""

    endpoints: list[str]
    """The endpoints of the controller, or of the first of several."""
    host: str
    """The id of the controllers' host; see `sockets.host_id`."""
    token: bytes
    others: list[list[str]] = []
    """The endpoints of each further controller."""

    def __repr__(self) -> str:
        """Return a text without the token, which must not appear in logs."""
        others = f", others={self.others}" if self.others else ""
        return f"QueueAddress(endpoints={self.endpoints}, host={self.host!r}{others})"

    @property
    def endpoint(self) -> str:
        """The endpoint by which this process reaches the controller, the first of several; see `sockets.reachable`.

        Raises:
            UserError: the controller cannot be reached from here.
        """
        return self._reached(self.endpoints)

    @property
    def controllers(self) -> list[str]:
        """The endpoint by which this process reaches each controller.

        Raises:
            UserError: a controller cannot be reached from here.
        """
        return list(map(self._reached, (self.endpoints, *self.others)))

    @property
    def each(self) -> "list[QueueAddress]":
        """The address of each controller alone."""
        return [msgspec.structs.replace(self, endpoints=own, others=[]) for own in (self.endpoints, *self.others)]

    def _reached(self, endpoints: list[str]) -> str:
        ways = reachable(endpoints, self.host)
        if not ways:
            raise UserError(
                f"the queue listens at {endpoints} alone, which cannot be reached from this host; "
                f"serve it at an address of the network: queue.listen"
            )
        return ways[0]

    def write(self, path: Path) -> None:
        """Write the address to `path`, whole or not at all. Other users cannot read the file.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            file, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # of mode 0600
            try:
                with open(file, "wb") as out:
                    out.write(msgspec.json.encode(self))
                os.replace(partial, path)
            except BaseException:
                os.unlink(partial)
                raise
        except OSError as error:
            raise UserError(f"the queue's address cannot be written to {path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the address from the file at `path`.

        Raises:
            UserError: there is no such file, it holds no address, or other users can read it.
        """
        try:
            with open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read()
        except OSError as error:
            raise UserError(
                f"the queue's address cannot be read from {path}: {error.strerror}; "
                f"give the file that `tailrace queue serve` has written"
            ) from None
        try:
            address = msgspec.json.decode(data, type=cls)
        except (*UNREADABLE, ValueError) as error:  # ValueError: the bytes are no text
            raise UserError(
                f"{path} is not the address of a queue: {one_line(error)}; "
                f"give the file that `tailrace queue serve` has written"
            ) from None
        if mode & 0o077:
            raise UserError(
                f"{path} holds the token of a queue, but others can read it (mode {mode:04o}): chmod 600 {path}"
            )
        return address

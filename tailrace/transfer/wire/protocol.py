"""The requests and answers of one kind of server, beside the messages of the wire itself."""

from types import UnionType

import msgspec

from tailrace.transfer.wire.frames import Header, decode
from tailrace.transfer.wire.messages import Message, WireAnswer, WireRequest


class Protocol:
    """The messages that clients and servers of one kind understand. Any other message is refused."""

    def __init__(
        self, requests: UnionType, answers: UnionType, *, servers: str, state_hint: str, address_hint: str
    ) -> None:
        """`requests`, `answers`: unions of `Message` types.

        The other arguments are parts of error texts. `servers`: a name for all servers together, such as "the queue's
        processes". `state_hint`: how to see whether they still serve; may be empty. `address_hint`: how to find the
        right server.
        """
        self.servers = servers
        self.state_hint = state_hint
        self.address_hint = address_hint
        self._requests: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(requests | WireRequest)
        self._answers: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(answers | WireAnswer)

    def decode_request(self, header: Header) -> Message:
        """Decode a request.

        Raises:
            WireError: it is no request of this protocol, or has invalid fields.
        """
        return decode(self._requests, header.message, "a request")

    def decode_answer(self, header: Header) -> Message:
        """Decode an answer.

        Raises:
            WireError: it is no answer of this protocol, or has invalid fields.
        """
        return decode(self._answers, header.message, "an answer")

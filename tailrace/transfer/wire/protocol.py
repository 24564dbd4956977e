"""What the servers of one kind are asked and answer, beside the messages of the wire itself."""

from types import UnionType

import msgspec

from tailrace.transfer.wire.frames import Header, decode
from tailrace.transfer.wire.messages import Message, WireAnswer, WireRequest


class Protocol:
    """The messages that clients and servers of one kind understand; whatever else comes is refused."""

    def __init__(
        self, requests: UnionType, answers: UnionType, *, servers: str, state_hint: str, address_hint: str
    ) -> None:
        """`requests`, `answers`: unions of `Message` types.

        The others are parts of error texts. `servers`: what the servers are together, such as "the queue's processes".
        `state_hint`: how to see whether they still serve; may be empty. `address_hint`: how to find the right one.
        """
        self.servers = servers
        self.state_hint = state_hint
        self.address_hint = address_hint
        self._requests: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(requests | WireRequest)
        self._answers: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(answers | WireAnswer)

    def decode_request(self, header: Header) -> Message:
        """What is asked.

        Raises:
            WireError: no request of this protocol, or its fields are not as they must be.
        """
        return decode(self._requests, header.message, "a request")

    def decode_answer(self, header: Header) -> Message:
        """What is answered.

        Raises:
            WireError: no answer of this protocol, or its fields are not as they must be.
        """
        return decode(self._answers, header.message, "an answer")

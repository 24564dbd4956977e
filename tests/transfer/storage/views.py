"""An arena as its clients see it."""

from tailrace.transfer.queue.storage.arena import ArenaView, Place


def view_of(view: ArenaView, place: Place) -> memoryview:
    """The bytes of a place."""
    if not place.size:  # an empty place lies in no segment
        return memoryview(bytearray())
    return view.segment(place.segment)[place.offset : place.offset + place.size]

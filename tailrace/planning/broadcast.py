"""The tree along which new weights are sent, from the places of its members.

    sender ──▶ heads of hosts in its datacentre ──▶ …        at most `fan_out` children each
       ├─────▶ one head of each other datacentre ──▶ …       one crossing, then a broadcast there
       └─────▶ all others on the sender's host               they map its memory: nothing is sent
    head ────▶ all others on its host

Decisions from plain names, without I/O. Source: StreamRL, section 6 (only the root sends to a remote datacentre, and a
local broadcast follows there).
"""

from collections.abc import Sequence
from dataclasses import dataclass

FAN_OUT = 2
"""The most receivers of a datacentre that get weights from one process over the network."""
ROOT = ""
"""The sender's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The place of a receiver."""

    name: str
    """Unique, and not empty."""
    host: str
    """Equal for sites that share memory."""
    datacentre: str
    relays: bool = True
    """Whether others can get weights from it over the network."""


def broadcast_tree(root: Site, receivers: Sequence[Site], *, fan_out: int) -> dict[str, str]:
    """The parent of each receiver, by name; the sender is `ROOT`.

    Receivers that come first are nearer to the sender. Receivers that do not relay are leaves of the network's tree.
    They are below relays of their datacentre where these have room, and below the sender where there is no relay.

    Raises:
        ValueError: fan_out is less than 1, or two receivers have one name.
    """
    if fan_out < 1:
        raise ValueError(f"fan_out is {fan_out}; give 1 or more")
    if len({site.name for site in receivers} | {ROOT}) != len(receivers) + 1:
        raise ValueError("names of receivers must be unique and not empty")
    heads = _heads(root, receivers)
    parents = {site.name: heads[site.host].name for site in receivers}
    far: dict[str, list[Site]] = {}
    for head in heads.values():
        if head.name != ROOT:
            far.setdefault(head.datacentre, []).append(head)
    for datacentre, sites in far.items():
        ordered = sorted(sites, key=lambda site: not site.relays)  # stable: relays first, in the order given
        if datacentre == root.datacentre:
            parents |= _hang(ROOT, ordered, fan_out)
        else:
            parents |= {ordered[0].name: ROOT}
            parents |= _hang(ordered[0].name if ordered[0].relays else ROOT, ordered[1:], fan_out)
    return parents


def _heads(root: Site, receivers: Sequence[Site]) -> dict[str, Site]:
    """The member of each host, by host, that gets weights from elsewhere. The sender's host has them already."""
    heads = {root.host: root}
    for site in receivers:
        known = heads.setdefault(site.host, site)
        if known.name != ROOT and site.relays and not known.relays:
            heads[site.host] = site
    return heads


def _hang(top: str, sites: Sequence[Site], fan_out: int) -> dict[str, str]:
    """Fill a tree below `top`, level by level. Relays come first; sites that find no room are below the last relay."""
    places = [top] + [site.name for site in sites if site.relays]
    last = len(places) - 1
    return {site.name: places[min(number // fan_out, last)] for number, site in enumerate(sites)}

"""A cluster from a text such as 64xH100, or from a file."""

import re
from pathlib import Path

from tailrace.config.base import path_of
from tailrace.config.hardware import ClusterConfig, DeviceConfig, PoolConfig
from tailrace.config.load import parse_as
from tailrace.config.recipe_text import RecipeSyntaxError, read_yaml
from tailrace.errors import PlanError, one_line
from tailrace.planning.hardware.base import Cluster, Link, Pool
from tailrace.planning.hardware.catalogue import find_device

_PART = re.compile(r"([1-9]\d{0,6})\s*[xX×*]\s*([A-Za-z][\w .-]*)")
_FILES = (".yaml", ".yml", ".json")


def open_cluster(text: str) -> Cluster:
    """Return the cluster that `text` means: `64xH100`, `32xH20+64xH800` (one datacentre), or a file.

    A file has the form of `ClusterConfig`.

    Raises:
        PlanError: it means no cluster, a device is not known, the file cannot be read, or devices do not fill nodes.
        ConfigError: the file has a key or a value that is not valid.
    """
    if Path(text).suffix in _FILES:
        return _read(path_of(text, "the cluster file", PlanError))
    pools: dict[str, Pool] = {}
    for part in text.split("+"):
        if (found := _PART.fullmatch(part.strip())) is None:
            own = "; local, this machine, is for tailrace plan alone" if text == "local" else ""
            raise PlanError(
                f"the cluster {text!r} cannot be read; give it as 64xH100, as 32xH20+64xH800, or as a .yaml file{own}"
            )
        kind, device = find_device(found[2])
        if kind in pools:
            raise PlanError(f"the cluster {text!r} has {kind} twice; add the two numbers")
        pools[kind] = _pool(kind, kind, device, *_nodes(int(found[1]), kind, device))
    return Cluster(pools=tuple(pools.values()))


def _nodes(devices: int, kind: str, device: DeviceConfig) -> tuple[int, int]:
    """The nodes that so many devices fill, and the devices of each."""
    per_node = device.devices_per_node
    if devices <= per_node:
        return 1, devices
    if devices % per_node:
        low = devices - devices % per_node
        raise PlanError(
            f"{devices} {kind} do not fill nodes of {per_node}; give {low} or {low + per_node}, or a cluster file with "
            "devices_per_node"
        )
    return devices // per_node, per_node


def _pool(
    name: str, kind: str, device: DeviceConfig, nodes: int, per_node: int, config: PoolConfig | None = None
) -> Pool:
    network = device.network_gb_s if config is None or config.network_gb_s is None else config.network_gb_s
    price = device.usd_per_hour if config is None or config.usd_per_hour is None else config.usd_per_hour
    return Pool(
        name=name,
        kind=kind,
        device=device,
        nodes=nodes,
        per_node=per_node,
        datacentre="" if config is None else config.datacentre,
        network=Link(bytes_per_s=network * 1e9, latency_s=device.network_us * 1e-6),
        usd_per_hour=price,
    )


def _read(path: Path) -> Cluster:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"the cluster file {path} cannot be read: {error.strerror or one_line(error)}") from None
    except (RecipeSyntaxError, UnicodeDecodeError) as error:
        raise PlanError(f"the cluster file {path} is not YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise PlanError(f"the cluster file {path} must be a mapping with pools; see docs/planning.md")
    config = parse_as(ClusterConfig, values, source=str(path))
    pools = []
    for name, pool in config.pools.items():
        kind, device = find_device(pool.device, config.devices)
        pools.append(_pool(name, kind, device, pool.nodes, pool.devices_per_node or device.devices_per_node, pool))
    return Cluster(pools=tuple(pools), wide=_wide(config, path))


def _wide(config: ClusterConfig, path: Path) -> dict[frozenset[str], Link]:
    known = {pool.datacentre for pool in config.pools.values()}
    links: dict[frozenset[str], Link] = {}
    for link in config.links:
        for datacentre in link.between:
            if datacentre not in known:
                raise PlanError(
                    f"{path} has a link to the datacentre {datacentre!r}, where no pool is; pools are in "
                    f"{', '.join(map(repr, sorted(known)))}"
                )
        pair = frozenset(link.between)
        if len(pair) == 1 or pair in links:
            problem = "from a datacentre to itself" if len(pair) == 1 else "that is there twice"
            raise PlanError(f"{path} has a link {problem}: {' and '.join(link.between)}; remove it")
        links[pair] = Link(bytes_per_s=link.gb_s * 1e9, latency_s=link.ms * 1e-3)
    return links

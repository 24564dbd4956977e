"""The schemas of devices and clusters that a plan or a simulation is made for.

The catalogue of devices that ships (`planning/hardware/devices.yaml`) and a user's cluster file have these forms.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tailrace.config.base import GIB, Config, Listed

DType = Literal["bfloat16", "float8", "float32"]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Some = Annotated[int, Field(gt=0, le=2**20)]


class DeviceConfig(Config):
    """A kind of accelerator, and the nodes that it is sold in. Rates are peaks, of dense matrices, in one direction."""

    tflops: dict[DType, Positive]
    """Peak rate of matrix products, in 1e12 operations a second, by the type of their elements."""
    memory_gib: Positive
    """Memory of a device, in GiB."""
    memory_gb_s: Positive
    """Bandwidth of that memory, in 1e9 bytes a second."""
    link_gb_s: Positive
    """Bandwidth from a device to the others of its node, in 1e9 bytes a second."""
    link_us: Annotated[float, Field(ge=0, le=1e6)] = 5.0
    """Latency of a message between devices of a node, in microseconds."""
    switched: bool = True
    """Whether a device reaches all others of its node at once, as through NVSwitch. On PCIe, exchanges go round a ring,
    each step of which has a latency."""
    network_gb_s: Positive
    """Bandwidth from a device to other nodes, in 1e9 bytes a second."""
    network_us: Annotated[float, Field(ge=0, le=1e6)] = 15.0
    """Latency of a message between nodes, in microseconds."""
    host_gb_s: Positive
    """Bandwidth from a device to its host's memory, in 1e9 bytes a second."""
    devices_per_node: Some
    """Devices of a node."""
    watts: Positive
    """Power of a device at work."""
    usd_per_hour: Positive
    """Price of a device for an hour: what clouds asked in 2026, about. Give your own."""

    @model_validator(mode="after")
    def _has_bfloat16(self) -> "DeviceConfig":
        if "bfloat16" not in self.tflops:
            raise ValueError("tflops has no bfloat16, in which models compute; add it")
        return self

    @property
    def memory_bytes(self) -> float:
        """Memory of a device, in bytes."""
        return self.memory_gib * GIB

    def flops(self, dtype: DType = "bfloat16") -> float:
        """Operations a second of matrix products; those of bfloat16 where the type has no rate of its own."""
        return self.tflops.get(dtype, self.tflops["bfloat16"]) * 1e12


class PoolConfig(Config):
    """Nodes of one kind at one place."""

    device: str
    """The kind of device: one of the catalogue, or of `devices` in the same file."""
    nodes: Some
    """Number of nodes."""
    devices_per_node: Some | None = None
    """Devices of a node; by default those that the kind is sold with."""
    datacentre: str = ""
    """The place. Pools of one datacentre reach each other over the network of their nodes."""
    network_gb_s: Positive | None = None
    """Bandwidth from a device to other nodes, in 1e9 bytes a second; by default that of the kind."""
    usd_per_hour: Positive | None = None
    """Price of a device for an hour; by default that of the kind."""


class WideLinkConfig(Config):
    """The link between two datacentres."""

    between: Annotated[Listed[str], Field(min_length=2, max_length=2)]
    """The two datacentres."""
    gb_s: Positive
    """Bandwidth in each direction, of all devices together, in 1e9 bytes a second: 80 Gbit/s are 10."""
    ms: Annotated[float, Field(ge=0, le=1e5)] = 1.0
    """Latency, in milliseconds."""


class ClusterConfig(Config):
    """A cluster file: pools of devices, and the links between datacentres."""

    pools: Annotated[dict[str, PoolConfig], Field(min_length=1)]
    """The pools, by names of your own."""
    links: Listed[WideLinkConfig] = ()
    """Links between datacentres."""
    devices: dict[str, DeviceConfig] = {}
    """Kinds of devices that the catalogue has not, or that replace its own."""

"""The storages of a unit's parts: memory, memory shared with clients, disk, or Redis."""

"""Where a storage unit keeps parts: in memory, in memory shared with clients, on disk, or in Redis."""

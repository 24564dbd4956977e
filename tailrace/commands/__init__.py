"""The subcommands of `tailrace`, except training: one file each, and what several of them share."""

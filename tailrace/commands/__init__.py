"""What the subcommands of `tailrace` do, apart from training: one file each, and what several of them share."""

"""Worker processes: where they run, and what happens when they die. Nothing else imports Ray."""

"""New weights from the trainer to the engines.

sender             what a trainer publishes with      receiver           what an engine gets versions from
sender_service     plans who gets them from whom      receiver_service   which version comes next, and from whom
install_turns      one engine installs at a time      sender_connection  plans come, reports and requests go
chunk_server       gives versions to others           download           one version on its way in
versions           manifest, chunks, sums, seal       receiver_memory    what is here, and who holds it
segments           shared memory of payloads          receiver_status    what a receiver's threads share
messages           what they say to each other        threads            loops, workers and waiting
address            where a sender is                  media, broadcast   what chunks travel through
"""

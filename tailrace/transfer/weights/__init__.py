"""Transfer of new weights from the trainer to the engines.

sender             publishes versions (trainer)       receiver           gets versions (engine)
sender_service     plans who fetches from whom        receiver_service   follows the plan: next version and parent
install_turns      one engine installs at a time      sender_connection  receives plans, sends reports and requests
chunk_server       serves versions to others          download           one version that is being fetched
versions           manifest, chunks, sums, seal       receiver_memory    the versions here, and their holders
segments           shared memory of payloads          receiver_status    the state that a receiver's threads share
messages           the messages between them          threads            loops, workers and waiting
address            a sender's endpoints and token     media, broadcast   the ways that chunks travel
"""

"""Generation: requests in, finished samples out.

Where to read: `base` is the interface. `driver` makes it of a synchronous core; `core` is the one that Tailrace brings,
and its `step` names the rest in the order of use:

    scheduler   which tokens to compute next, and who gives way when blocks run out (`sequence`, `kv_cache`)
    runner      from what was chosen to tensors: `model` is the arithmetic, `attention` reads the cache
    sampler     from logits to tokens and their log-probabilities
    stopping    when a response ends

`architecture` and `weights` read checkpoints. `backends` holds one file per engine, and `factory` chooses.
"""

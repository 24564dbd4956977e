"""Generation: requests in, finished samples out.

Where to read: `base` is the interface. `driver` turns a synchronous core into an asynchronous engine, and `core` is
Tailrace's own core. Each `lane` of it is one replica with its scheduler. A step uses the rest in this order:

    scheduling   which tokens to compute next, and which sequence gives way when blocks run out
    ranks        the processes that compute a step, and their weights
    decoder      tensors and arithmetic over the KV cache, with `collectives` between the ranks and C++ in `kernels`
    sampling     from logits to tokens and their log-probabilities

`arrangement` and `adaptive_tp` change the TP degree. `model` cuts a model into shards. `backends` holds one file per
engine, and `factory` chooses.
"""

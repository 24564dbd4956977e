"""The tasks of a run, and what times them: each claims rows, computes, and acks with what it computed.

base        the loop of claim, compute and ack     prompts     puts rows in, as far ahead as staleness allows
rollout     rows become responses                  reward      responses get rewards
reference   log-probabilities of frozen weights    advantage   groups get advantages
actor       groups become gradients                gate        holds a response until its engine has the weights
updater     when new weights go into an engine
"""

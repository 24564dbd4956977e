"""The tasks of a run, and the parts that time them: each task claims rows, computes, and acks with its outputs.

base        the loop of claim, compute and ack     prompts     puts rows in, as far ahead as staleness allows
rollout     rows become responses                  reward      responses get rewards
reference   log-probabilities of frozen weights    advantage   groups get advantages
actor       groups become gradients                gate        holds a response until its engine has the weights
updater     when new weights go into an engine
"""

"""The tasks of a run, and the parts that time them: each task claims rows, computes, and acks with its outputs.

context     the parts that tasks of a pool share   factory     makes the tasks of a pool from the algorithm's table
base        the loop of claim, compute and ack     prompts     puts rows in, as far ahead as staleness allows
rollout     rows become responses                  reward      responses get rewards
scoring     a model's numbers for each token       compute     a function of each group, such as the advantages
actor       groups become gradients                gate        holds a response until its engine has the weights
updater     when new weights go into an engine
"""

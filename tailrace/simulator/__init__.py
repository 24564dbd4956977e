"""Simulates runs on devices that need not be there. It imports no torch.

agenda     what will happen, in the order of its time; processes
batch      a replica's continuous batch, in stretches of equal steps; `lockstep`: several that step together
engines    engines: batches, weights, tools, deaths; `replicas` and `tp`: their arrangement, and its changes
service    the generation service: where groups of responses go; `lengths`: what is expected of them
fleet      the number of engines
trainer    the trainer, from graded groups to weights; `scorer`: a reference before it; `devices`: those in turns
prompts    the groups of each training step, and those in the places of others; `advantages`: which are remade
run        a whole run, from prompts to weights; it emits the events of a real one
scenario   what is simulated, in plain numbers
setup      a scenario from a recipe and devices, or from a profile of this machine
drawing    the training steps of a workload, of the recipe's size
summary    the figures of a run
"""

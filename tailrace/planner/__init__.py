"""Plans a run before its devices are there: which devices generate, which train, and how.

    recipe, model, cluster, workload ─▶ candidates ─▶ bounds ─▶ the best are simulated ─▶ plans, gains, a recipe

problem      what is planned for, and what is wrong with it
modes        how generation and training overlap
load         what a training step of a workload has
bound        seconds of a step, by arithmetic alone
candidates   all allocations that fit, with their bounds
given        the candidate that a recipe describes itself; `places`: where its pools stand on a cluster
trial        a candidate simulated: a plan
processes    trials side by side
search       the best plans, what would make them faster, and time against cost
what_if      a plan under another recipe, cluster or workload
recipe       a plan as a recipe that `train` takes
refusal      what is said where nothing fits
sized_run    a recipe that is not searched: `run_memory`, and its `outlook` on one machine
local        plans for this machine, from a profile of it
"""

from tailrace.planner.modes import Mode
from tailrace.planner.problem import Problem
from tailrace.planner.search import Gain, Plans, plan
from tailrace.planner.trial import Objective, Plan

__all__ = ["Gain", "Mode", "Objective", "Plan", "Plans", "Problem", "plan"]

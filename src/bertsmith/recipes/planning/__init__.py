"""From a config to what the planner is told, and from its answer to what a person reads.

`bertsmith plan` and every training verb come this way, so that both say the same of a run. Without
torch, so that a plan is there at once.
"""

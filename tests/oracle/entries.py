"""Every function that has an independent implementation to be compared with.

A new one is an `Entry` in a file of this folder. It has our call and verl's, which get the same random responses
(`tests.helpers.responses`), and says how the two differ by definition. A number that it needs is a field there.
"""

from tests.oracle import advantages, critic, kl, losses, off_policy

ENTRIES = (*advantages.ENTRIES, *kl.ENTRIES, *losses.ENTRIES, *off_policy.ENTRIES, *critic.ENTRIES)

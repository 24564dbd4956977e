"""Every function that has an independent implementation to be compared with."""

from tests.oracle import advantages, kl, losses, off_policy

ENTRIES = (*advantages.ENTRIES, *kl.ENTRIES, *losses.ENTRIES, *off_policy.ENTRIES)

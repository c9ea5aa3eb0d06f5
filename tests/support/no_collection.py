"""Turns garbage collection off where it is imported: the fork server imports modules, all of which stay."""

import gc

gc.disable()

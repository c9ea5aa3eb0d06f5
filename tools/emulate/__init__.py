"""An emulated cluster: nodes as Linux namespaces on this machine, joined by links of a chosen rate and delay."""

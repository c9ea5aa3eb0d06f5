"""This host, its GPUs and network: cores, memory, limits, energy, driver, ports."""

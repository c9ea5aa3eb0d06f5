"""Table of all checks of a single host, which docs/preflight.md shows. Pure.

A finding makes a job fail, or slow for certain; a remark also occurs on healthy hosts.
"""

from collections import Counter

from bigbatch.trainer.preflight.check import Host
from bigbatch.trainer.preflight.gpu_checks import GPU_CHECKS
from bigbatch.trainer.preflight.limit_checks import LIMIT_CHECKS
from bigbatch.trainer.preflight.network_checks import NETWORK_CHECKS

CHECKS = (*GPU_CHECKS, *NETWORK_CHECKS, *LIMIT_CHECKS)
"""All checks, in the order of the report."""


def find_troubles(host: Host) -> dict[str, list[str]]:
    """Apply all checks; return name -> faults, for checks that found any."""
    found = {check.name: list(check.find(host)) for check in CHECKS}
    return {name: texts for name, texts in found.items() if texts}


def links_are_broken(host: Host) -> bool:
    """Tell whether measuring links would fail for certain."""
    return any(True for check in CHECKS if check.breaks_links for _ in check.find(host))


def describe_hardware(host: Host) -> dict[str, str]:
    """Return the facts that must be equal on all hosts."""
    shown = {}
    if host.on_gpus:
        rates = Counter(port.gbit_per_second for port in host.usable_ports)
        shown["RDMA ports"] = ", ".join(f"{count} of {rate:g} Gbit/s" for rate, count in sorted(rates.items()))
        # not how many: a node may have fewer ranks than others
        widths = {row["pcie.link.width.current"] for uuid, row in host.driver.health.items() if uuid in host.own_gpus}
        shown["PCIe lanes"] = ", ".join(sorted(widths))
        shown["NVLinks"] = ", ".join(map(str, sorted({links.active for links in host.driver.links.values()})))
    return {name: text for name, text in shown.items() if text}

"""Elastic Fabric Adapters: devices of the kernel, domains of libfabric, and what is installed for them."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"efa": dict.fromkeys(("devices", "pci", "domains", "installer", "libfabric", "plugins"))}
AMAZON = 0x1D0F
EFA_DEVICES = range(0xEFA0, 0xEFB0)
PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "/opt/amazon/ofi-nccl/lib64",
    "/opt/aws-ofi-nccl/lib",
    "/opt/aws-ofi-nccl/install/lib",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)
"""The EFA installer, AWS's images and people who build it themselves put the NCCL plugin into these folders."""
_PLUGIN = re.compile(r"libnccl-net(-ofi|-aws-ofi)?\.so$")


def collect(reading: MachineReading) -> dict[str, Any]:
    devices = [device for name in reading.host.names("/sys/class/infiniband") if (device := _device(reading, name))]
    installer, libfabric = parse_installed(reading.host.read("/opt/amazon/efa_installed_packages") or "")
    return {
        "efa": {
            "devices": devices,
            "pci": _on_the_bus(reading),
            "domains": _domains(reading) if devices and reading.host.which("fi_info") else None,
            "installer": installer,
            "libfabric": libfabric,
            "plugins": _plugins(reading),
        }
    }


def _on_the_bus(reading: MachineReading) -> int | None:
    """Count the adapters, including those that no driver has taken."""
    if reading.devices is None:
        return None
    return sum(device.vendor == AMAZON and device.device in EFA_DEVICES for device in reading.devices)


def _device(reading: MachineReading, name: str) -> dict[str, Any] | None:
    """Leave out other RDMA devices: those with a driver of another name, or with none and of another vendor."""
    folder = f"/sys/class/infiniband/{name}"
    link = reading.host.link(f"{folder}/device/driver")
    driver = posixpath.basename(link) if link else None
    vendor = reading.text(f"{folder}/device/vendor")
    if driver != "efa" and (driver is not None or vendor != f"0x{AMAZON:04x}"):
        return None
    state = reading.text(f"{folder}/ports/1/state") or ""
    counters = f"{folder}/ports/1/hw_counters"
    values = {
        counter: reading.number(f"{counters}/{counter}")
        for counter in reading.host.names(counters)
        if counter != "lifespan"
    }
    return {"name": name, "driver": driver, "state": state.partition(":")[2].strip() or None, "counters": values}


def _domains(reading: MachineReading) -> list[str] | None:
    command = ["fi_info", "-p", "efa", "-t", "FI_EP_RDM"]
    done = reading.host.run(command, 30.0)
    if done.ok:
        return parse_domains(done.out)
    # -61 is ENODATA: libfabric searched and there is no device, which is an answer.
    if "-61" in done.out + done.err:
        return []
    reading.fault("efa.domains", f"fi_info: {done.complaint}")
    return None


def parse_domains(text: str) -> list[str]:
    """Parse the domains of `fi_info -p efa -t FI_EP_RDM`, each once: the fabrics `efa` and `efa-direct` both list all of
    them."""
    domains: dict[str, None] = {}
    for block in re.split(r"^provider:", text, flags=re.MULTILINE)[1:]:
        values = dict(re.findall(r"^\s+(\w+):\s*(\S+)", block, re.MULTILINE))
        if block.strip().split("\n", 1)[0].strip() == "efa" and values.get("type", "FI_EP_RDM") == "FI_EP_RDM":
            domains.setdefault(values.get("domain", ""))
    return [name for name in domains if name]


def parse_installed(text: str) -> tuple[str | None, str | None]:
    """Return the versions of the EFA installer and of libfabric from the list that the installer leaves."""
    installer = re.search(r"EFA installer version:\s*(\S+)", text)
    libfabric = re.search(r"\blibfabric1?(?:-aws)?[_-]v?(\d+\.\d+[0-9a-z.~]*)", text)
    return (installer[1] if installer else None, libfabric[1] if libfabric else None)


def _plugins(reading: MachineReading) -> list[str]:
    """Return one file of each folder that holds the plugin: two folders are two plugins, of which the loader takes either."""
    plugins: dict[str, str] = {}
    for folder in PLUGIN_FOLDERS:
        names = [name for name in reading.host.names(folder) if _PLUGIN.match(name)]
        if names:
            real = posixpath.realpath(str(reading.host.path(f"{folder}/{names[0]}")))
            plugins.setdefault(posixpath.dirname(real), f"{folder}/{names[0]}")
    return list(plugins.values())

"""Variables that reach jobs: found wherever a node may set them, with the line to go to."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_setup.agent.facts.environment import parse_environment_files, parse_prologs, parse_shell, parse_unit
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Done
from node_setup.agent.lint import lint
from tests.node_setup.machines import MACHINES
from tests.node_setup.recorded_host import Machine, build, facts_from


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export NCCL_DEBUG=INFO", [("NCCL_DEBUG", "INFO")]),
        ("NCCL_DEBUG=INFO", [("NCCL_DEBUG", "INFO")]),
        ("  export NCCL_DEBUG='INFO WARN'  # loud", [("NCCL_DEBUG", "INFO WARN")]),
        ('export A="x y" B=2 C', [("A", "x y"), ("B", "2")]),
        ('export A="say \\"hi\\""', [("A", 'say "hi"')]),
        ("# export NCCL_DEBUG=INFO", []),
        ("export A=x#y", [("A", "x#y")]),
        ("export A='# no comment'", [("A", "# no comment")]),
        ("export LD_LIBRARY_PATH=/opt/lib:$LD_LIBRARY_PATH", [("LD_LIBRARY_PATH", "/opt/lib:$LD_LIBRARY_PATH")]),
        ("if [ -e /x ]; then export FI_PROVIDER=efa; fi", [("FI_PROVIDER", "efa")]),
        ("test -e /x && export FI_PROVIDER=efa", [("FI_PROVIDER", "efa")]),
        ("declare -x OMP_NUM_THREADS=8", [("OMP_NUM_THREADS", "8")]),
        ("[ a = b ]", []),
        ("export A=", [("A", "")]),
    ],
)  # fmt: skip
def test_an_assignment_of_a_shell_is_read_as_the_shell_reads_it(line: str, expected: list[tuple[str, str]]) -> None:
    assert [(name, value) for _, name, value in parse_shell(line)] == expected


def test_a_unit_may_set_several_in_one_line_quoted_or_not() -> None:
    text = "[Service]\nEnvironment=NCCL_DEBUG=WARN \"FI_PROVIDER=efa tcp\" OMP_NUM_THREADS='8'\nExecStart=/x A=b\n"
    assert parse_unit(text) == [
        (2, "NCCL_DEBUG", "WARN"),
        (2, "FI_PROVIDER", "efa tcp"),
        (2, "OMP_NUM_THREADS", "8"),
    ]


def test_a_file_that_a_unit_names_is_followed_be_it_required_or_not_and_patterns_are_left() -> None:
    files = ("-/etc/a", " /etc/b ", "/etc/*.env", "", "%h/c")
    assert parse_environment_files("\n".join(f"EnvironmentFile={one}" for one in files)) == ["/etc/a", "/etc/b"]


STAT = "{pid} ({name}) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 {pid} 1 1\n"


def process(pid: int, name: str, command: str, environment: str, children: str = "") -> dict[str, str]:
    """Files of one process, whose children its second thread has started."""
    files = {"stat": STAT.format(pid=pid, name=name), "cmdline": command, "environ": environment}
    tasks = {f"task/{pid}/children": "", f"task/{pid + 1}/children": children}
    return {f"/proc/{pid}/{path}": text for path, text in {**files, **tasks}.items()}


def test_what_a_running_job_was_started_with_is_told_once_for_the_job_and_nothing_else_of_it(tmp_path: Path) -> None:
    secret = "AWS_SECRET_ACCESS_KEY=hush\0"
    files = {
        **process(100, "slurmstepd", "slurmstepd: [123.batch]", "NCCL_DEBUG=of slurmd's own\0", "200 201"),
        **process(200, "bash", "bash\0job.sh", f"{secret}NCCL_PROTO=simple\0", "300"),
        **process(201, "bash", "bash\0job.sh", f"{secret}NCCL_PROTO=simple\0"),
        **process(
            300, "python3", "python3\0-m\0trainer\0train", f"{secret}NCCL_PROTO=simple\0CUDA_VISIBLE_DEVICES=0\0"
        ),
        **process(400, "python3", "python3\0-mtrainer\0train", f"{secret}FI_PROVIDER=tcp\0broken"),
        **process(500, "python3", "python3\0other.py", "NCCL_ALGO=Ring\0"),
        **process(600, "python3", "python3\0of nobody", "NCCL_ALGO=Tree\0"),
    }
    machine = MACHINES["p5"]()
    machine.files.update(files)
    machine.programs[("nvidia-smi", "--query-compute-apps=pid")] = Done(0, "300\n500\n", "")
    found = facts_from(build(tmp_path, machine), Wanted())
    assert found["errors"] == []
    assert [tuple(one.values()) for one in found["environment"]] == [
        ("slurm job 123", None, "NCCL_PROTO", "simple"),
        ("slurm job 123", None, "CUDA_VISIBLE_DEVICES", "0"),
        ("running trainer process", None, "FI_PROVIDER", "tcp"),
        ("running gpu process", None, "NCCL_ALGO", "Ring"),
    ]
    told = {(one["where"], one["name"]) for one in lint(found)}
    assert ("slurm job 123", "NCCL_PROTO") in told
    assert ("slurm job 123", "CUDA_VISIBLE_DEVICES") not in told, "Slurm sets it for each job"


def test_prologs_are_read_from_slurms_configuration() -> None:
    text = "Prolog=/opt/slurm/prolog.sh # first\ntaskprolog = /opt/slurm/task.sh\nProlog=/etc/slurm/prolog.d/*\nEpilog=/e.sh\n"
    assert parse_prologs(text) == ["/opt/slurm/prolog.sh", "/opt/slurm/task.sh"]


def test_every_place_is_looked_at_and_only_variables_of_training_are_told(tmp_path: Path) -> None:
    files = {
        "/etc/environment": 'PATH="/usr/bin"\nNCCL_IB_DISABLE=1\n',
        "/etc/profile.d/efa.sh": "#!/bin/sh\nexport FI_EFA_USE_DEVICE_RDMA=1\n",
        "/etc/profile.d/ignored.csh": "setenv NCCL_DEBUG INFO\n",
        "/etc/nccl.conf": "# NCCL\nNCCL_DEBUG=INFO\n",
        "/etc/systemd/system/slurmd.service.d/override.conf": "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=0,1\n",
        "/usr/lib/systemd/system/kubelet.service": "[Service]\nEnvironment=HOME=/root OMP_NUM_THREADS=8\n",
        "/etc/systemd/system/slurmd.service": "EnvironmentFile=-/etc/default/slurmd\nEnvironmentFile=/opt/site.env\n",
        "/opt/site.env": "SITE=x\nFI_PROVIDER=tcp\n",
        "/etc/default/slurmd": "SLURMD_OPTIONS=-M\nHABANA_LOGS=/tmp\n",
        "/opt/slurm/etc/slurm.conf": "TaskProlog=/opt/slurm/task.sh\n",
        "/opt/slurm/task.sh": '#!/bin/bash\necho "export NCCL_PROTO=simple"\necho export TORCH_NCCL_BLOCKING_WAIT=1\n',
    }
    found = facts_from(build(tmp_path, Machine(files=files)), Wanted())["environment"]
    assert [(one["where"], one["line"], one["name"], one["value"]) for one in found] == [
        ("/etc/environment", 2, "NCCL_IB_DISABLE", "1"),
        ("/etc/default/slurmd", 2, "HABANA_LOGS", "/tmp"),
        ("/etc/profile.d/efa.sh", 2, "FI_EFA_USE_DEVICE_RDMA", "1"),
        ("/etc/nccl.conf", 2, "NCCL_DEBUG", "INFO"),
        ("/usr/lib/systemd/system/kubelet.service", 2, "OMP_NUM_THREADS", "8"),
        ("/opt/site.env", 2, "FI_PROVIDER", "tcp"),
        ("/etc/systemd/system/slurmd.service.d/override.conf", 2, "CUDA_VISIBLE_DEVICES", "0,1"),
        ("/opt/slurm/task.sh", 2, "NCCL_PROTO", "simple"),
        ("/opt/slurm/task.sh", 3, "TORCH_NCCL_BLOCKING_WAIT", "1"),
    ]

"""The scenes of `make prove`: test files that need daemons, nodes or long runs, and that run with nothing beside them."""

from __future__ import annotations

from dataclasses import dataclass

DAEMONS = frozenset({"engine", "engine_aws", "registry", "session_registry"})
"""Fixtures that start daemons: a test that asks for one belongs to a scene. `lab` sees to that itself."""


@dataclass(frozen=True)
class Scene:
    """Tests that run together, in one process, and share what is costly to start."""

    name: str
    real: str
    """What is real in it, for the table."""
    tests: tuple[str, ...]
    """Files, or FILE::FUNCTION where only some tests of a file need what is real."""


SCENES = (
    Scene(
        "stacks",
        "Pulumi engine, AWS provider, policy pack: seven stacks come up",
        ("tests/infra/test_stacks.py",),
    ),
    Scene(
        "stack-changes",
        "Pulumi engine, AWS provider: seven stacks change, and end",
        ("tests/infra/test_stacks_change.py",),
    ),
    Scene(
        "engine",
        "Pulumi engine, policy pack",
        (
            "tests/infra/test_components_channel.py",
            "tests/infra/test_policy_engine.py",
            "tests/infra/test_program.py",
            "tests/infra/test_stack_existing_eks.py",
            "tests/infra/test_stack_rewritten.py",
        ),
    ),
    Scene(
        "alerts",
        "promtool; Prometheus and Alertmanager watch ranks, S3 and a lab node, which get faults; Chromium shows the report",
        (
            "tests/infra/test_alert_rules.py::test_each_alert_fires_stays_quiet_and_clears",
            "tests/infra/test_alerts_live.py",
        ),
    ),
    Scene(
        "dashboards",
        "Prometheus and node_exporter scrape a run and a Slurm",
        ("tests/infra/test_dashboards_live.py",),
    ),
    Scene(
        "monitor",
        "Prometheus and Alertmanager with the monitor's files, node_exporter; AWS's answers are stand-ins",
        ("tests/infra/test_monitor_live.py",),
    ),
    Scene(
        "lab",
        "nodes as Linux namespaces: sshd, boots, crashes, links",
        (
            "tests/lab/test_boot.py",
            "tests/lab/test_lab_command.py",
            "tests/lab/test_nodes.py",
            "tests/lab/test_programs.py",
            "tests/lab/test_rehearsal_nodes.py",
        ),
    ),
    Scene(
        "ssh",
        "sshd of this machine, SSH, broken connections",
        (
            "tests/node_setup/test_allreduce_launch.py",
            "tests/node_setup/test_known_hosts.py",
            "tests/node_setup/test_protocol.py",
            "tests/node_setup/test_session.py",
            "tests/node_setup/test_transport.py",
            "tests/node_setup/test_transport_threads.py",
        ),
    ),
    Scene(
        "fleet",
        "lab nodes, SSH, the agent; hanging, full and lost nodes",
        (
            "tests/bench/test_same_settings.py::test_a_look_at_a_node_tells_what_is_so_from_what_is_not",
            "tests/node_setup/test_boot_equals_ssh.py",
            "tests/node_setup/test_fleet_lab.py",
        ),
    ),
    Scene(
        "node-kills",
        "lab nodes, the agent killed at any moment",
        ("tests/node_setup/test_kills_lab.py",),
    ),
    Scene(
        "builder",
        "container engine, BuildKit",
        (
            "tests/images/test_bake.py",
            "tests/images/test_builder.py",
            "tests/images/test_dockerfiles.py::test_gaudis_layers_go_on_a_vendors_image_whose_torch_stays",
            "tests/lab/test_engines.py",
            "tests/lab/test_rehearsal_images.py",
            "tests/launch/test_container_engine.py",
        ),
    ),
    Scene(
        "registry",
        "container registry, pushes that break off",
        (
            "tests/images/test_ecr.py::test_push_to_real_host_name_passes_with_a_token_renewed_once",
            "tests/images/test_inspection.py",
            "tests/images/test_registry_tags.py",
            "tests/images/test_push.py",
            "tests/images/test_read.py",
            "tests/images/test_read_back.py",
            "tests/images/test_registry.py",
        ),
    ),
    Scene(
        "image",
        "container engine, registry, the trainer's image; training in it",
        (
            "tests/images/test_context.py::test_builder_that_saw_the_folder_builds_what_is_in_it_now",
            "tests/images/test_proof_cache.py",
            "tests/images/test_proof_layers.py",
            "tests/images/test_proof_run.py",
            "tests/images/test_proof_same.py",
            "tests/images/test_proof_secrets.py",
            "tests/images/test_tasks.py::test_image_goes_from_its_plan_to_a_registry_and_into_record",
            "tests/images/test_verify.py::test_the_image_we_build_passes_and_a_fault_on_top_fails",
        ),
    ),
    Scene(
        "launch-local",
        "fab train on this machine: ranks, signals, kills",
        ("tests/launch/test_launch_local.py", "tests/trainer/test_node_launcher.py"),
    ),
    Scene(
        "slurm",
        "Slurm on lab nodes",
        ("tests/lab/test_slurm.py", "tests/lab/test_slurm_training.py"),
    ),
    Scene(
        "launch-slurm",
        "Slurm on lab nodes, fab train: lost nodes, notices, requeues",
        ("tests/launch/test_launch_slurm.py",),
    ),
    Scene(
        "own-slurm",
        "fab slurm-up: munge and Slurm of lab nodes that had none, fab train on them: a lost node, a new one",
        ("tests/launch/test_own_slurm.py",),
    ),
    Scene(
        "cloud-slurm",
        "Slurm of a stack on lab nodes: boots, notices, lost nodes, replaced nodes and controller, a group that goes to zero",
        ("tests/node_setup/test_cloud_slurm.py",),
    ),
    Scene(
        "rehearse-slurm",
        "fab rehearse --slurm: Pulumi engine, image, a stack's Slurm on lab nodes, a notice, a lost and replaced node",
        ("tests/lab/test_rehearsal_slurm.py::test_rehearsal_by_slurm_keeps_its_promises",),
    ),
    Scene(
        "launch-ssh",
        "lab nodes, SSH, fab train: lost nodes, a lost supervisor",
        ("tests/launch/test_launch_ssh.py",),
    ),
    Scene(
        "launch-kubernetes",
        "Kubernetes (API server, kubelets, containerd), fab train: lost nodes",
        ("tests/launch/test_launch_kubernetes.py",),
    ),
    Scene(
        "meshes",
        "ranks that exchange through gloo, on ten meshes: kills, and resumes on other meshes",
        ("tests/trainer/test_meshes.py",),
    ),
    Scene(
        "planner",
        "ranks that train on one to four processes: what each holds at its peak; a rank is killed 18 times: its goodput",
        ("tests/planner/test_planner_real_kills.py", "tests/planner/test_planner_real_memory.py"),
    ),
    Scene(
        "faults",
        "ranks, S3 server, metadata service: notices, damage, full disks, failing stores",
        (
            "tests/torture/test_faults_damage.py",
            "tests/torture/test_faults_disk.py",
            "tests/torture/test_faults_notice.py",
            "tests/torture/test_faults_ranks.py",
            "tests/torture/test_faults_store.py",
            "tests/torture/test_faults_two_jobs.py",
        ),
    ),
    Scene(
        "noise",
        "Slurm on lab nodes, fab train, S3 server: nodes, links, daemons, ranks and the store break, drawn from a seed",
        ("tests/torture/test_noise.py",),
    ),
    Scene(
        "kills",
        "ranks killed at any moment, in a folder and in S3",
        ("tests/torture/test_torture_kills.py",),
    ),
)


_SCENE_OF = {test: scene.name for scene in SCENES for test in scene.tests}


def scene_of(nodeid: str) -> str | None:
    """Name of the scene that a test belongs to; None for one that `make test` runs."""
    function = nodeid.partition("[")[0]
    return _SCENE_OF.get(function) or _SCENE_OF.get(function.partition("::")[0])

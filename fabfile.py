"""Collects the tasks of every room for `fab --list`; nothing is done here."""

# ruff: noqa: E402
import sys

from invoke.collection import Collection

# Invoke lets no command keep what it compiles, and each start would compile all rooms anew; python -B still means it.
sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)

from images import tasks as image_tasks
from infra import tasks as infra_tasks
from launch import tasks as launch_tasks
from lustrain.task import read_command_line_strictly
from node_setup import tasks as node_tasks
from node_setup.fleet.options import DEFAULTS
from planner import tasks as planner_tasks
from rehearsal import tasks as rehearsal_tasks

namespace = Collection()
every = (infra_tasks, image_tasks, node_tasks, planner_tasks, launch_tasks, rehearsal_tasks)
for one in (task for room in every for task in room.TASKS):
    namespace.add_task(one)
namespace.configure(dict(DEFAULTS))
read_command_line_strictly()

"""Collects the tasks of every room for `fab --list`; nothing is done here."""

from invoke.collection import Collection

from images import tasks as image_tasks
from infra import tasks as infra_tasks
from launch import tasks as launch_tasks
from lustrain.task import refuse_mistyped_flags
from node_setup import tasks as node_tasks
from node_setup.fleet.options import DEFAULTS
from rehearsal import tasks as rehearsal_tasks

namespace = Collection()
for one in (*infra_tasks.TASKS, *image_tasks.TASKS, *node_tasks.TASKS, *launch_tasks.TASKS, *rehearsal_tasks.TASKS):
    namespace.add_task(one)
namespace.configure(dict(DEFAULTS))
refuse_mistyped_flags()

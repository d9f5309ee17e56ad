"""Collects the tasks of every room for `fab --list`; nothing is done here."""

from invoke.collection import Collection

from rehearsal import tasks as rehearsal_tasks

namespace = Collection()
namespace.add_task(rehearsal_tasks.rehearse)

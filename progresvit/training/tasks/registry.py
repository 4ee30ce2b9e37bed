"""From a recipe to its task: built-in tasks by name, your own by import string."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, cast

from progresvit.io.imports import check_name, name_of, resolve
from progresvit.io.parse import parse

if TYPE_CHECKING:
    from progresvit.training.recipe import Recipe
    from progresvit.training.tasks.task import Task

TASKS = {
    "supervised": "progresvit.training.tasks.supervised:Supervised",
    "distillation": "progresvit.training.tasks.distillation:Distillation",
    "subnetworks": "progresvit.training.tasks.subnetworks:Subnetworks",
    "segmentation": "progresvit.training.tasks.segmentation:SegmentationTask",
    "dynabert": "progresvit.training.tasks.dynabert:DynaBERTDistillation",
    "dino": "progresvit.training.tasks.dino:DINO",
}

TASK_SECTIONS = ("mixing", "distillation", "task_options")
"""Sections of a recipe that only some tasks read."""


def check_task(name: str) -> None:
    """Refuse a name that is neither a built-in task nor an import string."""
    check_name(name, TASKS, what="task", example="my_module:MyTask")


def task_class(name: str) -> type[Task]:
    """The class of a task. Your own module may be in the working directory."""
    from progresvit.training.tasks.task import Task  # needs torch

    check_task(name)
    task = resolve(
        TASKS.get(name, name),
        what="task",
        kind="Task class",
        accepts=lambda value: isinstance(value, type) and issubclass(value, Task) and not inspect.isabstract(value),
    )
    return cast("type[Task]", task)


def task_name(task: type[Task]) -> str:
    """The inverse of :func:`task_class`."""
    path = name_of(task)
    return next((name for name, built_in in TASKS.items() if built_in == path), path)


def make_task(recipe: Recipe, replacement: Task | type[Task] | None = None) -> tuple[Recipe, Task]:
    """The task of a recipe with its options, and the recipe.

    A ``replacement`` replaces the task that the recipe names. The returned recipe then names the replacement, with the
    options of an instance, so that the run's folder describes the run.
    """
    if replacement is None:
        cls = task_class(recipe.task)
    else:
        cls = replacement if isinstance(replacement, type) else type(replacement)
        recipe = recipe.model_copy(update={"task": task_name(cls)})
    if replacement is None or isinstance(replacement, type):
        options = getattr(recipe, cls.options_key)
        if options is None:
            raise ValueError(f"the task {recipe.task} needs options; add the section {cls.options_key}: to the recipe.")
        task = cls(parse(cls.Options, options, origin=cls.options_key))
    else:
        task = replacement
        options = task.options.model_dump(mode="json") if cls.options_key == "task_options" else task.options
        recipe = recipe.model_copy(update={cls.options_key: options})
    _check_sections(recipe, cls)
    return recipe, task


def _check_sections(recipe: Recipe, cls: type[Task]) -> None:
    for key in TASK_SECTIONS:
        if key in (cls.options_key, *cls.sections):
            continue
        if getattr(recipe, key) != type(recipe).model_fields[key].get_default(call_default_factory=True):
            owners = [name for name in TASKS if key in ((other := task_class(name)).options_key, *other.sections)]
            remedy = f"set task: {' or '.join(owners)}, or " if owners else ""
            raise ValueError(f"{key}: the task {recipe.task} does not read this section; {remedy}remove it.")

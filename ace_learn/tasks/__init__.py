"""Data sets: prompts, each with its output contract and, where known, its gold answer."""

from ace_learn.tasks.base import Example, Message, Task
from ace_learn.tasks.chat import render_prompt
from ace_learn.tasks.config import TaskConfig, build_task
from ace_learn.tasks.json_object import JsonObject

__all__ = ["Example", "JsonObject", "Message", "Task", "TaskConfig", "build_task", "render_prompt"]

"""Strategies and tasks that Python code passes, in place of the names in a config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from experiments.command import factories
from experiments.command.factories import ALGORITHM, TASK, Factory, FactoryKind

if TYPE_CHECKING:  # a bad request need not import jax
    from experiments.tasks.task import Task
    from syncalgos import Strategy


@dataclass(frozen=True)
class Objects:
    """The objects of a run; a config names `factories.YOUR_OWN` in place of each.

    Attributes:
        strategy: the strategy, or its factory; None: the config names the algorithm.
        task: the task, or its factory; None: the config names the task.
    """

    strategy: Union["Strategy", Callable[..., "Strategy"], None] = None
    task: Union["Task", Callable[..., "Task"], None] = None

    def find_factory(self, kind: FactoryKind, name: str) -> Callable[..., Any]:
        """Returns the factory of an algorithm or of a task.

        Args:
            kind: which of both.
            name: the name in the config.

        Raises:
            BadRequest: there is no such factory.
        """
        passed_object = self._find(kind)
        if passed_object is None:
            return factories.find_function(kind, name)
        if callable(passed_object):
            return passed_object
        # The config may still have the arguments of the algorithm that it names.
        return lambda **_: passed_object

    def describe(self, kind: FactoryKind, name: str) -> Factory:
        """Describes the factory of an algorithm or of a task; see `find_factory`."""
        passed_object = self._find(kind)
        if passed_object is None:
            return factories.describe_factory(kind, name)
        if callable(passed_object):
            return factories.of_function(kind, name, passed_object)
        return factories.of_function(kind, name, lambda: passed_object)

    def describe_both(self, algo: str, task: str) -> list[Factory]:
        """Describes the algorithm and the task of a run, by their names."""
        return [self.describe(ALGORITHM, algo), self.describe(TASK, task)]

    def _find(self, kind: FactoryKind) -> Any:
        """Returns the object in place of an algorithm or a task; None if none is."""
        return self.strategy if kind is ALGORITHM else self.task

    @property
    def has_factory(self) -> bool:
        """Whether the strategy is made by a factory, which takes numbers."""
        return callable(self.strategy)


NO_OBJECTS = Objects()

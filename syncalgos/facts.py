"""Facts of an algorithm that its functions do not show, declared at its factory."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Facts(NamedTuple):
    """The properties of an algorithm that its functions do not show.

    Attributes:
        late: local steps until a message is used; 0: the workers wait for it.
        unit_steps: whether entries move by about the learning rate, whatever the
            gradient, as with Adam. The rate for such an optimizer is then the default.
        own_momentum: whether a momentum of its own takes the place of the inner
            optimizer's.
    """

    late: int = 0
    unit_steps: bool = False
    own_momentum: bool = False

    @classmethod
    def of(cls, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> "Facts":
        """Returns what an algorithm declares of itself.

        Args:
            factory: the algorithm's.
            arguments: of the factory, by name; others have their defaults.
        """
        parameters = inspect.signature(factory).parameters.values()
        arguments = {p.name: p.default for p in parameters} | {**arguments}
        if (facts := getattr(factory, "facts", None)) is not None:
            return facts(**arguments)
        delay = arguments.get("delay")
        return cls(late=max(delay, 0) if type(delay) is int else 0)


def declares(facts: Callable[..., Facts]) -> Callable[[Factory], Factory]:
    """Declares the facts of an algorithm, as a decorator of its factory.

    Without it an algorithm has the default facts, but that a parameter `delay` of whole
    steps is taken for `late`.

    Args:
        facts: the factory's arguments by name -> its Facts.
    """

    def declared(factory: Factory) -> Factory:
        setattr(factory, "facts", facts)  # noqa: B010  a function has no such field
        return factory

    return declared

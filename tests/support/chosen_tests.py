"""The session's chosen tests: what one needs is made together with what others need."""


def chosen_values(request, name, **fixed):
    """The values of a parameter that chosen tests of this file have, in their order.

    Args:
        request: pytest's; of a fixture, only tests that use the fixture count.
        name: the parameter.
        given: the values that other parameters of the test must have.
    """
    items = [x for x in request.session.items if x.path == request.path]
    if request.fixturename:
        items = [x for x in items if request.fixturename in x.fixturenames]
    calls = [x.callspec.params for x in items if hasattr(x, "callspec")]
    return [x[name] for x in calls if name in x and fixed.items() <= x.items()]


def split_around(value, values, limit):
    """Cuts a list into parts of at most so many; returns the one with this value."""
    start = values.index(value) // limit * limit
    return values[start : start + limit]

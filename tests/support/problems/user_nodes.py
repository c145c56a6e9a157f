"""A class of a user's own that holds a tree."""

import jax


@jax.tree_util.register_pytree_node_class
class OpaqueNode:
    """Holds a tree; two of them cannot be compared."""

    def __init__(self, tree):
        self.tree = tree

    def tree_flatten(self):
        return (self.tree,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)

    def __eq__(self, other):
        raise AssertionError("two trees were compared")

    __hash__ = None  # type: ignore[assignment]

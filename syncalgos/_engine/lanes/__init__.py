"""Forms in which a device runs its lanes, which are the workers of that device."""

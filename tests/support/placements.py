"""Options of a trainer in one dictionary, from which a Placement is made."""

import dataclasses

from syncalgos import Placement

FIELDS = {field.name for field in dataclasses.fields(Placement)}


def placed(options):
    """Options for DataParallel, with those of a Placement in one."""
    placement_options = {k: x for k, x in options.items() if k in FIELDS}
    trainer_options = {k: x for k, x in options.items() if k not in placement_options}
    return trainer_options | {"placement": Placement(**placement_options)}

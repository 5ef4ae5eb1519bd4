"""Models on this machine: what there is to be had, getting it, and what was got."""

"""Pure values of the lab: what there is to compute, who may compute it, and what was decided."""

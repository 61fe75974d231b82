"""Room for who may be believed besides gradients: evidence per replica, votes on scalars, replicated owners."""

"""The only code that touches a host's private names. Adapters never import each other."""

"""`python -m ds_byzantine` is `ds-byzantine`."""

from __future__ import annotations

from ds_byzantine.cli.app import main

if __name__ == "__main__":
    main()

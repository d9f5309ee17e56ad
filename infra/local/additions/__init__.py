"""What moto lacks and the unmodified AWS provider needs; each module of this package mends one service.

moto looks a service up by the name of a `moto.<service>.models` module and a line in
`moto.backend_index.backend_url_patterns`; a missing action of a known service is a method set on its `*Response` class.
That leans on internals, hence the pin `moto==5.2.*`. Every module here has `install()` and says what it leaves out.
"""

from __future__ import annotations


def install() -> None:
    """Mend moto in this process, before its server starts."""

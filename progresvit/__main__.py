"""``python -m progresvit``, the same as the ``progresvit`` command."""

from progresvit.cli import app

app(prog_name="progresvit")

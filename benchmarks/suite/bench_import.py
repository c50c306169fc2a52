"""``import spattn`` in a fresh interpreter, with ``import numpy`` for comparison."""


class Import:
    """asv runs each string in a new interpreter."""

    def timeraw_import_spattn(self):
        return "import spattn"

    def timeraw_import_numpy(self):
        return "import numpy"

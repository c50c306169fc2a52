"""``import spattn`` in a fresh interpreter, beside ``import numpy``, which it cannot undercut."""


class Import:
    """asv runs each of these strings in an interpreter of its own."""

    def timeraw_import_spattn(self):
        return "import spattn"

    def timeraw_import_numpy(self):
        return "import numpy"

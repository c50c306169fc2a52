"""asv benchmarks, parametrised over the registry: a new pattern is measured without anybody editing this folder."""

from jaxspec.benchmarking.ceiling import copy_ceiling as copy_ceiling

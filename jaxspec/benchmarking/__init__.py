"""What `jaxspec bench` and `jaxspec tune` measure with."""

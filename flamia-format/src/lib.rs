//! Low-bit element and scale formats, block quantisers and the Hadamard rotation.

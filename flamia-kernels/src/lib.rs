//! Causally safe low-bit attention on packed documents: the CPU reference backend.

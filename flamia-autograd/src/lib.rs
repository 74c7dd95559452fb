//! A general autograd Function for tch, and low-bit attention on top of it.

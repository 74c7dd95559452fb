//! Programs that several tests compile.

use flamia_cuda::{Header, Source};

const FACTOR: Header = Header {
    name: "factor.cuh",
    text: "#pragma once\n__device__ inline float factor() { return FACTOR; }\n",
};

/// `x[i] *= FACTOR` for `i < n`.
pub const SCALE: Source = Source {
    name: "tests/scale.cu",
    text: r#"#include "factor.cuh"
extern "C" __global__ void scale(float *x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor();
}
"#,
    headers: &[FACTOR],
};

pub fn factor(value: u32) -> [(&'static str, String); 1] {
    [("FACTOR", value.to_string())]
}

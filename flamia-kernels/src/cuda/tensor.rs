//! Device memory as a caller hands it over: torch's tensors, or anybody else's.

/// Bytes of the widest load.
const VECTOR_BYTES: usize = 16;

/// A BF16 tensor `[tokens, heads, head_dim]` in device memory. Nothing is borrowed: whoever launches
/// vouches for the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Its name, for errors.
    pub name: &'static str,
    /// Address of the first element.
    pub address: u64,
    /// `[tokens, heads, head_dim]`.
    pub shape: [usize; 3],
    /// In elements.
    pub strides: [usize; 3],
}

/// Why a kernel cannot read a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// A shape that does not fit the other tensors.
    #[error("{tensor} has shape {found:?}, expected {expected:?} ([tokens, heads, head_dim])")]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// What the other tensors ask for.
        expected: [usize; 3],
        /// Its shape.
        found: [usize; 3],
    },
    /// Features that do not lie side by side.
    #[error(
        "{tensor} has strides {strides:?} (elements, [tokens, heads, head_dim]): the last one has to \
         be 1; call `contiguous` on it"
    )]
    Features {
        /// Which tensor.
        tensor: &'static str,
        /// Its strides.
        strides: [usize; 3],
    },
    /// Rows that a 16-byte load cannot start at.
    #[error(
        "{tensor} at address {address:#x} with strides {strides:?} (elements) has rows that do not \
         start at multiples of 16 bytes: let the address be one and the first two strides be \
         multiples of 8, or call `clone` on it with a contiguous format"
    )]
    Alignment {
        /// Which tensor.
        tensor: &'static str,
        /// Its address.
        address: u64,
        /// Its strides.
        strides: [usize; 3],
    },
}

impl DeviceTensor {
    /// A contiguous one.
    pub const fn packed(name: &'static str, address: u64, shape: [usize; 3]) -> Self {
        let [_, heads, head_dim] = shape;
        Self {
            name,
            address,
            shape,
            strides: [heads * head_dim, head_dim, 1],
        }
    }

    /// Whether kernels can read the tensor as it lies, or want it contiguous first.
    pub fn is_readable(&self) -> bool {
        self.row_strides(self.shape).is_ok()
    }

    /// The strides of tokens and heads in elements, if kernels can read the tensor and it has this
    /// shape. The stride of a dimension of one element says nothing and is not looked at.
    pub(crate) fn row_strides(&self, expected: [usize; 3]) -> Result<[i64; 2], TensorError> {
        let Self {
            name: tensor,
            address,
            shape,
            strides,
        } = *self;
        if shape != expected {
            return Err(TensorError::Shape {
                tensor,
                expected,
                found: shape,
            });
        }
        if strides[2] != 1 && shape[2] > 1 {
            return Err(TensorError::Features { tensor, strides });
        }
        let [tokens, heads] = [0, 1].map(|i| if shape[i] > 1 { strides[i] } else { 0 });
        let vector = VECTOR_BYTES / size_of::<half::bf16>();
        let is_aligned = address.is_multiple_of(VECTOR_BYTES as u64)
            && tokens.is_multiple_of(vector)
            && heads.is_multiple_of(vector);
        if !is_aligned {
            return Err(TensorError::Alignment {
                tensor,
                address,
                strides,
            });
        }
        // A stride past `i64` belongs to no memory.
        Ok([tokens, heads].map(|stride| i64::try_from(stride).unwrap_or(i64::MAX)))
    }
}

/// Device memory for results and intermediate ones, from the caller's allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Its address, a multiple of 16.
    pub address: u64,
    /// Its size.
    pub bytes: usize,
}

/// Scratch that does not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScratchError {
    /// Too little of it.
    #[error("{what} needs {needed} bytes of scratch, and got {found}: ask its layout for the size")]
    TooSmall {
        /// What it is for.
        what: &'static str,
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        found: usize,
    },
    /// At an address that bulk copies cannot start at.
    #[error("the scratch of {what} at {address:#x} does not start at a multiple of 16 bytes")]
    Alignment {
        /// What it is for.
        what: &'static str,
        /// Its address.
        address: u64,
    },
}

impl Scratch {
    /// The first `bytes` of it, and the rest. Parts are of whole cache lines, which keeps the
    /// alignment.
    pub(crate) fn split(&self, bytes: usize) -> (Self, Self) {
        let first = Self { bytes, ..*self };
        let rest = Self {
            address: self.address + bytes as u64,
            bytes: self.bytes - bytes,
        };
        (first, rest)
    }

    /// Checks it against what `what` needs.
    pub(crate) fn check(&self, what: &'static str, needed: usize) -> Result<(), ScratchError> {
        let Self { address, bytes } = *self;
        if bytes < needed {
            return Err(ScratchError::TooSmall {
                what,
                needed,
                found: bytes,
            });
        }
        if !address.is_multiple_of(VECTOR_BYTES as u64) {
            return Err(ScratchError::Alignment { what, address });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [usize; 3] = [5, 2, 64];

    #[test]
    fn strides_that_kernels_read_are_taken() {
        let packed = DeviceTensor::packed("q", 1 << 20, SHAPE);
        assert_eq!(packed.row_strides(SHAPE), Ok([128, 64]));
        // Q in a fused [tokens, 2 + 2 * 1, 64] projection, heads last to first is not asked for.
        let fused = DeviceTensor {
            strides: [4 * 64, 64, 1],
            address: packed.address + 128,
            ..packed
        };
        assert_eq!(fused.row_strides(SHAPE), Ok([256, 64]));
        let shared = DeviceTensor {
            strides: [64, 0, 1],
            ..packed
        };
        assert_eq!(shared.row_strides(SHAPE), Ok([64, 0]));
        let one = DeviceTensor {
            shape: [1, 2, 64],
            strides: [3, 64, 1],
            ..packed
        };
        assert_eq!(one.row_strides([1, 2, 64]), Ok([0, 64]));
    }

    #[test]
    fn what_kernels_would_misread_is_refused_with_its_numbers() {
        let packed = DeviceTensor::packed("q", 1 << 20, SHAPE);
        let refused = [
            (
                DeviceTensor {
                    shape: [5, 1, 64],
                    ..packed
                },
                "[5, 1, 64]",
            ),
            (
                DeviceTensor {
                    strides: [128, 1, 2],
                    ..packed
                },
                "[128, 1, 2]",
            ),
            (
                DeviceTensor {
                    strides: [132, 64, 1],
                    ..packed
                },
                "[132, 64, 1]",
            ),
            (
                DeviceTensor {
                    address: (1 << 20) + 8,
                    ..packed
                },
                "0x100008",
            ),
        ];
        for (tensor, told) in refused {
            let error = tensor.row_strides(SHAPE).unwrap_err().to_string();
            assert!(error.starts_with("q ") && error.contains(told), "{error}");
        }
    }

    #[test]
    fn scratch_is_checked() {
        let scratch = Scratch {
            address: 32,
            bytes: 100,
        };
        assert_eq!(scratch.check("q", 100), Ok(()));
        let error = scratch.check("q", 101).unwrap_err().to_string();
        assert!(error.contains("101") && error.contains("100"), "{error}");
        let crooked = Scratch {
            address: 40,
            ..scratch
        };
        let error = crooked.check("q", 1).unwrap_err().to_string();
        assert!(error.contains("0x28"), "{error}");
    }
}

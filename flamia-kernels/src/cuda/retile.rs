//! From one image of a quantised tensor to the other: bytes move, and no code changes.
//!
//! What a forward pass saves may be one image of each operand, half of what the passes read: a backward
//! pass makes the other one from it.

use flamia_cuda::{
    BuildError, Gpu, GpuError, Kernel, Launch, PARAMETERS_HEADER, Source, Stream, header,
    parameters,
};

use super::layout::{HeadDim, PaddedLayout};

/// The kernel's source.
pub const SOURCE: Source = Source {
    name: "flamia-kernels/src/cuda/retile.cu",
    text: include_str!("retile.cu"),
    headers: &[
        header!("layout.cuh"),
        header!("quads.cuh"),
        PARAMETERS_HEADER,
    ],
};

/// A CTA's threads, for one block of 32 slots.
const THREADS: u32 = 128;

parameters! {
    /// What the kernel takes.
    struct Parameters {
        from: u64,
        to: u64,
    }
}

/// An image of a quantised tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Image {
    /// [`PaddedLayout::row_byte`].
    Row,
    /// [`PaddedLayout::transposed_byte`].
    Transposed,
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Retiling {
    #[allow(missing_docs)]
    pub head_dim: HeadDim,
    /// What is made, from the other one.
    pub to: Image,
}

impl Retiling {
    /// All that there are.
    pub fn all() -> impl Iterator<Item = Self> {
        let images = |head_dim| [Image::Row, Image::Transposed].map(|to| Self { head_dim, to });
        [HeadDim::D64, HeadDim::D128].into_iter().flat_map(images)
    }

    /// The macros that [`SOURCE`] is compiled with.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = vec![
            ("HEAD_DIM", self.head_dim.get().to_string()),
            (
                "TO_TRANSPOSED",
                u8::from(self.to == Image::Transposed).to_string(),
            ),
            ("LAUNCH_THREADS", THREADS.to_string()),
        ];
        defines.extend(Parameters::defines());
        defines
    }
}

/// A kernel that was not built, or a launch that was refused.
#[derive(Debug, thiserror::Error)]
pub enum RetileError {
    #[allow(missing_docs)]
    #[error(transparent)]
    Build(#[from] BuildError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// The kernel on one GPU. Clones are the same kernel.
#[derive(Clone)]
pub struct Retiler {
    kernel: Kernel,
}

impl Retiler {
    /// Compiles and loads it, or finds it compiled.
    ///
    /// # Errors
    /// There is no compiler, or the GPU does not load the code.
    pub fn new(gpu: &Gpu, retiling: Retiling) -> Result<Self, RetileError> {
        let module = gpu.compile(&SOURCE, &retiling.defines())?;
        Ok(Self {
            kernel: module.kernel("retile")?,
        })
    }

    /// Makes the image at `to` from the one at `from`, both of `layout`. Waits for nothing, and can be
    /// captured. Blocks that belong to no document are moved like all others.
    ///
    /// # Errors
    /// The driver refuses the launch.
    ///
    /// # Safety
    /// - The stream is one of the kernel's GPU, and this value, or a clone, is kept until the work has
    ///   run (in a graph: until the last replay has).
    /// - The layout is of the head dimension that the kernel was made for.
    /// - Until then [`PaddedLayout::image_bytes`] at both addresses, multiples of 16, are valid memory
    ///   of that GPU, nothing else writes the one or touches the other, and they do not overlap.
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        from: u64,
        to: u64,
        layout: &PaddedLayout,
    ) -> Result<(), RetileError> {
        // The layout has seen that they fit.
        let ctas = u32::try_from(layout.heads() * layout.blocks()).unwrap_or(u32::MAX);
        if ctas > 0 {
            // SAFETY: the parameters are the kernel's, which the compiler compared field by field; the
            // caller vouches for the memory behind the addresses.
            unsafe {
                self.kernel.launch(
                    stream,
                    Launch::linear(ctas, THREADS),
                    (Parameters { from, to },),
                )?
            };
        }
        Ok(())
    }
}

//! The quantiser: one launch makes everything of an operand that the passes read.
//!
//! The numbers are those of the CPU's `hopper` profile, bit for bit: `quantise.cu` has them, and where
//! they lie is [`layout`](super::layout)'s matter.

use flamia_cuda::{
    BuildError, Gpu, GpuError, Kernel, Launch, PARAMETERS_HEADER, Source, Stream, header,
    parameters,
};

use super::layout::{HeadDim, LayoutError, PaddedLayout};
use super::tensor::{DeviceTensor, Scratch, ScratchError, TensorError};

/// The kernel's source.
pub const SOURCE: Source = Source {
    name: "flamia-kernels/src/cuda/quantise.cu",
    text: include_str!("quantise.cu"),
    headers: &[
        header!("block_rows.cuh"),
        header!("block_scale.cuh"),
        header!("e4m3.cuh"),
        header!("layout.cuh"),
        header!("ptx.cuh"),
        header!("quads.cuh"),
        PARAMETERS_HEADER,
    ],
};

/// A CTA's threads: two warps for the 32 tokens of a block.
const THREADS: u32 = 64;

/// Parts of a quantised operand start at multiples of this, the length of a cache line.
const PART_ALIGNMENT: usize = 128;

parameters! {
    /// What the kernel takes. Strides are in elements; addresses of what is not made are 0.
    struct Parameters {
        input: u64,
        output: u64,
        lse: u64,
        cu_seqlens: u64,
        row_image: u64,
        transposed_image: u64,
        scales: u64,
        folds: u64,
        row_sums: u64,
        lse2: u64,
        token_stride: i64,
        head_stride: i64,
        output_token_stride: i64,
        output_head_stride: i64,
        tokens: i32,
        documents: i32,
        heads: i32,
        slots: i32,
    }
}

/// What a launch makes of a tensor, beside its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Forms {
    /// The row image, for products over the head dimension: Q and K of a forward pass, V of a backward
    /// pass.
    Row,
    /// The transposed image, for products over tokens: V of a forward pass, Q and K of a backward pass.
    Transposed,
    /// Both.
    Both,
    /// Both, of dO, and what else a backward pass reads for each row: D, the row sums of its dequantised
    /// values times O, and LSE in base 2.
    BothWithRowSums,
}

impl Forms {
    /// All of them.
    pub const ALL: [Forms; 4] = [
        Forms::Row,
        Forms::Transposed,
        Forms::Both,
        Forms::BothWithRowSums,
    ];

    const fn has_row(self) -> bool {
        !matches!(self, Forms::Transposed)
    }

    const fn has_transposed(self) -> bool {
        !matches!(self, Forms::Row)
    }

    const fn has_row_sums(self) -> bool {
        matches!(self, Forms::BothWithRowSums)
    }
}

/// What a quantiser is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantisation {
    #[allow(missing_docs)]
    pub head_dim: HeadDim,
    /// Whether rows are rotated by the normalised Hadamard matrix first. Not for dO, whose D would be
    /// that of another O.
    pub hadamard: bool,
    #[allow(missing_docs)]
    pub forms: Forms,
}

impl Quantisation {
    /// All that there are.
    pub fn all() -> impl Iterator<Item = Self> {
        let head_dims = [HeadDim::D64, HeadDim::D128];
        let forms = move |forms| head_dims.map(|head_dim| (head_dim, forms));
        let hadamard = |(head_dim, forms)| {
            [false, true].map(|hadamard| Self {
                head_dim,
                hadamard,
                forms,
            })
        };
        let all = Forms::ALL.into_iter().flat_map(forms).flat_map(hadamard);
        all.filter(|quantisation| !quantisation.is_rotated_d())
    }

    const fn is_rotated_d(&self) -> bool {
        self.hadamard && self.forms.has_row_sums()
    }

    /// The macros that [`SOURCE`] is compiled with.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let flag = |value: bool| u8::from(value).to_string();
        let mut defines = vec![
            ("HEAD_DIM", self.head_dim.get().to_string()),
            ("HADAMARD", flag(self.hadamard)),
            ("ROW_IMAGE", flag(self.forms.has_row())),
            ("TRANSPOSED_IMAGE", flag(self.forms.has_transposed())),
            ("ROW_SUMS", flag(self.forms.has_row_sums())),
            ("LAUNCH_THREADS", THREADS.to_string()),
        ];
        defines.extend(Parameters::defines());
        defines
    }

    /// Where its results lie in their scratch, for a packed row of `tokens` rows in `documents`
    /// documents, empty ones included, and this many heads.
    ///
    /// # Errors
    /// There is no [`PaddedLayout`] for that.
    pub fn layout(
        &self,
        tokens: usize,
        documents: usize,
        heads: usize,
    ) -> Result<QuantisedLayout, LayoutError> {
        let padded = PaddedLayout::new(tokens, documents, heads, self.head_dim)?;
        let mut bytes = 0;
        let mut part = |exists: bool, len: usize| {
            exists.then(|| {
                let offset = bytes;
                bytes += len.next_multiple_of(PART_ALIGNMENT);
                offset
            })
        };
        let (image, table) = (padded.image_bytes(), padded.block_table_bytes());
        Ok(QuantisedLayout {
            row_image: part(self.forms.has_row(), image),
            transposed_image: part(self.forms.has_transposed(), image),
            row_sums: part(self.forms.has_row_sums(), padded.slot_table_bytes()),
            lse2: part(self.forms.has_row_sums(), padded.slot_table_bytes()),
            scales: part(true, table).unwrap_or_default(),
            folds: part(true, table).unwrap_or_default(),
            bytes,
            padded,
        })
    }
}

/// Where the parts of a quantised tensor lie in its scratch, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantisedLayout {
    padded: PaddedLayout,
    row_image: Option<usize>,
    transposed_image: Option<usize>,
    row_sums: Option<usize>,
    lse2: Option<usize>,
    scales: usize,
    folds: usize,
    bytes: usize,
}

impl QuantisedLayout {
    /// What its images and tables look like.
    pub const fn padded(&self) -> &PaddedLayout {
        &self.padded
    }

    /// Bytes of scratch that it takes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The addresses in scratch that starts at `address`.
    pub fn at(&self, address: u64) -> Quantised {
        let place = |offset: usize| address + offset as u64;
        Quantised {
            row_image: self.row_image.map(place),
            transposed_image: self.transposed_image.map(place),
            row_sums: self.row_sums.map(place),
            lse2: self.lse2.map(place),
            scales: place(self.scales),
            folds: place(self.folds),
        }
    }
}

/// Addresses of a quantised tensor in device memory.
///
/// Written are the blocks that hold rows of a document, whole: past a document's end, codes and D are
/// 0, and LSE is +∞. All other slots are left as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantised {
    /// Codes, [`PaddedLayout::row_byte`]. A block with a NaN or an infinity has all codes 0x7F.
    pub row_image: Option<u64>,
    /// The same codes, [`PaddedLayout::transposed_byte`].
    pub transposed_image: Option<u64>,
    /// D, `f32` `[heads, slots]`.
    pub row_sums: Option<u64>,
    /// LSE in base 2, `f32` `[heads, slots]`.
    pub lse2: Option<u64>,
    /// What the codes of a block are multiplied with, `f32` `[heads, blocks]`: 2^e, at least 2^-96; 0
    /// for a block of zeros, and NaN for one with a NaN or an infinity.
    pub scales: u64,
    /// The exponents to fold into the other operand of a product over tokens, `f32` `[heads, blocks]`:
    /// e, and -96, the smallest, where the scale is 0 or NaN.
    pub folds: u64,
}

/// A quantiser that was not built, or a launch that was refused.
#[derive(Debug, thiserror::Error)]
pub enum QuantiseError {
    #[allow(missing_docs)]
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    /// D of a rotated dO.
    #[error("D is made of dO as it is: quantise dO without the Hadamard rotation")]
    RotatedRowSums,
    /// O and LSE are for D, and D needs O.
    #[error("{}", if *.is_given {
        "this quantiser makes no D, and was given O and LSE: leave them out, or ask for \
         `BothWithRowSums`"
    } else {
        "D = rowsum(dO * O) and LSE in base 2 need O and LSE, the results of the forward pass"
    })]
    Output {
        /// Whether they were given.
        is_given: bool,
    },
    #[allow(missing_docs)]
    #[error(transparent)]
    Build(#[from] BuildError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// What a forward pass made of the operands whose gradients are asked for.
#[derive(Clone, Copy, Debug)]
pub struct ForwardOutput {
    /// O, of dO's shape.
    pub o: DeviceTensor,
    /// Address of LSE, natural logarithms, `f32` `[heads, tokens]`.
    pub lse: u64,
}

/// What a launch reads.
#[derive(Clone, Copy, Debug)]
pub struct QuantiseCall {
    /// The tensor to quantise.
    pub input: DeviceTensor,
    /// The forward pass's results, where D is asked for.
    pub output: Option<ForwardOutput>,
    /// Address of the `documents + 1` boundaries, `i32`, as `flamia_sched::Documents` has them.
    pub cu_seqlens: u64,
    /// Documents, empty ones included.
    pub documents: usize,
}

/// The quantiser kernel on one GPU. Clones are the same kernel.
#[derive(Clone)]
pub struct Quantiser {
    kernel: Kernel,
    quantisation: Quantisation,
}

impl Quantiser {
    /// Compiles and loads it, or finds it compiled.
    ///
    /// # Errors
    /// There is no compiler, the GPU does not load the code, or what is asked for makes no sense.
    pub fn new(gpu: &Gpu, quantisation: Quantisation) -> Result<Self, QuantiseError> {
        if quantisation.is_rotated_d() {
            return Err(QuantiseError::RotatedRowSums);
        }
        let module = gpu.compile(&SOURCE, &quantisation.defines())?;
        Ok(Self {
            kernel: module.kernel("quantise")?,
            quantisation,
        })
    }

    /// What it was compiled for.
    pub const fn quantisation(&self) -> &Quantisation {
        &self.quantisation
    }

    /// Quantises a tensor into `scratch`, whose size and parts [`Quantisation::layout`] tells, and
    /// returns the addresses. Waits for nothing, and can be captured: the grid depends on shapes
    /// alone, and documents are read on the GPU. Boundaries that no packed row has leave arbitrary codes,
    /// and touch nothing else.
    ///
    /// # Errors
    /// A tensor or the scratch does not fit, or the driver refuses the launch.
    ///
    /// # Safety
    /// - The stream is one of the quantiser's GPU, and this value, or a clone, is kept until the work
    ///   has run (in a graph: until the last replay has).
    /// - Until then the tensors, the boundaries and the scratch are valid memory of that GPU of the
    ///   size they claim, and nothing else writes what is read or touches the scratch.
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        call: &QuantiseCall,
        scratch: Scratch,
    ) -> Result<Quantised, QuantiseError> {
        // SAFETY: the caller's word.
        unsafe { self.launch_as(stream, call, scratch, false) }
    }

    /// As [`Quantiser::launch`], and starts while another quantiser, given to the stream just before, is
    /// still at its last blocks. From compute capability 9.0 on.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there; and that quantiser does not write what this one reads, nor touch its scratch.
    pub unsafe fn launch_after(
        &self,
        stream: Stream<'_>,
        call: &QuantiseCall,
        scratch: Scratch,
    ) -> Result<Quantised, QuantiseError> {
        // SAFETY: the caller's word.
        unsafe { self.launch_as(stream, call, scratch, true) }
    }

    unsafe fn launch_as(
        &self,
        stream: Stream<'_>,
        call: &QuantiseCall,
        scratch: Scratch,
        starts_early: bool,
    ) -> Result<Quantised, QuantiseError> {
        let QuantiseCall {
            input,
            output,
            cu_seqlens,
            documents,
        } = *call;
        let [tokens, heads, _] = input.shape;
        let layout = self.quantisation.layout(tokens, documents, heads)?;
        scratch.check(input.name, layout.bytes())?;
        let shape = [tokens, heads, self.quantisation.head_dim.get()];
        let [token_stride, head_stride] = input.row_strides(shape)?;
        if output.is_some() != self.quantisation.forms.has_row_sums() {
            let is_given = output.is_some();
            return Err(QuantiseError::Output { is_given });
        }
        let output_strides = output.map(|output| output.o.row_strides(shape));
        let output_strides = output_strides.transpose()?;
        let [output_token_stride, output_head_stride] = output_strides.unwrap_or_default();

        let quantised = layout.at(scratch.address);
        let padded = layout.padded();
        // The layout has seen that these fit.
        let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let parameters = Parameters {
            input: input.address,
            output: output.map_or(0, |output| output.o.address),
            lse: output.map_or(0, |output| output.lse),
            cu_seqlens,
            row_image: quantised.row_image.unwrap_or_default(),
            transposed_image: quantised.transposed_image.unwrap_or_default(),
            scales: quantised.scales,
            folds: quantised.folds,
            row_sums: quantised.row_sums.unwrap_or_default(),
            lse2: quantised.lse2.unwrap_or_default(),
            token_stride,
            head_stride,
            output_token_stride,
            output_head_stride,
            tokens: number(tokens),
            documents: number(documents),
            heads: number(heads),
            slots: number(padded.slots()),
        };
        let ctas = padded.heads() * padded.blocks();
        if tokens > 0 && documents > 0 && ctas > 0 {
            let launch = Launch {
                starts_early,
                ..Launch::linear(number(ctas).unsigned_abs(), THREADS)
            };
            // SAFETY: the parameters are the kernel's, which the compiler compared field by field;
            // every address in them is the caller's, who vouches for the memory behind it, and the
            // scratch was checked to hold what the kernel writes.
            unsafe { self.kernel.launch(stream, launch, (parameters,))? };
        }
        Ok(quantised)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_apart_and_are_aligned() {
        for forms in Forms::ALL {
            let quantisation = Quantisation {
                head_dim: HeadDim::D64,
                hadamard: false,
                forms,
            };
            let layout = quantisation.layout(37, 3, 5).unwrap();
            let padded = layout.padded();
            let at = layout.at(1 << 12);
            let mut parts = vec![
                (at.scales, padded.block_table_bytes()),
                (at.folds, padded.block_table_bytes()),
            ];
            parts.extend(at.row_image.map(|part| (part, padded.image_bytes())));
            parts.extend(at.transposed_image.map(|part| (part, padded.image_bytes())));
            let tables = [at.row_sums, at.lse2].into_iter().flatten();
            parts.extend(tables.map(|part| (part, padded.slot_table_bytes())));
            let images =
                usize::from(at.row_image.is_some()) + usize::from(at.transposed_image.is_some());
            assert_eq!(
                images,
                if forms.has_row() && forms.has_transposed() {
                    2
                } else {
                    1
                }
            );
            parts.sort();
            let mut end = 1 << 12;
            for (start, len) in parts {
                assert!(start >= end && start.is_multiple_of(PART_ALIGNMENT as u64));
                end = start + len as u64;
            }
            assert!(end <= (1 << 12) + layout.bytes() as u64);
        }
    }
}

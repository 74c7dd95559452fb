//! Matrices as codes and scales in groups of consecutive values along either axis.
//!
//! [`MxTensor`] is MXFP8 and MXFP4 (1x32), and with one group per row the tensor of per-token or
//! per-key exponents. [`Nvfp4Tensor`] is NVFP4 (1x16). Bytes are as in torchao's `MXTensor` and
//! `NVFP4Tensor` and in cuDNN's block-scaled tensors, so that theirs can be read and ours be handed
//! over.

mod quantize;
mod shape;

pub use shape::{Axis, GroupShape, MX_GROUP};

use crate::e4m3::E4M3;
use crate::exponent::Element;
use crate::layout::{LayoutError, ScaleLayout, to_atoms, to_dense};
use crate::packed::unpack;
use crate::ue4m3::Ue4m3;
use crate::ue8m0::Ue8m0;

/// A matrix of E4M3 or E2M1 codes with a power-of-two scale per group.
pub type MxTensor = GroupedTensor<Ue8m0>;

/// A matrix of E2M1 codes with a UE4M3 scale per group.
pub type Nvfp4Tensor = GroupedTensor<Ue4m3>;

/// A matrix as codes and one scale per group of consecutive values.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedTensor<S> {
    /// Rows, columns and groups.
    pub shape: GroupShape,
    /// `[lines, line_bytes]`: an E4M3 code per byte, or two E2M1 codes, the lower index in the low
    /// nibble.
    pub codes: Vec<u8>,
    /// `[lines, line_groups]`.
    pub scales: Vec<S>,
    /// NVFP4's second scale, a factor on all values. 1 in everything that this crate quantises: a
    /// scale taken from the whole tensor couples tokens and documents.
    pub tensor_scale: f32,
}

/// The scale formats of a [`GroupedTensor`].
pub trait Scale: Copy + sealed::Sealed {
    /// The exact scale.
    fn to_f32(self) -> f32;
    /// The stored byte.
    fn to_byte(self) -> u8;
    /// The scale with this stored byte, `None` if there is none.
    fn from_byte(byte: u8) -> Option<Self>;
}

impl Scale for Ue8m0 {
    fn to_f32(self) -> f32 {
        Ue8m0::to_f32(self)
    }
    fn to_byte(self) -> u8 {
        self.0
    }
    fn from_byte(byte: u8) -> Option<Self> {
        Some(Ue8m0(byte))
    }
}

impl Scale for Ue4m3 {
    fn to_f32(self) -> f32 {
        Ue4m3::to_f32(self)
    }
    fn to_byte(self) -> u8 {
        self.0
    }
    fn from_byte(byte: u8) -> Option<Self> {
        (byte <= Ue4m3::NAN.0).then_some(Ue4m3(byte))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Ue8m0 {}
    impl Sealed for super::Ue4m3 {}
}

impl<S: Scale> GroupedTensor<S> {
    /// Reads a tensor that another library has quantised.
    ///
    /// - torchao: `codes` are `qdata`'s bytes and `scales` are `scale`'s, [`ScaleLayout::Atoms`] if
    ///   `is_swizzled_scales`. Leading dimensions count as rows. Its transposed tensors are
    ///   [`Axis::Columns`], given the bytes in memory order.
    /// - cuDNN: the scales of one matrix (of a batch and head) in its `F8_128x4` reordering are
    ///   [`ScaleLayout::Atoms`].
    ///
    /// The tensor scale is 1; [`with_tensor_scale`](Self::with_tensor_scale) sets another.
    ///
    /// # Errors
    /// Every [`LayoutError`]: lengths that contradict the shape, a negative UE4M3 scale, or groups
    /// of no values.
    pub fn from_bytes(
        shape: GroupShape,
        codes: &[u8],
        scales: &[u8],
        layout: ScaleLayout,
    ) -> Result<Self, LayoutError> {
        if shape.group == 0 {
            return Err(LayoutError::EmptyGroup);
        }
        if codes.len() != shape.code_bytes() {
            return Err(LayoutError::Codes {
                lines: shape.lines(),
                line: shape.line(),
                bits: shape.element.bits(),
                expected: shape.code_bytes(),
                found: codes.len(),
            });
        }
        let scales = to_dense(scales, shape.lines(), shape.line_groups(), layout)?
            .into_iter()
            .enumerate()
            .map(|(index, byte)| S::from_byte(byte).ok_or(LayoutError::SignedScale { index, byte }))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shape,
            codes: codes.to_vec(),
            scales,
            tensor_scale: 1.0,
        })
    }

    /// The same codes and scales with a factor on all values, torchao's `per_tensor_scale`.
    pub fn with_tensor_scale(self, tensor_scale: f32) -> Self {
        Self {
            tensor_scale,
            ..self
        }
    }

    /// The scales' bytes, for the library that is to read them. The codes' bytes are
    /// [`codes`](Self::codes).
    ///
    /// # Errors
    /// [`LayoutError::Scales`] if the fields have been changed so that the scales do not fit the
    /// shape.
    pub fn scale_bytes(&self, layout: ScaleLayout) -> Result<Vec<u8>, LayoutError> {
        let dense: Vec<u8> = self.scales.iter().map(|scale| scale.to_byte()).collect();
        let (lines, groups) = (self.shape.lines(), self.shape.line_groups());
        match layout {
            ScaleLayout::Dense => to_dense(&dense, lines, groups, layout),
            ScaleLayout::Atoms => to_atoms(&dense, lines, groups),
        }
    }

    /// The values that codes and scales stand for, row-major `[rows, cols]`.
    ///
    /// A value is the code times the product of both scales, which is exact unless there is a tensor
    /// scale other than 1.
    pub fn dequantize(&self) -> Vec<f32> {
        let shape = &self.shape;
        let mut values = vec![0.0; shape.rows * shape.cols];
        if values.is_empty() {
            return values;
        }
        let lines = self.codes.chunks_exact(shape.line_bytes());
        let scales = self.scales.chunks_exact(shape.line_groups());
        for (line, (codes, scales)) in lines.zip(scales).enumerate() {
            let mut set = |index: usize, code: f32| {
                let unit = self.tensor_scale * scales[index / shape.group].to_f32();
                values[shape.place(line, index)] = code * unit;
            };
            match shape.element {
                Element::E4M3 => (0..shape.line())
                    .zip(codes)
                    .for_each(|(index, &code)| set(index, E4M3(code).to_f32())),
                Element::E2M1 => (0..shape.line())
                    .zip(unpack(codes))
                    .for_each(|(index, code)| set(index, code.to_f32())),
            }
        }
        values
    }
}

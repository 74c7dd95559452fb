//! Quantising into groups.

use super::{Axis, GroupShape, GroupedTensor, MxTensor, Nvfp4Tensor};
use crate::blocks::{encode_group, encode_nvfp4};
use crate::code::Code;
use crate::e2m1::E2M1;
use crate::e4m3::E4M3;
use crate::exponent::{Element, ExponentRule};

impl MxTensor {
    /// Quantises a row-major matrix. Gives the bits of [`round_group`](crate::round_group) on each
    /// group.
    ///
    /// A matrix of one document: groups down the columns are counted from its first row.
    ///
    /// # Panics
    /// If `x` does not hold the shape's values, or its groups hold none.
    pub fn quantize(x: &[f32], shape: GroupShape, rule: ExponentRule) -> Self {
        match shape.element {
            Element::E4M3 => Self::from_groups(x, shape, |group, codes: &mut [E4M3]| {
                encode_group(group, codes, rule)
            }),
            Element::E2M1 => Self::from_groups(x, shape, |group, codes: &mut [E2M1]| {
                encode_group(group, codes, rule)
            }),
        }
    }
}

impl Nvfp4Tensor {
    /// Quantises a row-major matrix of `cols` columns, with a tensor scale of 1. Gives the bits of
    /// [`nvfp4_round_in_place`](crate::nvfp4_round_in_place) on each group; the last one of a line
    /// may be shorter here.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows of `cols` values.
    pub fn quantize(x: &[f32], cols: usize, axis: Axis) -> Self {
        assert!(
            cols > 0 && x.len().is_multiple_of(cols),
            "{} values are no whole number of rows of {cols}",
            x.len()
        );
        let shape = GroupShape::nvfp4(x.len() / cols, cols, axis);
        Self::from_groups(x, shape, encode_nvfp4)
    }
}

impl<S> GroupedTensor<S> {
    /// Encodes group after group and stores line after line.
    fn from_groups<C: Code>(
        x: &[f32],
        shape: GroupShape,
        encode: impl Fn(&[f32], &mut [C]) -> S,
    ) -> Self {
        assert!(
            shape.group > 0 && shape.rows.checked_mul(shape.cols) == Some(x.len()),
            "{} values for {shape:?}",
            x.len()
        );
        let mut bytes = Vec::with_capacity(shape.code_bytes());
        let mut scales = Vec::with_capacity(shape.lines() * shape.line_groups());
        let mut values = vec![0.0; shape.line()];
        let mut codes = vec![C::ZERO; shape.line()];
        for line in 0..shape.lines() {
            for (index, value) in values.iter_mut().enumerate() {
                *value = x[shape.place(line, index)];
            }
            let groups = values.chunks(shape.group);
            scales.extend(
                groups
                    .zip(codes.chunks_mut(shape.group))
                    .map(|(group, codes)| encode(group, codes)),
            );
            C::store(&codes, &mut bytes);
        }
        Self {
            shape,
            codes: bytes,
            scales,
            tensor_scale: 1.0,
        }
    }
}

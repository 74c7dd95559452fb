//! Tensors of codes and scales: numpy's groups, and the in-place functions with which they share
//! every bit.

mod support;

use flamia_format::packed::unpack;
use flamia_format::{
    Axis, E4M3, Element, ExponentRule, GroupShape, MxTensor, Nvfp4Tensor, PerTensor, ScaleLayout,
    Ue4m3, Ue8m0, nvfp4_round_in_place, round_columns, round_group, round_per_tensor,
};
use proptest::prelude::*;
use support::groups::{mx_groups, nvfp4_groups};
use support::{assert_same, e4m3_values, same};

fn unpacked(element: Element, bytes: &[u8]) -> Vec<u8> {
    match element {
        Element::E4M3 => bytes.to_vec(),
        Element::E2M1 => unpack(bytes).map(|code| code.0).collect(),
    }
}

#[test]
fn mx_codes_equal_numpys() {
    for group in mx_groups() {
        for (axis, rows, cols) in [(Axis::Rows, 1, 32), (Axis::Columns, 32, 1)] {
            let shape = match group.element {
                Element::E4M3 => GroupShape::mxfp8(rows, cols, axis),
                Element::E2M1 => GroupShape::mxfp4(rows, cols, axis),
            };
            let tensor = MxTensor::quantize(&group.values, shape, group.rule);
            assert_eq!(tensor.scales, [Ue8m0(group.scale)]);
            assert_eq!(unpacked(group.element, &tensor.codes), group.codes);
            assert_same(&tensor.dequantize(), &group.decoded());
        }
    }
}

#[test]
fn nvfp4_codes_equal_numpys() {
    for group in nvfp4_groups() {
        for (axis, cols) in [(Axis::Rows, 16), (Axis::Columns, 1)] {
            let tensor = Nvfp4Tensor::quantize(&group.values, cols, axis);
            assert_eq!(tensor.scales, [Ue4m3(group.scale)]);
            assert_eq!(unpacked(Element::E2M1, &tensor.codes), group.codes);
            assert_same(&tensor.dequantize(), &group.decoded());
        }
    }
}

/// Values of many magnitudes, some zero and a few poisoned.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => (-4f32..4.0, -8i32..8).prop_map(|(v, e)| v * 2f32.powi(e)),
        2 => any::<f32>(),
        2 => prop_oneof![Just(0.0f32), Just(-0.0)],
    ]
}

fn matrix(rows: usize, cols: usize) -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (0..=rows, 1..=cols).prop_flat_map(|(rows, cols)| {
        let values = prop::collection::vec(value(), rows * cols);
        (Just(rows), Just(cols), values)
    })
}

fn element() -> impl Strategy<Value = Element> {
    prop::sample::select(vec![Element::E4M3, Element::E2M1])
}

fn rule() -> impl Strategy<Value = ExponentRule> {
    prop::sample::select(vec![ExponentRule::Up, ExponentRule::Floor])
}

fn transposed(x: &[f32], cols: usize) -> Vec<f32> {
    (0..cols)
        .flat_map(|col| x.iter().skip(col).step_by(cols).copied())
        .collect()
}

fn mx_shape(rows: usize, cols: usize, axis: Axis, element: Element) -> GroupShape {
    match element {
        Element::E4M3 => GroupShape::mxfp8(rows, cols, axis),
        Element::E2M1 => GroupShape::mxfp4(rows, cols, axis),
    }
}

proptest! {
    #[test]
    fn mx_rows_equal_rounding_in_place((rows, cols, x) in matrix(5, 100), element in element(), rule in rule()) {
        let tensor = MxTensor::quantize(&x, mx_shape(rows, cols, Axis::Rows, element), rule);
        let mut in_place = x;
        let mut scales = Vec::new();
        for row in in_place.chunks_mut(cols) {
            scales.extend(row.chunks_mut(32).map(|group| round_group(group, element, rule)));
        }
        prop_assert_eq!(&tensor.scales, &scales);
        assert_same(&tensor.dequantize(), &in_place);
    }

    #[test]
    fn mx_columns_equal_rounding_in_place((rows, cols, x) in matrix(70, 9), element in element(), rule in rule()) {
        let tensor = MxTensor::quantize(&x, mx_shape(rows, cols, Axis::Columns, element), rule);
        let mut in_place = x;
        for (block, tile) in in_place.chunks_mut(32 * cols).enumerate() {
            let mut exponents = vec![Ue8m0(77); cols];
            round_columns(tile, tile.len() / cols, cols, cols, element, rule, &mut exponents);
            for (col, exponent) in exponents.into_iter().enumerate() {
                prop_assert_eq!(tensor.scales[col * rows.div_ceil(32) + block], exponent);
            }
        }
        assert_same(&tensor.dequantize(), &in_place);
    }

    /// Groups down the columns are groups along the rows of the transposed matrix, byte for byte.
    #[test]
    fn the_other_axis_is_the_transposed_matrix((rows, cols, x) in matrix(40, 40), element in element(), rule in rule()) {
        let down = MxTensor::quantize(&x, mx_shape(rows, cols, Axis::Columns, element), rule);
        let along = MxTensor::quantize(
            &transposed(&x, cols), mx_shape(cols, rows, Axis::Rows, element), rule);
        prop_assert_eq!(&down.codes, &along.codes);
        prop_assert_eq!(&down.scales, &along.scales);
        assert_same(&transposed(&down.dequantize(), cols), &along.dequantize());

        let down = Nvfp4Tensor::quantize(&x, cols, Axis::Columns);
        if rows > 0 {
            let along = Nvfp4Tensor::quantize(&transposed(&x, cols), rows, Axis::Rows);
            prop_assert_eq!(&down.codes, &along.codes);
            prop_assert_eq!(&down.scales, &along.scales);
        }
    }

    /// One exponent per token: a row's bits depend on that row alone.
    #[test]
    fn per_row_exponents_are_independent((rows, cols, x) in matrix(6, 50), element in element(), rule in rule()) {
        let tensor = MxTensor::quantize(&x, GroupShape::per_row(rows, cols, element), rule);
        prop_assert_eq!(tensor.scales.len(), rows);
        let values = tensor.dequantize();
        for (row, (x, values)) in x.chunks(cols).zip(values.chunks(cols)).enumerate() {
            let mut alone = x.to_vec();
            prop_assert_eq!(round_group(&mut alone, element, rule), tensor.scales[row]);
            assert_same(values, &alone);
        }
    }

    #[test]
    fn nvfp4_equals_rounding_in_place(rows in 0usize..5, groups in 1usize..5, x in prop::collection::vec(value(), 5 * 5 * 16)) {
        let cols = 16 * groups;
        let x = &x[..rows * cols];
        let tensor = Nvfp4Tensor::quantize(x, cols, Axis::Rows);
        let mut in_place = x.to_vec();
        nvfp4_round_in_place(&mut in_place, cols);
        assert_same(&tensor.dequantize(), &in_place);
        prop_assert!(x.chunks(16).zip(&tensor.scales)
            .all(|(group, scale)| scale.is_nan() == group.iter().any(|v| !v.is_finite())));
    }

    /// Bytes out and in again, in both layouts, odd lines included.
    #[test]
    fn bytes_round_trip((rows, cols, x) in matrix(40, 40), columns in any::<bool>(), element in element()) {
        let axis = if columns { Axis::Columns } else { Axis::Rows };
        let mx = MxTensor::quantize(&x, mx_shape(rows, cols, axis, element), ExponentRule::Up);
        let nv = Nvfp4Tensor::quantize(&x, cols, axis);
        for layout in [ScaleLayout::Dense, ScaleLayout::Atoms] {
            let scales = mx.scale_bytes(layout).unwrap();
            prop_assert_eq!(&MxTensor::from_bytes(mx.shape, &mx.codes, &scales, layout).unwrap(), &mx);
            let scales = nv.scale_bytes(layout).unwrap();
            prop_assert_eq!(&Nvfp4Tensor::from_bytes(nv.shape, &nv.codes, &scales, layout).unwrap(), &nv);
        }
    }

    /// The per-tensor scale by its definition: amax / 448, and the nearest code of each quotient.
    #[test]
    fn per_tensor_is_one_scale(x in prop::collection::vec(-4f32..4.0, 1..50), e in -60i32..60) {
        let x: Vec<f32> = x.iter().map(|&v| v * 2f32.powi(e)).collect();
        let tensor = PerTensor::quantize(&x);
        let amax = x.iter().fold(0.0, |amax: f32, v| amax.max(v.abs()));
        prop_assert_eq!(tensor.scale, amax / 448.0);
        let values = tensor.dequantize();
        for ((&x, &code), &value) in x.iter().zip(&tensor.codes).zip(&values) {
            prop_assume!(tensor.scale > 0.0);
            let quotient = f64::from(x) / f64::from(tensor.scale);
            let distance = |code: E4M3| (f64::from(code.to_f32()) - quotient).abs();
            let nearest = (0..=255).map(E4M3).filter(|code| !code.is_nan())
                .map(distance).fold(f64::INFINITY, f64::min);
            // Half-way cases may fall to either side through the quotient's own rounding.
            prop_assert!(distance(code) <= nearest * (1.0 + 1e-6));
            prop_assert_eq!(value, e4m3_values()[usize::from(code.0)] * tensor.scale);
        }
        let mut in_place = x;
        prop_assert_eq!(round_per_tensor(&mut in_place), tensor.scale);
        assert_same(&in_place, &values);
    }
}

#[test]
fn per_tensor_scales_at_the_ends() {
    for (x, scale, value) in [
        ([0.0, -0.0], 0.0, 0.0),
        // Too small for any scale.
        ([2f32.powi(-149), 0.0], 0.0, 0.0),
        ([f32::INFINITY, 1.0], f32::NAN, f32::NAN),
        ([1.0, f32::NAN], f32::NAN, f32::NAN),
    ] {
        let tensor = PerTensor::quantize(&x);
        assert!(same(tensor.scale, scale));
        assert_same(&tensor.dequantize(), &[value; 2]);
        let mut in_place = x;
        assert!(same(round_per_tensor(&mut in_place), scale));
        assert_same(&in_place, &[value; 2]);
    }
}

/// What makes it a leak: a large value anywhere moves every other one.
#[test]
fn a_large_value_moves_all_others_under_one_scale_only() {
    let mut x = vec![2f32.powi(-10); 64];
    let before = PerTensor::quantize(&x).dequantize();
    let shape = GroupShape::mxfp8(2, 32, Axis::Rows);
    let grouped = MxTensor::quantize(&x, shape, ExponentRule::Up).dequantize();
    x[63] = 1024.0;
    let after = PerTensor::quantize(&x).dequantize();
    assert!((before[0] - x[0]).abs() < 1e-9 && after[0] == 0.0);
    let grouped_after = MxTensor::quantize(&x, shape, ExponentRule::Up).dequantize();
    assert_eq!(grouped_after[..32], grouped[..32]);
}

#[test]
fn an_empty_matrix_has_no_groups() {
    for axis in [Axis::Rows, Axis::Columns] {
        let tensor = MxTensor::quantize(&[], GroupShape::mxfp4(0, 64, axis), ExponentRule::Up);
        assert_eq!((tensor.codes.len(), tensor.scales.len()), (0, 0));
        assert_eq!(tensor.dequantize(), [0.0; 0]);
    }
}

#[test]
#[should_panic(expected = "64 values for GroupShape")]
fn values_that_do_not_fit_the_shape_are_refused() {
    MxTensor::quantize(
        &[0.0; 64],
        GroupShape::mxfp8(3, 32, Axis::Rows),
        ExponentRule::Up,
    );
}
